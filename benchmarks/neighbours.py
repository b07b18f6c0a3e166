"""A soak with one hostile owner: `python benchmarks/neighbours.py --minutes 10 --out FILE`.

It starts `kqueue up` in a temporary home, and lets an owner judge quick kernels, first alone and then next to a hostile
owner with a token, whose requests the operator limits, and a login of the database. The hostile owner submits kernels
that hang, pairs that need much memory, requests that no device can time, and bad rows. It floods notifications while it
listens in a transaction, and holds locks and connections. The exit status is 0 only if each evaluation of the other
owner passes at its first attempt, the 95th percentile of its waits is at most twice that without the hostile owner, and
the host's memory for the fleet stays below 3 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from host_memory import held_bytes, tree
from sqlalchemy.engine import make_url

from kqueue import Client, RemoteClient, Verdict
from kqueue.config import load
from kqueue.errors import KqueueError
from kqueue.local.process import Child, wait_until_ready
from kqueue.store import roles, tokens
from kqueue.store.engine import connect
from kqueue.store.tokens import Scope

_ROOT: Final = Path(__file__).resolve().parents[1]
_MOST_BYTES: Final = 3 << 30
_PROBLEM: Final = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x.clamp(-0.5, 0.5)
def get_inputs():
    return [torch.rand({size})]
"""
_KERNEL: Final = _PROBLEM.partition("def get_inputs")[0].replace("Model(", "ModelNew(")
_HANGS: Final = _KERNEL.replace("        return", "        while True: pass\n        return")
#: Limits of the hostile owner's requests.
_LIMITS: Final = {
    "deadlines.check_s": 1, "deadlines.time_s": 2, "deadlines.reference_s": 3, "deadlines.load_s": 5,
    "deadlines.construct_s": 2, "limits.host_memory_bytes": 1 << 29, "max_attempts": 3, "running": 1,
}  # fmt: skip
_UNTIMED: Final = {"checks": 2, "timing": {"purpose": "check"}}


def main() -> int:
    """Run the soak and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="with the hostile owner (default 10)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures there, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kqueue-neighbours-") as directory:
        root = Path(directory)
        root.chmod(0o711)
        fleet = _start(root)
        try:
            found = _run(load(home=root / "home"), fleet, options.minutes * 60)
        finally:
            fleet.stop((signal.SIGTERM, 60.0), (signal.SIGINT, 30.0))
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    calm, busy = found["calm"], found["hostile"]
    return int(
        found["peak_bytes"] > _MOST_BYTES or busy["p95_s"] > 2 * calm["p95_s"] or set(busy["verdicts"]) != {"passed 1"}
    )


def _start(root: Path) -> Child:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
    environment |= {"KQUEUE_HOME": str(root / "home"), "KQUEUE_SCRATCH": str(root / "scratch"), "KQUEUE_HTTP_PORT": "0"}
    command = [sys.executable, "-m", "kqueue", "up", "--no-flower", "--gpus", "none", "--cpu-slots", "2"]
    environment["PYTHONPATH"] = str(_ROOT)
    fleet = Child(command, log=root / "home" / "logs" / "up.log", environment=environment, death_signal=signal.SIGINT)
    wait_until_ready(fleet, "kqueue up", lambda: load(home=root / "home").url is not None, 300.0)
    return fleet


def _run(config: Any, fleet: Child, seconds: float) -> dict[str, Any]:
    engine = connect(config.require_database(), application="neighbours")
    _, secret = tokens.create(engine, "ada", (Scope.PROBLEMS,), owner="ada")
    _, hostile = tokens.create(engine, "eve", (Scope.PROBLEMS,), owner="eve", limits=_LIMITS)
    roles.login(engine, "eve_login", roles.PRODUCER, "x", owner="eve")
    url = make_url(config.require_database()).set(username="eve_login", password="x", drivername="postgresql")
    over, peak = threading.Event(), [0]
    sampler = threading.Thread(target=_sample, args=(fleet.pid, peak, over))
    sampler.start()
    with Client(config) as owner:
        owner.evaluate(**_request(0), timeout=300)
    server = {"url": config.url}
    with RemoteClient(**server, token=secret) as ada:
        calm = _wait_for_verdicts(ada, min(seconds, 120.0), 1)
        quiet_peak = peak[0]
        refused: Counter[str] = Counter()
        acts = [
            _submitting(server, hostile, 2, {"kernel": _HANGS}, refused),
            _submitting(server, hostile, 1, {"problem": _PROBLEM.format(size=1 << 27)}, refused),
            _submitting(server, hostile, 8, {"settings": {"timing": {"calls": 5, "max_error": 0.01}}}, refused),
            _flooding(url.render_as_string(False)),
            _listening(url.render_as_string(False)),
            _writing(url.render_as_string(False), refused),
        ]
        threads = [threading.Thread(target=_repeat, args=(act, over)) for act in acts]
        for thread in threads:
            thread.start()
        busy = _wait_for_verdicts(ada, seconds, 100_000)
    over.set()
    for thread in (*threads, sampler):
        thread.join(60)
    engine.dispose()
    return {
        "calm": calm, "hostile": busy, "refused": dict(refused), "calm_peak_bytes": quiet_peak, "peak_bytes": peak[0],
    }  # fmt: skip


def _request(number: int, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "problem": _PROBLEM.format(size=1 << 16),
        "kernel": _KERNEL,
        "settings": _UNTIMED,
    } | changes
    fields["kernel"] += f"# {number} {time.time()}\n"
    return {"backend": "torch", "lane": "cpu", **fields}


def _wait_for_verdicts(client: RemoteClient, seconds: float, first: int) -> dict[str, Any]:
    """Judge one kernel every two seconds, and return the waits for the verdicts."""
    waits: list[float] = []
    verdicts: Counter[str] = Counter()
    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        begun = time.monotonic()
        verdict: Verdict = client.evaluate(**_request(number), timeout=300)
        waits.append(time.monotonic() - begun)
        verdicts[f"{verdict.category} {verdict.attempts}"] += 1
        number += 1
        time.sleep(max(0.0, 2.0 - waits[-1]))
    p50, p95 = (statistics.quantiles(waits, n=100)[cut] for cut in (49, 94))
    return {"evaluations": len(waits), "p50_s": p50, "p95_s": p95, "max_s": max(waits), "verdicts": dict(verdicts)}


def _submitting(
    server: dict[str, Any], token: str, most: int, changes: dict[str, Any], refused: Counter[str]
) -> Callable[[threading.Event], None]:
    """Return an act that keeps ``most`` evaluations open."""

    def act(over: threading.Event) -> None:
        with RemoteClient(**server, token=token) as client:
            number, waiting = 0, list[Any]()
            while not over.is_set():
                waiting = [ticket for ticket in waiting if ticket.verdict() is None]
                while len(waiting) < most:
                    number += 1
                    request = _request(number, priority="interactive", **changes)
                    request["settings"] = _UNTIMED | {"max_attempts": 3} | request["settings"]
                    waiting.append(client.submit(**request))
                    refused["accepted"] += 1
                over.wait(0.5)

    return act


def _flooding(url: str) -> Callable[[threading.Event], None]:
    def act(over: threading.Event) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not over.is_set():
                connection.execute(
                    "SELECT pg_notify('flood', repeat('x', 7000) || n) FROM generate_series(1, 2000) AS n"
                )

    return act


def _listening(url: str) -> Callable[[threading.Event], None]:
    """Return an act that listens in a transaction, which keeps notifications, and holds 45 connections."""

    def act(over: threading.Event) -> None:
        held: list[Any] = []
        with suppress(psycopg.Error):
            while len(held) < 45:
                held.append(psycopg.connect(url))
        held[0].execute("LISTEN flood")
        held[0].commit()
        held[0].execute("SELECT 1")
        over.wait(20)
        for connection in held:
            connection.close()

    return act


def _writing(url: str, refused: Counter[str]) -> Callable[[threading.Event], None]:
    """Return an act that tries statements which the database must refuse, and locks its own rows."""
    statements = (
        "LOCK TABLE shared_problems IN ACCESS EXCLUSIVE MODE",
        "LOCK TABLE search_runs IN ACCESS EXCLUSIVE MODE",
        "INSERT INTO problems (hash, source) VALUES (repeat('0', 64), 'pass')",
        "INSERT INTO kernels (hash, backend, source) VALUES (repeat('1', 64), 'torch', 'pass')",
        "SELECT pg_advisory_lock(n) FROM generate_series(1, 100) AS n",
        "SELECT * FROM evaluations FOR UPDATE",
    )

    def act(over: threading.Event) -> None:
        with psycopg.connect(url) as connection:
            for statement in statements:
                try:
                    connection.execute(statement)
                    over.wait(2)
                except psycopg.Error as error:
                    refused[type(error).__name__] += 1
                connection.rollback()

    return act


def _repeat(act: Callable[[threading.Event], None], over: threading.Event) -> None:
    """Repeat an act, whatever ends it."""
    while not over.is_set():
        with suppress(KqueueError, psycopg.Error):
            act(over)
        over.wait(0.5)


def _sample(pid: int, peak: list[int], over: threading.Event) -> None:
    while not over.wait(0.5):
        peak[0] = max(peak[0], sum(map(held_bytes, tree(pid))))


if __name__ == "__main__":
    sys.exit(main())
