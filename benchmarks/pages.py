"""Measure the web pages: `python benchmarks/pages.py [--evaluations N] [--problems N] [--home DIR] [--out FILE] ...`.

It starts embedded services in a temporary home, or in `--home`, and fills the database with judged evaluations of the
problems, in batches of 1,000, and with searches. A filled home is measured unchanged. Then it serves the pages, and
requests each page over one connection, one request after another, in rounds. `--busy N` runs N computing processes at
the same time. With `--held` the requests take turns between the fleet's own user, for whom there is no row-level
security, and a token that sees the work of its owner, to whom everything belongs. The same is done for the store. The
figures are printed as JSON and, with `--out FILE`, written to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any
from uuid import uuid4

import httpx
import repeat
from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.config import Config, load
from kqueue.contract import Outcome, Phase, Request
from kqueue.evidence import Measurement
from kqueue.local.servers import Postgres, Valkey
from kqueue.states import Writer
from kqueue.store import evaluations, reports, schema, tokens, workers
from kqueue.store.engine import FLEET, Viewer, acting, connect
from kqueue.store.models import LOCAL

PROBLEM = repeat.PROBLEM.format(name="Model", body="torch.relu(x)", shape="4, 4")
KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def relu(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.maximum(tl.load(x_ptr + offsets, mask=mask), 0), mask=mask)

class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        relu[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y
"""
LOG = 'Traceback (most recent call last):\n  File "kernel.py", line 17\nRuntimeError: mismatch of element number '
#: Statements that copy the judged rows. Six of ten evaluations passed, and a third have the kernel of another one.
#: One of twenty belongs to problem 0, and one of twenty to the batch `night`.
FILL = """
CREATE TEMP TABLE model ON COMMIT DROP AS
SELECT e.settings, a.worker_id, a.environment_hash AS environment, v.*
FROM evaluations AS e JOIN attempts AS a ON a.evaluation_id = e.id JOIN verdicts AS v ON v.evaluation_id = e.id;
CREATE TEMP TABLE rows ON COMMIT DROP AS
SELECT nr, gen_random_uuid() AS id,
       CASE WHEN nr % 20 = 0 THEN 0 ELSE nr % {problems} END AS problem,
       encode(sha256(('kernel ' || nr - nr % 3 % 2)::bytea), 'hex') AS kernel_hash,
       CASE WHEN nr / 7 % 10 < 6 THEN 'passed' ELSE 'wrong_values' END AS category,
       now() - ({evaluations} + 60 - nr) * interval '1 s' AS submitted_at,
       0.5 + random() AS factor
FROM generate_series(1, {evaluations}) AS nr;
CREATE INDEX ON rows (id);
-- The hashes are invented, because hashing would take most of the time.
ALTER TABLE problems DROP CONSTRAINT ck_problems_hash;
ALTER TABLE kernels DROP CONSTRAINT ck_kernels_hash;
INSERT INTO problems (hash, source, created_at)
SELECT encode(sha256(('problem ' || nr)::bytea), 'hex'), CAST(:problem AS text) || '# problem_' || nr,
       now() - nr * interval '1 h'
FROM generate_series(0, {problems} - 1) AS nr;
INSERT INTO kernels (hash, backend, source, created_at)
SELECT DISTINCT ON (kernel_hash) kernel_hash, 'triton', CAST(:kernel AS text) || '# variant_' || nr, submitted_at
FROM rows ORDER BY kernel_hash;
INSERT INTO evaluations (id, problem_hash, kernel_hash, problem_label, kernel_label, lane, settings, batch, state,
                         attempts, submitted_at)
SELECT id, encode(sha256(('problem ' || problem)::bytea), 'hex'), kernel_hash, 'problem ' || problem, 'kernel ' || nr,
       'cpu', model.settings, CASE WHEN nr % 20 = 1 THEN 'night' ELSE 'step ' || nr / 1000 END, 'done', 1, submitted_at
FROM rows JOIN model USING (category);
INSERT INTO attempts (evaluation_id, number, worker_id, environment_hash, lease_until, started_at, ended_at, category)
SELECT id, 1, model.worker_id, model.environment, submitted_at + interval '32 s', submitted_at + interval '1 s',
       submitted_at + interval '2 s', category
FROM rows JOIN model USING (category);
INSERT INTO verdicts (evaluation_id, attempt_id, category, blame, compiled, correctness, phase, message, runtime_ms,
                      baseline_ms, speedup, facts, runtime, baseline, evidence, log, written_by, finished_at)
SELECT r.id, a.id, m.category, m.blame, m.compiled, m.correctness, m.phase, m.message, m.runtime_ms * factor,
       m.baseline_ms, m.speedup / factor, m.facts,
       m.runtime || jsonb_build_object('median_ms', m.runtime_ms * factor), m.baseline, m.evidence,
       CASE WHEN m.category = 'passed' THEN '' ELSE CAST(:log AS text) || nr END, 'judge', submitted_at + interval '2 s'
FROM rows AS r JOIN attempts AS a ON a.evaluation_id = r.id JOIN model AS m ON m.category = r.category;
INSERT INTO summaries
SELECT v.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, v.category, v.runtime_ms, v.speedup, false,
       v.finished_at
FROM verdicts AS v JOIN evaluations AS e ON e.id = v.evaluation_id
ON CONFLICT DO NOTHING;
INSERT INTO batches SELECT batch, max(submitted_at) FROM evaluations WHERE batch IS NOT NULL GROUP BY batch;
INSERT INTO search_runs (id, name, plan, state, created_at)
SELECT gen_random_uuid(), 'search-' || nr,
       jsonb_build_object('algorithm', 'PS', 'problem', CAST(:problem AS text) || nr, 'kernel', CAST(:kernel AS text),
                          'backend', 'triton', 'proposer', 'model', 'given', 'some-model',
                          'metrics', jsonb_build_array('inverse_runtime')),
       'done', now() - nr * interval '1 h'
FROM generate_series(1, {runs}) AS nr;
INSERT INTO search_steps (run_id, number, best, ended_at)
SELECT id, nr, nr * 4, now() FROM search_runs CROSS JOIN generate_series(0, 50) AS nr;
INSERT INTO search_proposals (run_id, number, step, parent, prompt, answer, kernel, category, message, runtime_ms,
                              speedup, scores, feedback, asked_at, ended_at)
SELECT id, nr, (nr + 3) / 4, nullif(greatest(0, nr - 1 - nr % 7), nr), repeat(CAST(:problem AS text), 10),
       repeat(CAST(:kernel AS text), 4),
       CAST(:kernel AS text) || nr, CASE WHEN nr % 3 = 1 THEN 'wrong_values' ELSE 'passed' END, '', 1.0 / (1 + nr),
       CASE WHEN nr % 3 = 1 THEN NULL ELSE 1 + nr * random() / 100 END,
       CASE WHEN nr % 3 = 1 THEN NULL ELSE jsonb_build_object('inverse_runtime', 1 + nr) END, 'try again', now(), now()
FROM search_runs CROSS JOIN generate_series(0, 200) AS nr
"""

#: Number of blocks into which a page's requests are divided.
BLOCKS = 3


def fill(engine: Engine, number: int, problems: int, runs: int) -> None:
    """Fill the database with judged evaluations, problems and searches."""
    identity = uuid4()
    workers.register(engine, id=identity, name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
    facts = {"device": "Some CPU", "torch": "none", "python": "none", "host": "here"}
    wrong = {"output": 0, "kind": "given", "wrong": 1, "of": 4, "first": [{"index": [0], "expected": 1.0, "got": 2.0}]}
    for outcome in (
        Outcome(category=Category.PASSED, runtime=taken(1.0), baseline=taken(2.0)),
        Outcome(category=Category.WRONG_VALUES, phase=Phase.CHECK, message="1 of 4 values is wrong", facts=wrong),
    ):
        kernel = f"class ModelNew: pass  # {outcome.category}"
        [one] = evaluations.submit(
            engine, [Request(problem=PROBLEM, kernel=kernel, backend="triton", lane="cpu", problem_label="first")]
        )
        claimed = evaluations.claim(engine, one.evaluation_id, worker_id=identity, lease_s=3600)
        assert claimed is not None
        evaluations.set_environment(engine, claimed.attempt_id, facts, conditions="")
        evaluations.finish(engine, one.evaluation_id, claimed.number, outcome, written_by=Writer.JUDGE, retry_delay_s=0)
    values = {"problem": PROBLEM, "kernel": KERNEL, "log": LOG}
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SET LOCAL work_mem = '256MB'"))
        for statement in FILL.split(";"):
            connection.execute(text(statement.format(evaluations=number, problems=problems, runs=runs)), values)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE"))


def taken(median_ms: float) -> Measurement:
    return Measurement(
        basis="cpu_clock",
        count=100,
        median_ms=median_ms,
        q1_ms=median_ms * 0.9,
        q3_ms=median_ms * 1.1,
        mean_ms=median_ms,
        std_ms=0.01,
        min_ms=median_ms * 0.8,
        max_ms=median_ms * 2,
        overhead_ms=0.002,
        cold_l2=False,
    )


def pages(engine: Engine) -> dict[str, str]:
    """Return the addresses of the measured pages, by name."""
    with engine.connect() as connection:
        problems = connection.scalars(
            text("SELECT hash FROM problems WHERE source ~ '# problem_[07]$' ORDER BY source")
        ).all()
        two = connection.scalars(
            text("SELECT evaluation_id FROM verdicts WHERE category = 'passed' AND attempt_id > 10 LIMIT 2")
        ).all()
        runs = connection.scalars(text("SELECT id FROM search_runs ORDER BY created_at LIMIT 2")).all()
    return {
        "now": "/",
        "evaluations": "/evaluations",
        "evaluation": f"/evaluations/{two[0]}",
        "problems": "/problems",
        "problems, by name": "/problems?name=problem+24",
        "problem": f"/problems/{problems[1]}",
        "problem of a twentieth of all": f"/problems/{problems[0]}",
        "problem of a twentieth of all, its curve": f"/problems/{problems[0]}/best.svg",
        "problem of a twentieth of all, its bars": f"/problems/{problems[0]}/board.svg",
        "batches": "/batches",
        "batch of 950": "/batches/step%201",
        "batch of a twentieth of all": "/batches/night",
        "batch of a twentieth of all, its fast_p": "/batches/night/fast-p.svg",
        "runs": "/runs",
        "run": f"/runs/{runs[0]}",
        "two runs": f"/runs/{runs[0]}/{runs[1]}",
        "two kernels": f"/compare/{two[0]}/{two[1]}",
        "search, a frequent word": "/search?q=triton",
        "search, a rare word": "/search?q=variant+4711",
        "search, words of a log": "/search?q=mismatch+4712",
        "search, no such word": "/search?q=nowhere",
    }


@contextmanager
def served(config: Config) -> Generator[str]:
    """Serve the fleet's pages in a separate process, without tokens, and yield the address."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | config.environment() | {"KQUEUE_HTTP_TOKENS": "trust-local-users"}
    command = [sys.executable, "-m", "kqueue", "serve", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        while not answers(url):
            if server.poll() is not None:
                raise SystemExit("`kqueue serve` ended")
            time.sleep(0.1)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


@contextmanager
def busy(number: int) -> Generator[None]:
    """Run this many processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    """Return whether the server is healthy."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def measure(
    url: str, addresses: Mapping[str, str], times: int, tokens_of: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Return each page's latencies in milliseconds and its size. The first two requests of a block do not count.

    ``tokens_of`` has the secrets of tokens that take turns, by the prefix of their figures.
    """
    found: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        callers = {
            who: stack.enter_context(httpx.Client(base_url=url, headers={"Accept": "text/html"}, timeout=60))
            for who in tokens_of or [""]
        }
        for who, secret in tokens_of.items():
            callers[who].post("/login", data={"token": secret}, headers={"Origin": url})
        for name, address in addresses.items():
            taken: dict[str, list[float]] = {who: [] for who in callers}
            # Callers take turns in blocks, because Postgres plans a statement again after a change of the role.
            for who, http in [*callers.items()] * BLOCKS:
                of_block: list[float] = []
                for _ in range(2 + -(-times // BLOCKS)):
                    begun = time.perf_counter()
                    answer = http.get(address)
                    of_block.append(1000 * (time.perf_counter() - begun))
                    if answer.status_code != 200:
                        raise SystemExit(f"{address}: {answer.status_code}: {answer.text[:2000]}")
                taken[who] += of_block[2:]
            found[name] = {"kib": round(len(answer.content) / 1024, 1)}
            for who, of in taken.items():
                found[name][f"{who}p50_ms"] = round(statistics.median(of), 1)
                found[name][f"{who}p95_ms"] = round(statistics.quantiles(of, n=20, method="inclusive")[-1], 1)
            print(f"{name}: {found[name]}", file=sys.stderr)
    return found


def store(url: str, times: int) -> dict[str, dict[str, float]]:
    """Return the medians in milliseconds of the store's requests, for a session of the fleet and for a held one.

    Each has its own connection, because Postgres plans a prepared statement again if the role has changed.
    """

    def submit(engine: Engine, number: int) -> None:
        requests = [
            Request(problem=PROBLEM, kernel=f"class ModelNew: pass  # {uuid4()}", backend="torch", lane="cpu")
            for _ in range(number)
        ]
        evaluations.submit(engine, requests, slots={"cpu": 1}, reuse_s=60)

    viewers = {"fleet": FLEET, "held": Viewer(LOCAL, held=True)}
    engines = {who: connect(url, application="benchmark", pool_size=1) for who in viewers}
    found: dict[str, dict[str, float]] = {}
    for name, act in {
        "a submission": partial(submit, number=1),
        "a submission of 100": partial(submit, number=100),
        "a list of 50": partial(reports.listing, limit=50),
    }.items():
        taken: dict[str, list[float]] = {"fleet": [], "held": []}
        for _ in range(times + 2):
            for who, viewer in viewers.items():
                with acting(viewer):
                    begun = time.perf_counter()
                    act(engines[who])
                    taken[who].append(1000 * (time.perf_counter() - begun))
        found[name] = {f"{who}_p50_ms": round(statistics.median(of[2:]), 2) for who, of in taken.items()}
    for engine in engines.values():
        engine.dispose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1_000_000, help="finished evaluations in the database")
    parser.add_argument("--problems", type=int, default=250, help="problems of these evaluations")
    parser.add_argument("--times", type=int, default=40, help="requests for each page in a round")
    parser.add_argument("--rounds", type=int, default=1, help="measurements of all pages")
    parser.add_argument("--held", action="store_true", help="compare with a caller who sees the work of one owner")
    parser.add_argument("--page", metavar="TEXT", default="", help="only pages whose name contains this")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute at the same time")
    parser.add_argument("--home", type=Path, help="folder of the database, which is filled if it is empty")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    if options.evaluations < 1000 or options.problems < 8 or options.times < 2 or options.rounds < 1:
        parser.error("at least 1000 evaluations, 8 problems, 2 requests and 1 round are needed")
    with ExitStack() as stack:
        home = Path(options.home or stack.enter_context(tempfile.TemporaryDirectory())).absolute()
        postgres = stack.enter_context(Postgres(home / "postgres", durable=False))
        valkey = stack.enter_context(Valkey(home / "valkey"))
        config = load(database_url=postgres.url, redis_url=valkey.url, home=home)
        schema.upgrade(postgres.url)
        engine = connect(postgres.url, application="benchmark", pool_size=2)
        stack.callback(engine.dispose)
        with engine.connect() as connection:
            version = connection.scalars(text("SHOW server_version")).one()
            is_filled = connection.scalars(text("SELECT EXISTS (SELECT FROM verdicts)")).one()
        begun = time.perf_counter()
        if not is_filled:
            fill(engine, options.evaluations, options.problems, runs=100)
        filled_s = time.perf_counter() - begun
        addresses = {name: address for name, address in pages(engine).items() if options.page in name}
        rounds: list[dict[str, Any]] = []
        scopes = {"": [tokens.Scope.READ, tokens.Scope.READ_ALL], "held_": [tokens.Scope.READ]} if options.held else {}
        secrets = {who: tokens.create(engine, "benchmark", own)[1] for who, own in scopes.items()}
        with served(config) as url, busy(options.busy):
            for _ in range(options.rounds):
                found = measure(url, addresses, options.times, secrets)
                rounds.append({"load_average": [round(load, 2) for load in os.getloadavg()], "pages": found})
        # Last, because it adds rows of which Postgres has no statistics yet.
        of_store = store(postgres.url, options.times) if options.held else None
        with engine.connect() as connection:
            counted = connection.execute(
                text("SELECT (SELECT count(*) FROM verdicts), (SELECT count(*) FROM problems)")
            )
            number, problems = counted.one()
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "postgres": version,
        "evaluations": number,
        "problems": problems,
        "requests": options.times,
        "busy": options.busy,
        "filled_s": round(filled_s),
        "store": of_store,
        "rounds": rounds,
    }
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
