"""Measure the queue: `python benchmarks/queueing.py [--submissions N] [--queued N,N,...] [--no-fleet] [--out FILE]`.

It starts embedded services in a temporary home and measures

1. submissions a second with 1, 10 and 100 producers, each a thread with its own connection, on an empty queue and on a
   long one;
2. with so many evaluations queued by another producer: how long deciding whose turn it is takes, how long a
   submission takes, and how long `kqueue.store`'s reports behind `status`, `results` and `show` take;
3. unless `--no-fleet`: with the same queues before a fleet of one CPU slot, how long one evaluation of a second
   producer waits beyond the evaluation that runs, and how long a slot is empty between two evaluations.

Everything is printed as JSON and, with `--out`, written to a file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, text

from kqueue import Client, Request
from kqueue.config import Config, load
from kqueue.local.fleet import LocalFleet
from kqueue.local.postgres import Postgres
from kqueue.local.valkey import Valkey
from kqueue.store import evaluations, reports, schema, workers
from kqueue.store.engine import connect

PROBLEM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.randn(4, 4)]

def get_init_inputs():
    return []
"""
#: A kernel that is judged without a candidate: it does not define what it must.
BAD = "import torch\n# {name}\n"
#: Seconds in which all waits must end.
PATIENCE_S = 600.0


def request(name: object, **more: Any) -> dict[str, Any]:
    """Return a request's fields. Another name makes another kernel."""
    return {"problem": PROBLEM, "kernel": BAD.format(name=name), "backend": "torch", "lane": "cpu", **more}


def crowd(engine: Engine, number: int) -> None:
    """Have so many evaluations of the producer ``crowd`` queued, and no others."""
    [first] = evaluations.submit(engine, [checked("crowd")])
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM evaluations WHERE id <> :id"), {"id": first.evaluation_id})
        connection.execute(
            text(
                "INSERT INTO evaluations (id, problem_hash, kernel_hash, lane, settings, producer, batch) "
                "SELECT gen_random_uuid(), problem_hash, kernel_hash, lane, settings, 'crowd', 'crowd' "
                "FROM evaluations CROSS JOIN generate_series(1, :number)"
            ),
            {"number": number},
        )
        connection.execute(text("DELETE FROM evaluations WHERE id = :id"), {"id": first.evaluation_id})
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE evaluations"))


def checked(name: str) -> Any:
    """Return a checked request."""
    return Request(**request(name))


def submissions(config: Config, producers: int, number: int) -> float:
    """Return submissions a second of so many producers that submit one evaluation at a time."""
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
    """Return the median time of a call in milliseconds."""
    taken: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return round(1000 * statistics.median(taken), 2)


def database_figures(config: Config, engine: Engine, queued: int) -> dict[str, float]:
    """Return the times of what is asked of the database while so many are queued, in milliseconds."""
    crowd(engine, queued)
    with Client(config) as client:
        mine: UUID = client.submit(**request("mine", producer="mine")).evaluation_id
        return {
            "queued": queued,
            "order_ms": median_ms(lambda: evaluations.upcoming(engine, {"cpu": 1})),
            "submit_ms": median_ms(lambda: client.submit(**request("mine", producer="mine"))),
            "states_ms": median_ms(lambda: reports.states(engine), 3),
            "listing_ms": median_ms(lambda: reports.listing(engine, limit=50), 3),
            "why_ms": median_ms(lambda: reports.waiting(engine, mine, within_s=90), 3),
        }


def fleet_figures(config: Config, engine: Engine, queued: int) -> dict[str, float]:
    """Return what a second producer waits for while so many are queued, and how long the slot is empty, in ms."""
    crowd(engine, queued)
    waits: list[float] = []
    with Client(config) as client:
        for number in range(10):
            ticket = client.submit(**request(f"one {number}", producer="mine"))
            ticket.wait(PATIENCE_S)
            waits.append(1000 * waited_s(engine, ticket.evaluation_id))
    return {"queued": queued, "second_producer_p50_ms": round(statistics.median(waits), 1), "empty_p50_ms": gap(engine)}


def waited_s(engine: Engine, evaluation_id: UUID) -> float:
    """Return the seconds from the end of the attempt that ran at its submission, or from that, to its beginning."""
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


def gap(engine: Engine) -> float:
    """Return the median time between an attempt's end and the next one's beginning, in milliseconds."""
    with engine.connect() as connection:
        found = connection.scalars(
            text(
                "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY gap) FROM (SELECT extract(epoch FROM started_at - "
                "lag(ended_at) OVER (PARTITION BY worker_id ORDER BY id)) AS gap FROM attempts) AS gaps"
            )
        ).one()
    return round(1000 * float(found or 0), 1)


def measure(arguments: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Return all figures."""
    figures: dict[str, Any] = {"submissions_per_s": {}, "database": [], "fleet": []}
    sizes: Sequence[int] = [int(size) for size in arguments.queued.split(",")]
    with Postgres(home / "postgres") as postgres, Valkey(home / "valkey") as valkey:
        schema.upgrade(postgres.url)
        config = load(database_url=postgres.url, redis_url=valkey.url, home=home / "home")
        engine = connect(postgres.url, application="benchmark")
        workers.register(engine, id=uuid4(), name="cpu-0@here", host="here", pid=1, lanes=["cpu"], device="cpu")
        config = config.model_copy(update={"lease_s": 3600.0})
        for size in (0, max(sizes)):
            crowd(engine, size)
            rates: Mapping[str, float] = {
                str(producers): round(submissions(config, producers, arguments.submissions), 1)
                for producers in (1, 10, 100)
            }
            figures["submissions_per_s"][f"{size} queued"] = rates
        for size in sizes:
            figures["database"].append(database_figures(config, engine, size))
        engine.dispose()
    if not arguments.no_fleet:
        config = load(home=home / "fleet", gpus="none", cpu_slots=1)
        with LocalFleet(config, flower=False, http=False) as fleet:
            engine = connect(fleet.config.require_database(), application="benchmark")
            for size in sizes:
                figures["fleet"].append(fleet_figures(fleet.config, engine, size))
            engine.dispose()
    return figures


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Measure the queue.")
    parser.add_argument("--submissions", type=int, default=500, help="for each number of producers")
    parser.add_argument("--queued", default="0,1000,100000", help="sizes of the queue, separated by commas")
    parser.add_argument("--no-fleet", action="store_true", help="measure the database alone")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kqueue-") as home:
        figures = measure(arguments, Path(home))
    report = json.dumps(figures, indent=2)
    print(report)
    if arguments.out is not None:
        arguments.out.write_text(report + "\n")


if __name__ == "__main__":
    main()
