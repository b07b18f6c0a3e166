"""Measure the time until a worker's next child starts, with stock Celery's pool and with kqueue's pool.

There is one worker with one task per child, the parent imports torch, and no database is used. Only the pool differs.
Run ``python benchmarks/respawn.py`` (two minutes, mostly waits of stock Celery). It needs the extra `embedded`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from celery import signals

from kqueue import broker
from kqueue.config import load
from kqueue.local.servers import Valkey

#: Name, pool, and whether the parent calls ``gc.freeze()``.
CASES = [("stock", "prefork", False), ("kqueue", "workers.pool:TaskPool", True)]

if "RESPAWN_LOG" in os.environ:
    app = broker.make_app(load())
    app.conf.worker_pool = os.environ["RESPAWN_POOL"]

    @app.task(name="noop")
    def noop() -> None:
        """Record the time of the run."""
        begun = time.time()
        with Path(os.environ["RESPAWN_LOG"]).open("a") as log:
            log.write(f"{begun} {time.time()}\n")

    @app.task(name="crash")
    def crash() -> None:
        """Record the time, and crash with SIGSEGV."""
        with Path(os.environ["RESPAWN_LOG"]).open("a") as log:
            log.write(f"{time.time()} {time.time()}\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    @signals.worker_init.connect
    def prepare(**_: object) -> None:
        """Prepare the parent process like workers/app.py."""
        if importlib.util.find_spec("torch"):
            importlib.import_module("torch")
        if os.environ["RESPAWN_FREEZE"] == "True":
            gc.collect()
            gc.freeze()


def measure(directory: Path, url: str, pool: str, freeze: bool, tasks: int) -> tuple[float, list[float]]:
    """Return the tasks per second, and the seconds between each task's end and the next one's start."""
    log = directory / "log"
    log.unlink(missing_ok=True)
    own = {"RESPAWN_LOG": str(log), "RESPAWN_POOL": pool, "RESPAWN_FREEZE": str(freeze)}
    env = os.environ | own | {"KQUEUE_REDIS_URL": url, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-m", "celery", "--quiet", "-A", "respawn", "worker", "-n", "respawn@localhost"]
    command += ["-Q", broker.queue("cpu").name, "--concurrency", "1", "--without-gossip", "--without-mingle"]
    command += ["--loglevel", "ERROR"]
    sender = broker.make_app(load(redis_url=url))

    def send(name: str) -> None:
        sender.send_task(name, queue=broker.queue("cpu"))

    def wait(count: int) -> list[tuple[float, float]]:
        while True:
            lines = log.read_text().splitlines() if log.exists() else []
            if len(lines) >= count:
                return [(float(a), float(b)) for a, b in map(str.split, lines)]
            if worker.poll() is not None:
                raise SystemExit("the worker ended")
            time.sleep(0.05)

    worker = subprocess.Popen(command, env=env, cwd=directory)
    try:
        send("noop")
        wait(1)
        for _ in range(tasks):
            send("noop")
        runs = wait(tasks + 1)
        for name in ("crash", "noop"):
            send(name)
        last = wait(tasks + 3)
    finally:
        worker.kill()
        worker.wait()
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(runs[1:])]
    print(f"  after a segmentation fault the next task starts in {last[-1][0] - last[-2][1]:.3f} s")
    return len(gaps) / (runs[-1][1] - runs[1][1]), gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--tasks", type=int, help="tasks for kqueue's pool, ten times the tasks for stock Celery", default=200
    )
    tasks = parser.parse_args().tasks
    results = []
    for case, pool, freeze in CASES:
        count = tasks if case == "kqueue" else max(5, tasks // 10)
        print(f"{case}: {count} tasks", flush=True)
        # Each case has a new server, because Redis can send a message to a worker that was just killed.
        with tempfile.TemporaryDirectory() as name, Valkey(Path(name) / "valkey") as valkey:
            results.append((case, *measure(Path(name), valkey.url, pool, freeze, count)))
    print(f"\n{'pool':8} {'tasks/s':>8} {'gap p50':>9} {'gap p95':>9} {'gap max':>9}")
    for case, rate, gaps in results:
        p95 = statistics.quantiles(gaps, n=20)[-1]
        print(f"{case:8} {rate:8.2f} {statistics.median(gaps):8.3f}s {p95:8.3f}s {max(gaps):8.3f}s")


if __name__ == "__main__":
    main()
