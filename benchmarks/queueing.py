"""Measure the queue: `python benchmarks/queueing.py [--submissions N] [--queued N,...] [--judged N] [--no-fleet]`.

It starts embedded services in a temporary home and measures

1. submissions per second with 1, 10 and 100 producers, each a thread with its own connection, on an empty and on a long
   queue.
2. with `--queued` evaluations of another producer: the times of the scheduling query, of a submission and of a claim,
   the database's time for `kqueue status`, `kqueue results`, `kqueue results --state queued` and the position in
   `GET /v1/evaluations/{id}`, and the total time of these commands.
3. with `--judged` reusable verdicts: submissions per second in batches of 1,000, of new kernels that allow reuse, of
   new kernels that do not, and of known kernels. It also measures the time from a single submission to its reused
   verdict.
4. unless `--no-fleet`, with a fleet of one CPU slot:
   - the overhead on an idle fleet, from the commit of a submission to the start of its attempt, and with the same
     queues, from an attempt's end to the start of the next. It measures sources that fail the static checks, and
     kernels that run in a fresh process each.
   - the wait of a second producer's evaluation after the running evaluation.
   - the rate at which static failures and superfluous messages are drained. Beyond `--seconds` it is extrapolated.
   - the same work from 1 producer and from 100, in turns.

The overhead ends at the start of the claim's transaction, which takes another `claim_ms`. The figures are printed as
JSON and, with `--out FILE`, written to FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import repeat
from celery import Celery
from sqlalchemy import Engine, text

from kqueue import Category, Client, Request, broker
from kqueue.config import Config, load
from kqueue.contract import Outcome
from kqueue.local.fleet import LocalFleet
from kqueue.local.servers import Postgres, Valkey
from kqueue.states import EvaluationState, Writer
from kqueue.store import evaluations, reports, schema, workers
from kqueue.store.engine import connect

PROBLEM = repeat.PROBLEM.format(name="Model", body="torch.relu(x)", shape="4, 4")
#: Kernel that fails the static checks, because it defines no `ModelNew`.
BAD = "import torch\n# {name}\n"
#: A correct kernel.
GOOD = """
import torch
# {name}
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
#: Statements that copy the first judged evaluation `more` times, each with different content.
JUDGED = """
CREATE TEMP TABLE model ON COMMIT DROP AS
SELECT e.*, a.worker_id, a.environment_hash FROM evaluations AS e JOIN attempts AS a ON a.evaluation_id = e.id LIMIT 1;
INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings, state, reuse, attempts)
SELECT gen_random_uuid(), problem_hash, kernel_hash, lane, settings, 'done', true, 1
FROM model CROSS JOIN generate_series(1, {more});
INSERT INTO attempts (evaluation_id, number, worker_id, lease_until, ended_at, environment_hash)
SELECT e.id, 1, m.worker_id, now(), now(), m.environment_hash FROM evaluations AS e CROSS JOIN model AS m
WHERE NOT EXISTS (SELECT FROM verdicts AS v WHERE v.evaluation_id = e.id);
INSERT INTO verdicts (evaluation_id, attempt_id, category, blame, message, facts, evidence, log, written_by, content,
                      reusable)
SELECT a.evaluation_id, a.id, 'passed', 'none', '', '{{}}', '{{}}', '', 'judge',
       md5(a.id::text) || md5(random()::text), true
FROM attempts AS a WHERE NOT EXISTS (SELECT FROM verdicts AS v WHERE v.evaluation_id = a.evaluation_id);
INSERT INTO summaries
SELECT v.evaluation_id, e.problem_hash, e.kernel_hash, e.batch, v.category, v.runtime_ms, v.speedup, false,
       v.finished_at
FROM verdicts AS v JOIN evaluations AS e ON e.id = v.evaluation_id ON CONFLICT DO NOTHING
"""
#: Deadline in seconds of each wait.
PATIENCE_S = 600.0
COMMANDS = {
    "status": ("status", "--json"),
    "results": ("results", "--json"),
    "results_queued": ("results", "--state", "queued", "--json"),
}


def request(name: object, **more: Any) -> dict[str, Any]:
    """Return a request's fields. Different names give different kernels."""
    return {"problem": PROBLEM, "kernel": BAD.format(name=name), "backend": "torch", "lane": "cpu", **more}


def crowd(engine: Engine, number: int, producers: int = 1) -> None:
    """Fill the queue with exactly ``number`` evaluations of the producer ``crowd``, or of ``producers`` in turn."""
    [first] = evaluations.submit(engine, [checked("crowd")])
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        connection.execute(
            text("CREATE TEMP TABLE model ON COMMIT DROP AS SELECT * FROM evaluations WHERE id = :id"),
            {"id": first.evaluation_id},
        )
        connection.execute(text("TRUNCATE evaluations CASCADE"))
        # The times are like batches of 1,000, one per second.
        connection.execute(
            text(
                "INSERT INTO evaluations "
                "(id, problem_hash, kernel_hash, lane, settings, producer, batch, submitted_at) SELECT "
                "gen_random_uuid(), problem_hash, kernel_hash, lane, settings, "
                "CASE WHEN :producers = 1 THEN 'crowd' ELSE 'crowd ' || nr % :producers END, 'crowd', "
                "now() - (:number - nr) / 1000 * interval '1 s' FROM model CROSS JOIN generate_series(1, :number) AS nr"
            ),
            {"number": number, "producers": producers},
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE evaluations"))


def checked(name: str) -> Any:
    return Request(**request(name))


def submissions(config: Config, producers: int, number: int) -> float:
    """Return the submissions per second of producers that submit one evaluation at a time."""
    clients = [Client(config) for _ in range(producers)]
    each = max(1, number // producers)
    for client in clients:
        client.submit(**request(uuid4(), producer="warm"))

    def run(client: Client) -> None:
        for _ in range(each):
            client.submit(**request("same", producer="mine"))

    try:
        begun = time.perf_counter()
        with ThreadPoolExecutor(producers) as pool:
            list(pool.map(run, clients))
        return producers * each / (time.perf_counter() - begun)
    finally:
        for client in clients:
            client.close()


def median_ms(act: Callable[[], object], times: int = 15) -> float:
    taken: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return round(1000 * statistics.median(taken), 2)


def database_figures(config: Config, engine: Engine, worker_id: UUID, queued: int) -> dict[str, float]:
    """Return the times in milliseconds of the database's requests with this many queued evaluations."""
    crowd(engine, queued)
    with engine.connect() as connection:
        query = "SELECT id FROM evaluations ORDER BY submitted_at DESC, id DESC LIMIT 1"
        last = connection.scalars(text(query)).one_or_none()

    def status() -> None:
        reports.states(engine)
        workers.live(engine, within_s=86_400)
        reports.outcomes(engine, since=datetime.now(UTC) - timedelta(hours=1))
        reports.crowds(engine)

    with Client(config) as client:
        mine = [client.submit(**request("mine", producer="mine")).evaluation_id for _ in range(15)]
        claimed = iter(mine)

        def claim() -> None:
            evaluations.claim(engine, next(claimed), worker_id=worker_id, lease_s=3600)

        def position_ms(of: UUID) -> float:
            return median_ms(lambda: reports.waiting(engine, of, within_s=86_400), 3)

        return {
            "queued": queued,
            "order_ms": median_ms(lambda: evaluations.upcoming(engine, {"cpu": 1})),
            "submit_ms": median_ms(lambda: client.submit(**request("mine", producer="mine"))),
            "status_ms": median_ms(status, 3),
            "results_ms": median_ms(lambda: reports.results(engine, limit=50), 3),
            "results_queued_ms": median_ms(lambda: reports.listing(engine, state=EvaluationState.QUEUED, limit=50), 3),
            "place_of_a_second_producer_ms": position_ms(mine[-1]),
            "place_of_the_last_ms": position_ms(last or mine[-1]),
            "claim_ms": median_ms(claim),
            **{f"command_{name}_ms": command_ms(config, words) for name, words in COMMANDS.items()},
        }


def command_ms(config: Config, words: Sequence[str]) -> float:
    """Return the total time of a command in milliseconds."""
    return median_ms(
        lambda: subprocess.run(
            [sys.executable, "-m", "kqueue", *words],
            env=os.environ | config.environment(),
            check=True,
            stdout=subprocess.DEVNULL,
        ),
        3,
    )


def second_producer(config: Config, engine: Engine, queued: int) -> dict[str, float]:
    """Return the milliseconds that a second producer waits, and that the slot is empty, with this queue."""
    crowd(engine, queued)
    waits: list[float] = []
    with Client(config) as client:
        for number in range(10):
            # The worker's heartbeat can be missing, because filling the queue takes long.
            ticket = client.submit(**request(f"one {number}", producer="mine"), allow_idle_lane=True)
            ticket.wait(PATIENCE_S)
            waits.append(1000 * waited_s(engine, ticket.evaluation_id))
    return {"queued": queued, "second_producer_p50_ms": round(statistics.median(waits), 1)} | empty(engine)


def idle(config: Config, engine: Engine, times: int = 40) -> dict[str, float]:
    """Return the milliseconds from a submission's commit to the start of its attempt on an idle fleet."""
    app = broker.make_app(config)
    crowd(engine, 0)
    taken: list[float] = []
    for number in range(times):
        [one] = evaluations.submit(engine, [checked(f"idle {number}")], slots={"cpu": 1})
        committed = time.time()
        broker.publish(app, [one.message])
        wait_for(partial(evaluations.verdict, engine, one.evaluation_id))
        started = scalar(
            engine,
            "SELECT extract(epoch FROM started_at) FROM attempts WHERE evaluation_id = :id",
            id=one.evaluation_id,
        )
        taken.append(1000 * (float(started) - committed))
        time.sleep(0.2)
    app.close()
    return {"queued": 0, **percentiles("overhead", taken)}


def judged(config: Config, engine: Engine, number: int = 40) -> dict[str, float]:
    """Return the milliseconds that the slot is empty between kernels that run."""
    crowd(engine, 0)
    with Client(config) as client:
        tickets = [client.submit(**request(n, kernel=GOOD.format(name=n))) for n in range(number)]
        passed = sum(ticket.wait(PATIENCE_S).passed for ticket in tickets)
    return {"queued": number, "passed": passed} | empty(engine)


def drain(engine: Engine, number: int, seconds: float) -> dict[str, float]:
    """Return the drain rate of static failures, measured over at most this many seconds."""
    crowd(engine, number)
    done = "SELECT count(*) FROM verdicts"
    wait_for(lambda: scalar(engine, done) > 0)
    begun, first = time.perf_counter(), scalar(engine, done)
    left = "SELECT EXISTS (SELECT FROM evaluations WHERE state <> 'done')"
    while time.perf_counter() - begun < seconds and scalar(engine, left):
        time.sleep(0.2)
    drained, took = scalar(engine, done) - first, time.perf_counter() - begun
    return rate(number, drained, took)


def in_vain(config: Config, engine: Engine, number: int = 900) -> dict[str, float]:
    """Return the drain rate of messages whose evaluation was cancelled."""
    crowd(engine, 0)
    app = broker.make_app(config)
    [one] = evaluations.submit(engine, [checked("in vain")], slots={"cpu": 1})
    evaluations.cancel(engine, one.evaluation_id)
    time.sleep(2)  # the supervisor is notified of the end, and cleans the queue
    with app.pool.acquire(block=True) as connection:
        client: Any = connection.default_channel.client

        def is_empty() -> bool:
            return int(client.llen(broker.queue("cpu").name)) == 0

        begun = time.perf_counter()
        broker.publish(app, [one.message] * number)
        wait_for(is_empty)
        took = time.perf_counter() - begun
    app.close()
    return rate(50_000, number, took)


def rate(number: int, drained: int, took: float) -> dict[str, float]:
    """Return the drain rate, and the extrapolated seconds for ``number``."""
    return {
        "measured": drained,
        "measured_s": round(took, 1),
        "per_s": round(drained / took, 1),
        "of": number,
        "all_s": round(number * took / drained),
    }


def fairness(engine: Engine, number: int, rounds: int = 4) -> dict[str, float]:
    """Return the static failures per second from 1 producer and from 100, measured in turns, and the ratio."""
    rates: dict[int, list[float]] = {1: [], 100: []}
    for _ in range(rounds):
        for producers, of in rates.items():
            crowd(engine, number, producers)
            wait_for(lambda: not scalar(engine, "SELECT EXISTS (SELECT FROM evaluations WHERE state <> 'done')"))
            took = scalar(engine, "SELECT extract(epoch FROM max(ended_at) - min(started_at)) FROM attempts")
            of.append(number / float(took))
    one, many = (statistics.median(rates[producers]) for producers in (1, 100))
    return {
        "evaluations": number,
        "rounds": rounds,
        "of_1_producer_per_s": round(one, 1),
        "of_100_producers_per_s": round(many, 1),
        "ratio": round(many / one, 3),
    }


def wait_for(look: Callable[[], object]) -> None:
    """Wait until the result of ``look`` is true, or raise a TimeoutError after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the fleet did not finish within {PATIENCE_S:.0f} s")
        time.sleep(0.01)


def judged_before(engine: Engine, client: Client, worker_id: UUID, number: int) -> list[Request]:
    """Fill the database with reusable verdicts, and empty the queue. Return requests for 1,000 of the verdicts."""
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE evaluations CASCADE"))
    known = [Request(**request(n, kernel=GOOD.format(name=f"known {n}"))) for n in range(1000)]
    facts = {"device": "cpu", "torch": "none", "python": "none", "host": "here"}
    outcome = Outcome(category=Category.PASSED)
    for ticket in client.submit_batch(known):
        claimed = evaluations.claim(engine, ticket.evaluation_id, worker_id=worker_id, lease_s=3600)
        assert claimed is not None
        evaluations.set_environment(engine, claimed.attempt_id, facts, conditions="")
        evaluations.finish(
            engine, ticket.evaluation_id, claimed.number, outcome, written_by=Writer.JUDGE, retry_delay_s=0
        )
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        connection.execute(text("SET LOCAL lock_timeout = 0"))
        for statement in JUDGED.split(";"):
            connection.execute(text(statement.format(more=number - len(known))))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("SET statement_timeout = 0"))
        connection.execute(text("VACUUM ANALYZE"))
    return known


def reuse(config: Config, engine: Engine, worker_id: UUID, number: int) -> dict[str, Any]:
    """Return the submission rates and latencies with this many reusable verdicts."""

    def new(reuse: bool) -> list[Request]:
        return [Request(**request(n, kernel=GOOD.format(name=uuid4()), reuse=reuse)) for n in range(1000)]

    with Client(config) as client:
        known = judged_before(engine, client, worker_id, number)
        kinds = {f"new, {use}": partial(new, use == "may reuse") for use in ("may reuse", "may not")}
        kinds["known"] = lambda: known
        batches: dict[str, list[float]] = {kind: [] for kind in kinds}
        single: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(10):
            for kind, requests in kinds.items():
                asked = requests()
                begun = time.perf_counter()
                tickets = client.submit_batch(asked)
                batches[kind].append(time.perf_counter() - begun)
                if kind == "known":
                    assert all(verdict.reused_from for verdict in client.wait_all(tickets, timeout=PATIENCE_S))
                for one in requests()[turn * 50 : turn * 50 + 50]:
                    begun = time.perf_counter()
                    ticket = client.submit(one)
                    if kind == "known":
                        ticket.wait(PATIENCE_S)
                    single[kind].append(1000 * (time.perf_counter() - begun))
    return {
        "judged": number,
        "per_s, in batches of 1,000": {
            kind: round(1000 / statistics.median(seconds)) for kind, seconds in batches.items()
        },
        **{
            f"one, {kind}": percentiles("to its verdict" if kind == "known" else "submitted", took)
            for kind, took in single.items()
        },
    }


def scalar(engine: Engine, query: str, **values: object) -> Any:
    with engine.connect() as connection:
        return connection.scalars(text(query), values).one()


def percentiles(name: str, taken: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_p50_ms": round(statistics.median(taken), 1),
        f"{name}_p95_ms": round(statistics.quantiles(taken, n=20)[-1], 1),
    }


def waited_s(engine: Engine, evaluation_id: UUID) -> float:
    """Return the seconds from an evaluation's submission, or the end of the attempt that ran then, to its start."""
    with engine.connect() as connection:
        waited = connection.scalars(
            text(
                "SELECT extract(epoch FROM a.started_at - greatest(e.submitted_at, ("
                "SELECT min(o.ended_at) FROM attempts AS o WHERE o.started_at < e.submitted_at "
                "AND o.ended_at > e.submitted_at))) "
                "FROM attempts AS a JOIN evaluations AS e ON e.id = a.evaluation_id "
                "WHERE a.evaluation_id = :id AND a.number = 1"
            ),
            {"id": evaluation_id},
        ).one()
    return float(waited)


def empty(engine: Engine) -> dict[str, float]:
    """Return the milliseconds between an attempt's end and the start of the next."""
    with engine.connect() as connection:
        gaps = connection.scalars(
            text(
                "SELECT gap FROM (SELECT extract(epoch FROM started_at - "
                "lag(ended_at) OVER (PARTITION BY worker_id ORDER BY id)) AS gap FROM attempts) AS gaps "
                "WHERE gap IS NOT NULL"
            )
        ).all()
    return percentiles("overhead", [1000 * float(gap) for gap in gaps])


def circumstances(engine: Engine, app: Celery) -> dict[str, Any]:
    """Return the date, the hardware and the versions of this measurement."""
    packages = ("celery", "kombu", "billiard", "redis", "SQLAlchemy", "psycopg", "torch")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "postgres": scalar(engine, "SHOW server_version"),
        "valkey": broker.info(app).get("valkey_version") or broker.info(app)["redis_version"],
        **{name.lower(): metadata.version(name) for name in packages},
    }


def measure(arguments: argparse.Namespace, home: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {"on": {}, "submissions_per_s": {}, "database": [], "overhead": [], "drain": {}}
    sizes: Sequence[int] = [int(size) for size in arguments.queued.split(",")]
    with Postgres(home / "postgres") as postgres, Valkey(home / "valkey") as valkey:
        schema.upgrade(postgres.url)
        config = load(database_url=postgres.url, redis_url=valkey.url, home=home / "home")
        engine = connect(postgres.url, application="benchmark")
        figures["on"] = circumstances(engine, broker.make_app(config))
        worker_id = uuid4()
        workers.register(engine, id=worker_id, name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
        config = config.model_copy(update={"lease_s": 3600.0})
        for size in (0, max(sizes)):
            crowd(engine, size)
            rates: Mapping[str, float] = {
                str(producers): round(submissions(config, producers, arguments.submissions), 1)
                for producers in (1, 10, 100)
            }
            figures["submissions_per_s"][f"{size} queued"] = rates
        for size in sizes:
            figures["database"].append(database_figures(config, engine, worker_id, size))
        figures["reuse"] = reuse(config, engine, worker_id, arguments.judged)
        engine.dispose()
    if not arguments.no_fleet:
        config = load(home=home / "fleet", gpus="none", cpu_slots=1, reuse=False, probe_share=0)
        with LocalFleet(config, flower=False, http=False) as fleet:
            engine = connect(fleet.config.require_database(), application="benchmark")
            figures["overhead"] = [
                {"of": "sources that are read", **idle(fleet.config, engine)},
                *({"of": "sources that are read", **second_producer(fleet.config, engine, n)} for n in sizes if n),
                {"of": "kernels that are run", **judged(fleet.config, engine)},
            ]
            figures["fairness"] = fairness(engine, arguments.submissions)
            figures["drain"] = {
                "messages in vain": in_vain(fleet.config, engine),
                "static failures": drain(engine, 50_000, arguments.seconds),
            }
            engine.dispose()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the queue.")
    parser.add_argument("--submissions", type=int, default=500, help="submissions for each number of producers")
    parser.add_argument("--queued", default="0,1000,1000000", help="sizes of the queue, separated by commas")
    parser.add_argument("--judged", type=int, default=1_000_000, help="number of reusable verdicts")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest measurement of drained static failures")
    parser.add_argument("--no-fleet", action="store_true", help="measure only the database")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kqueue-") as home:
        figures = measure(arguments, Path(home))
    report = json.dumps(figures, indent=2)
    print(report)
    if arguments.out is not None:
        arguments.out.write_text(report + "\n")


if __name__ == "__main__":
    main()
