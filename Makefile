# `make demo` and `make test` need Python 3.11 or newer and nothing else.
BOOTSTRAP_PYTHON ?= python3
# The Python version of the host that `make wheelhouse` collects for.
PYTHON ?= 3.12
PY := .venv/bin/python
SBOM ?= dist/sbom.cdx.json

.PHONY: help venv demo test adapters check wheelhouse env sbom audit compose-test gpu-shown clock integrity doors chaos soak clean

help:
	@echo 'make demo           judge the gallery of good and bad kernels on this machine'
	@echo 'make test           run the tests'
	@echo 'make adapters       test the adapters with the packages that they are for, which it fetches'
	@echo 'make check          formatting, lint, types and who imports whom'
	@echo 'make wheelhouse     collect wheels for a GPU host without a network (PYTHON=3.12)'
	@echo 'make env            the secrets of the compose stack, where .env lacks them'
	@echo 'make sbom           what is installed here, as CycloneDX (SBOM=dist/sbom.cdx.json)'
	@echo 'make audit          known holes in what is installed here (ARGS=--if-reachable: no failure without a network)'
	@echo 'make compose-test   bring the compose stack up and judge kernels with it (needs Docker)'
	@echo 'make gpu-shown      the whole fleet on this GPU: gallery, 300 mixed evaluations, figures'
	@echo 'make clock          the judge'\''s clock beside CUPTI, events, graphs and do_bench on this GPU'
	@echo 'make integrity      the corpus of cheats and controls (ARGS="--lane gpu" or "--lane cpu")'
	@echo 'make doors          what the HTTP door costs, and how quick it stays while 200 requests wait'
	@echo 'make chaos          the tests in which something is away for long'
	@echo 'make soak           20,000 evaluations while parts of the fleet are killed (MINUTES=3, ARGS="--lane gpu")'
	@echo 'make clean          remove what these made'

venv:
	@$(BOOTSTRAP_PYTHON) scripts/bootstrap.py

demo: venv
	@$(PY) examples/demo.py $(ARGS)

test: venv
	$(PY) -m pytest -n auto --dist loadfile -m 'not compose and not chaos' $(ARGS)

adapters: venv
	@$(PY) scripts/bootstrap.py adapters
	KQUEUE_REQUIRE_ADAPTERS=1 $(PY) -m pytest -k 'openenv or verifiers or gymnasium or traces' tests/integrations $(ARGS)

check: venv
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/pyright --pythonpath $(PY)
	.venv/bin/lint-imports --no-logo --no-cache

wheelhouse: venv
	@$(PY) scripts/bootstrap.py wheelhouse --python $(PYTHON)

env:
	@$(BOOTSTRAP_PYTHON) scripts/env.py

sbom: venv
	@mkdir -p $(dir $(SBOM))
	$(PY) -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible -o $(SBOM) $(PY)

audit: venv
	@$(PY) scripts/audit.py $(ARGS)

compose-test: venv
	$(PY) -m pytest -m compose tests/compose $(ARGS)

gpu-shown: venv
	$(PY) benchmarks/gpu_shown.py $(ARGS)

clock: venv
	$(PY) benchmarks/clock.py $(ARGS)

integrity: venv
	$(PY) tests/integrity/run.py $(ARGS)

doors: venv
	$(PY) benchmarks/doors.py $(ARGS)

chaos: venv
	$(PY) -m pytest -m chaos $(ARGS)

soak: venv
	$(PY) tests/chaos/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

clean:
	rm -rf .venv .adapters wheelhouse dist build .pytest_cache .ruff_cache
