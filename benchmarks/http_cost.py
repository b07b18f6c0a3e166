"""Measure the cost of HTTP: `python benchmarks/http_cost.py [--lane cpu|gpu] [--out FILE]`.

It starts this machine's fleet in a temporary home, and `kqueue serve` for it. Then it

1. posts 200 evaluations to `/eval` that all have to wait, and polls `/health` at the same time.
2. evaluates one quick kernel after another, alternately by the plain client and by `POST /eval`, and measures the
   additional time of each beyond the time from submission to verdict.
3. requests some pages over many connections at once, like `wrk`.

The figures are printed as tables and, with `--out`, written as JSON. The exit status is 1 if the 99th percentile of
`/health` exceeds 50 ms while requests wait, or if an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import repeat

from kqueue import Client, Verdict
from kqueue.config import Config, load
from kqueue.local.fleet import LocalFleet
from kqueue.store import tokens
from kqueue.store.engine import connect

#: Limit in milliseconds of the 99th percentile of `/health` while 200 requests wait.
GOAL_MS = 50.0
#: Pause in seconds between two requests to `/health`.
PAUSE_S = 0.005
PROBLEM = repeat.PROBLEM.format(name="Model", body="torch.relu(x)", shape="64, 64")
KERNEL = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.clamp(min=0)\n"
#: A kernel that occupies a slot, but no core, until it is cancelled.
NAP = "import time, torch\nclass ModelNew(torch.nn.Module):\n    def __init__(self):\n        time.sleep(3600)\n"


def sources(name: object) -> dict[str, str]:
    """Return a request's sources. Different names give different kernels."""
    return {"original_model_src": PROBLEM, "custom_model_src": f"{KERNEL}# {name}\n"}


#: Other fields of a request, for as little judging as possible.
QUICK: dict[str, Any] = {"backend": "torch", "num_correct_trials": 1, "measure_performance": False}


def bearer() -> dict[str, str]:
    """Return the header with the token from :func:`serving`, which the processes of the pools inherit."""
    return {"Authorization": f"Bearer {os.environ['KQUEUE_TOKEN']}"}


@contextmanager
def serving(config: Config) -> Generator[str]:
    """Run `kqueue serve` on a free loopback port, in a separate process, and create a token for it."""
    engine = connect(config.require_database(), application="benchmark", pool_size=1)
    os.environ["KQUEUE_TOKEN"] = tokens.create(engine, "benchmark", [tokens.Scope.PROBLEMS])[1]
    engine.dispose()
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "kqueue", "serve", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    server = subprocess.Popen(command, env=dict(os.environ) | config.environment(), stdout=subprocess.DEVNULL)
    try:
        while not answers(url):
            if server.poll() is not None:
                raise SystemExit("`kqueue serve` ended")
            time.sleep(0.1)
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def answers(url: str) -> bool:
    """Return whether the server is healthy."""
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


async def ask(url: str, path: str, seconds: float, pause_s: float = 0.0) -> list[float]:
    """Request a page repeatedly over one connection. Return the milliseconds of each answer. All must be 200.

    It uses a bare socket, because a client library needs more CPU time than the server.
    """
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: {bearer()['Authorization']}\r\n\r\n".encode()
    took: list[float] = []
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            begun = time.perf_counter()
            writer.write(request)
            status, *head = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
            if b" 200 " not in status:
                raise SystemExit(f"{path}: {status.decode()}")
            length = next(line.partition(b":")[2] for line in head if line.startswith(b"content-length:"))
            await reader.readexactly(int(length))
            took.append((time.perf_counter() - begun) * 1000)
            await asyncio.sleep(pause_s)
    finally:
        writer.close()
    return took


def asked(url: str, path: str, seconds: float, connections: int, pause_s: float = 0.0) -> list[float]:
    """Run :func:`ask` over many connections at once, in a separate process."""

    async def every() -> list[float]:
        each = await asyncio.gather(*(ask(url, path, seconds, pause_s) for _ in range(connections)))
        return [took for connection in each for took in connection]

    return asyncio.run(every())


def figures(took: list[float]) -> dict[str, float]:
    """Return the count, and median, 99th percentile and maximum in milliseconds."""
    cuts = statistics.quantiles(took, n=100, method="inclusive")
    return {"count": len(took), "p50_ms": cuts[49], "p99_ms": cuts[98], "max_ms": max(took)}


def posted(url: str, waiters: int) -> int:
    """Post evaluations at once. Return the number of answers with status 200 and a correct kernel."""

    async def every() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=waiters)
        async with httpx.AsyncClient(base_url=url, headers=bearer(), timeout=900, limits=limits) as http:
            bodies = [sources(f"waits {number}") | QUICK for number in range(waiters)]
            return await asyncio.gather(*(http.post("/eval", json=body) for body in bodies))

    return sum(answer.status_code == 200 and answer.json()["correctness"] for answer in asyncio.run(every()))


def health(url: str, client: Client, slots: int, lane: str, waiters: int, seconds: float) -> dict[str, Any]:
    """Measure `/health` on an idle server, while many requests arrive, and while they wait."""
    entry: dict[str, Any] = {"problem": PROBLEM, "backend": "torch", "lane": lane}
    entry["settings"] = {"deadlines": {"construct_s": 900}}
    naps = client.submit_batch([entry | {"kernel": f"{NAP}# {n}"} for n in range(slots)])
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        idle = pool.apply(asked, (url, "/health", seconds, 1, PAUSE_S))
        posting = pool.apply_async(posted, (url, waiters))
        coming: list[float] = []
        queued = 0
        while queued < waiters and not posting.ready():
            coming += pool.apply(asked, (url, "/health", 0.2, 1, PAUSE_S))
            queued = httpx.get(f"{url}/health", headers=bearer()).json()["queued"]
        waiting = pool.apply(asked, (url, "/health", seconds, 1, PAUSE_S))
        if posting.ready():
            raise SystemExit("the requests did not wait")
        for nap in naps:
            nap.cancel()
        good = posting.get(900)
    rows = {"idle": figures(idle), "while they come": figures(coming), "while they wait": figures(waiting)}
    return {"waiters": waiters, "answered 200 and correct": good, "health": rows}


def overhead(url: str, client: Client, lane: str, pairs: int) -> dict[str, Any]:
    """Measure the milliseconds beyond submission to verdict, alternately by the plain client and by HTTP."""

    def beyond(wall_s: float, verdict: Verdict) -> float:
        return (wall_s - (verdict.finished_at - verdict.submitted_at).total_seconds()) * 1000

    settings = {"checks": 1, "timing": {"purpose": "check"}}
    took: dict[str, list[float]] = {"plain client": [], "POST /eval": []}
    with httpx.Client(base_url=url, headers=bearer(), timeout=600) as http:
        for number in range(pairs):
            kernel = sources(f"plain {number}")["custom_model_src"]
            begun = time.perf_counter()
            verdict = client.evaluate(problem=PROBLEM, kernel=kernel, backend="torch", lane=lane, settings=settings)
            took["plain client"].append(beyond(time.perf_counter() - begun, verdict))
            begun = time.perf_counter()
            answer = http.post("/eval", json=sources(f"http {number}") | QUICK)
            wall_s = time.perf_counter() - begun
            found = client.verdict(answer.json()["metadata"]["evaluation_id"])
            assert found is not None
            took["POST /eval"].append(beyond(wall_s, found))
    rows = {name: figures(values[1:]) for name, values in took.items()}
    return {"ways": rows, "http_costs_ms": rows["POST /eval"]["p50_ms"] - rows["plain client"]["p50_ms"]}


def load_test(url: str, client: Client, connections: int, seconds: float) -> dict[str, Any]:
    """Measure answers per second for some pages, over many connections at once."""
    ticket = client.submit(problem=PROBLEM, kernel=KERNEL, backend="torch", settings={"timing": {"purpose": "check"}})
    ticket.wait(120)
    pages: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for path in ("/health", "/v1/categories", f"/v1/evaluations/{ticket.evaluation_id}"):
            took = pool.apply(asked, (url, path, seconds, connections))
            name = path.replace(str(ticket.evaluation_id), "{id}")
            pages[name] = {"answers/s": len(took) / seconds} | figures(took)
    return {"connections": connections, "pages": pages}


def table(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    columns = list(next(iter(rows.values())))
    print(" " * 28 + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        print(f"{name:<28}" + "".join(f"{row[column]:>12.1f}" for column in columns))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=("cpu", "gpu"), default="cpu", help="lane of the evaluations")
    parser.add_argument("--waiters", type=int, default=200, help="requests that wait at once")
    parser.add_argument("--pairs", type=int, default=30, help="evaluations by each client")
    parser.add_argument("--connections", type=int, default=32, help="connections of the load test")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each measurement")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    options = parser.parse_args()
    found: dict[str, Any] = {"lane": options.lane, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(prefix="kqueue-http-cost-") as home:
        Path(home).chmod(0o755)
        on_gpu = options.lane == "gpu"
        config = load(
            home=Path(home), reuse=False, probe_share=0, gpus="all" if on_gpu else "none", cpu_slots=0 if on_gpu else 1
        )
        with LocalFleet(config) as fleet, fleet.client() as client, serving(fleet.config) as url:
            slots = len(fleet.slots())
            found["overhead"] = overhead(url, client, options.lane, options.pairs)
            found["load"] = load_test(url, client, options.connections, options.seconds)
            found["waiting"] = health(url, client, slots, options.lane, options.waiters, options.seconds)
    waiting = found["waiting"]
    title = f"GET /health and {waiting['waiters']} of POST /eval ({waiting['answered 200 and correct']} answered)"
    table(title, waiting["health"])
    table("Beyond submission to verdict, one evaluation at a time", found["overhead"]["ways"])
    print(f"HTTP costs {found['overhead']['http_costs_ms']:.1f} ms per evaluation (medians)")
    table(f"Load over {found['load']['connections']} connections", found["load"]["pages"])
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    p99 = waiting["health"]["while they wait"]["p99_ms"]
    good = waiting["answered 200 and correct"] == waiting["waiters"]
    print(f"\n/health at its 99th percentile: {p99:.1f} ms, the goal is {GOAL_MS:.0f} ms")
    return 0 if p99 <= GOAL_MS and good else 1


if __name__ == "__main__":
    sys.exit(main())
