# `make demo` and `make test` need Python 3.11 or newer and nothing else.
BOOTSTRAP_PYTHON ?= python3
# The Python version of the host that `make wheelhouse` collects for.
PYTHON ?= 3.12
PY := .venv/bin/python
SBOM ?= dist/sbom.cdx.json

.PHONY: help venv demo quick test adapters check words docs schemas site wheelhouse env sbom audit release compose-test gpu-gate bench real clock integrity build-bench http-cost nightly planted soak queue-bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## set up .venv, which other targets also do if necessary
	@$(BOOTSTRAP_PYTHON) scripts/bootstrap.py

demo: venv ## judge some good and bad kernels on this machine (ARGS=--all: the whole gallery)
	@$(PY) examples/demo.py $(ARGS)

# pytest prints the slowest tests. dist/*.xml has the seconds of each test.
PYTEST = mkdir -p dist && $(PY) -m pytest -n auto --durations=10 --durations-min=1 -o junit_duration_report=total

quick: venv ## run the tests that need no service, in about a minute
	$(PYTEST) --junitxml=dist/quick.xml --dist worksteal -m quick $(ARGS)

test: venv ## run the tests of the gate, in 7 to 11 minutes (ARGS='tests/store -k claim')
	$(PYTEST) --junitxml=dist/test.xml --dist loadfile --no-loadscope-reorder -m 'not nightly and not compose' $(ARGS)

nightly: venv site planted ## run the tests that are not in the gate, as root for network namespaces
	$(PYTEST) --junitxml=dist/nightly.xml --dist loadfile -m nightly $(ARGS)
	$(MAKE) soak MINUTES=3
	$(MAKE) sbom
	$(MAKE) audit ARGS=--if-reachable

planted: venv ## plant faults in copies of the code, and list the faults that the gate finds
	$(PY) tests/planted/run.py $(ARGS)

adapters: venv ## download the adapters' packages, and test the adapters with them
	@$(PY) scripts/bootstrap.py adapters
	KQUEUE_REQUIRE_ADAPTERS=1 $(PY) -m pytest -k 'adapters or gymnasium or traces or litellm or wandb or verl or openevolve or transformers' tests/integrations tests/features/search tests/features/effect $(ARGS)

check: venv ## check formatting, lint, types, imports between modules, and the lines of each room
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	$(PY) scripts/prose.py
	$(PY) scripts/lines.py
	.venv/bin/pyright --pythonpath $(PY)
	.venv/bin/lint-imports --no-logo --no-cache
	$(PY) benchmarks/gpu_gate.py --is-current

words: venv ## judge the gallery on the CPU for docs/categories.md
	@$(PY) scripts/words.py

docs: venv ## write the generated parts of the documents
	@$(PY) scripts/docs.py

schemas: venv ## publish the JSON schemas of the stable interfaces in docs/schemas
	@$(PY) scripts/schemas.py $(ARGS)

site: venv ## download the tools for the documentation, and build a site in dist/site
	@$(PY) scripts/bootstrap.py site
	PYTHONPATH=.site NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet $(ARGS)

wheelhouse: venv ## collect wheels for a GPU host without a network (PYTHON=3.12, ARGS=--cpu: with torch)
	@$(PY) scripts/bootstrap.py wheelhouse --python $(PYTHON) $(ARGS)

env: ## fill in the compose stack's secrets where .env lacks them
	@$(BOOTSTRAP_PYTHON) scripts/env.py

sbom: venv ## list the installed packages, as CycloneDX (SBOM=dist/sbom.cdx.json)
	@mkdir -p $(dir $(SBOM))
	$(PY) -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible -o $(SBOM) $(PY)

audit: venv ## report known vulnerabilities of the installed packages (ARGS=--if-reachable: no failure without a network)
	@$(PY) scripts/audit.py $(ARGS)

release: venv ## build the last commit into dist/release, and check it in empty environments (ARGS=--draft: undated)
	@$(PY) scripts/release.py $(ARGS)

compose-test: venv ## start the compose stack and judge kernels with it (needs Docker, or root and ENGINE=own)
	$(if $(filter own,$(ENGINE)),$(PY) scripts/engine.py) $(PY) -m pytest -m compose tests/compose $(ARGS)

gpu-gate: venv ## try the judge on this GPU in at most 8 minutes: controls, cheats, spread, backends, rate
	$(PY) benchmarks/gpu_gate.py $(ARGS)

bench: venv ## measure throughput and latency, compared with a fresh process for each kernel (ARGS='--out DIR --slots 4,8')
	$(PY) benchmarks/speed.py $(ARGS)

real: venv ## judge problems against themselves (ARGS='FOLDER... --out DIR', for example a KernelBench checkout)
	$(PY) benchmarks/real.py $(ARGS)

clock: venv ## compare the judge's clock with CUPTI, events, graphs and do_bench on this GPU
	$(PY) benchmarks/clock.py $(ARGS)

integrity: venv ## run the corpus of cheats and controls (ARGS='--lane gpu' or '--lane cpu')
	$(PY) tests/integrity/run.py $(ARGS)

build-bench: venv ## measure the cost of compiling extensions, compared with plain torch (ARGS='--backend cpp --count 8')
	@$(PY) benchmarks/builds.py $(ARGS)

http-cost: venv ## measure the cost of HTTP, and its latency while 200 requests wait
	$(PY) benchmarks/http_cost.py $(ARGS)

soak: venv ## judge 20,000 evaluations while parts of the fleet are killed (MINUTES=3, ARGS='--lane gpu')
	$(PY) tests/chaos/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

queue-bench: venv ## measure submissions, scheduling and reports with long queues (ARGS='--queued 0,1000000')
	$(PY) benchmarks/queueing.py $(ARGS)

clean: ## remove the output of these targets
	rm -rf .venv .adapters .nemo-gym .site wheelhouse dist build .pytest_cache .ruff_cache
