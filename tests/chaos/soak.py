"""A long run of the gallery while parts of the fleet are killed at random: `python tests/chaos/soak.py`.

Starts `kqueue up` in a temporary home and keeps its queue filled with quick evaluations of the gallery while a seeded
:mod:`monkey <tests.chaos.monkey>` strikes. At the end everything is reconciled: each accepted evaluation has one
verdict, each verdict is the gallery's expected one unless the log of chaos proves the fleet's fault, no process
remains, and no parent has gained descriptors, sockets or memory. Exit status 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from uuid import UUID

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gallery import Entry, entries
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url

from kqueue import Client, backends
from kqueue.categories import Category
from kqueue.cli.render import print_table
from kqueue.config import Config, load
from kqueue.contract import Deadlines, Request, Timing
from kqueue.errors import KqueueError, ServiceError
from kqueue.local.process import Child, wait_until_ready
from kqueue.store.engine import connect, transaction
from tests.chaos.family import Family
from tests.chaos.monkey import Event, Monkey
from tests.chaos.reconcile import Reconciliation, reconcile
from tests.chaos.watch import Watch

_ROOT: Final = Path(__file__).resolve().parents[2]
_BATCH: Final = "soak"
#: Kernels that take seconds on a CPU and are omitted there: Triton's interpreter on all but element-wise kernels.
#: Compiled kernels (the backends cuda and cpp) are omitted everywhere.
_INTERPRETED: Final = "good/triton/"
_QUICK_INTERPRETED: Final = frozenset({"good/triton/gelu-fp16"})
#: Problems whose reference is so slow on a CPU that calls are only checked there, not timed.
_LARGE: Final = frozenset({"gelu", "softmax"})
#: Memory limit in bytes of a CPU's candidate. Filling the gallery's 3 GiB takes seconds.
_CPU_MEMORY_BYTES: Final = 1 << 30
#: Share of wrong kernels on a GPU.
_FAULTY: Final = 0.3
#: Kernels that can harm a GPU. They are half of the wrong ones.
_HARD: Final = (
    "bad/illegal_memory_access_triton",
    "bad/endless_loop_triton",
    "bad/endless_loop",
    "bad/gpu_memory_bomb",
    "bad/host_memory_bomb",
    "bad/segfault",
    "bad/index_out_of_range",
    "bad/kill_itself",
)
#: Deadline in seconds of kernels that never end, by lane.
_DEADLINE_S: Final = {"cpu": 1.0, "gpu": 3.0}
#: Number of evaluations submitted at once.
_SUBMIT: Final = 4
#: Number kept waiting for each slot. More would only be judged when the chaos is over.
_WAITING: Final = 4
#: Limit of open evaluations of each slot. Those whose messages Redis lost wait for the sweeper beside new ones.
_OPEN: Final = 10
_START_S: Final = 300.0
#: Maximum seconds between two verdicts once the monkey has stopped.
_STUCK_S: Final = 180.0
#: Maximum growth of the GPU's used memory in bytes from start to end.
_GPU_SLACK_BYTES: Final = 64 << 20


def main() -> int:
    """Run the soak and return the exit status."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    root = Path(tempfile.mkdtemp(prefix="kqueue-soak-"))
    root.chmod(0o711)  # candidates with separate uids must reach their scratch directories
    try:
        return _soak(options, root)
    except (KqueueError, TimeoutError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    finally:
        if options.logs and (root / "home" / "logs").exists():
            shutil.copytree(root / "home" / "logs", options.logs, dirs_exist_ok=True)
        shutil.rmtree(root, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--evaluations", type=int, default=20_000, metavar="N", help="how many (default 20,000)")
    parser.add_argument("--minutes", type=float, metavar="M", help="submit for no longer than this")
    parser.add_argument("--seed", type=int, default=1, help="of the mixture and of chaos (default 1)")
    parser.add_argument("--every", type=float, default=2.5, metavar="S", help="mean seconds between acts (default 2.5)")
    parser.add_argument("--calm", action="store_true", help="kill nothing: what chaos costs is the difference")
    parser.add_argument("--slots", type=int, help="slots of the CPU (default 2), or of each GPU (default 6)")
    parser.add_argument("--gpus", default="0", metavar="N,N", help="the GPUs, by NVML's numbers (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything there, as JSON")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="copy the fleet's logs there")
    options = parser.parse_args()
    options.slots = options.slots or (6 if options.lane == "gpu" else 2)
    return options


def _soak(options: argparse.Namespace, root: Path) -> int:
    gpu = options.lane == "gpu"
    table = {entry.name: entry for entry in _gallery(options.lane)}
    fleet = _start_fleet(root, options.gpus if gpu else None, options.slots)
    try:
        return _run(options, root, table, fleet, gpu)
    finally:
        fleet.stop((signal.SIGINT, 30.0))


def _run(options: argparse.Namespace, root: Path, table: dict[str, Entry], fleet: Child, gpu: bool) -> int:
    config = load(home=root / "home")
    family = Family(fleet.pid)
    watch = Watch(family, [int(number) for number in options.gpus.split(",")] if gpu else [])
    idle_gpu = watch.gpu_used()
    engine = connect(config.require_database(), application="soak", pool_size=2)
    monkey = _monkey(options, family, config)
    accepted: dict[UUID, str] = {}
    slots = options.slots * (len(options.gpus.split(",")) if gpu else 1)
    begun, at = time.monotonic(), time.time()
    print(f"lane {options.lane}, seed {options.seed}, {len(table)} entries of the gallery", flush=True)
    with Client(config) as kq:
        watch.start()
        if not options.calm:
            monkey.start()
        try:
            for request, name in _mixture(options, table, begun):
                _submit(kq, engine, config, slots, request, name, accepted)
            submitted_s = time.monotonic() - begun
        finally:
            if not options.calm:
                monkey.stop()
        stuck = _drain(engine)
        seconds = time.monotonic() - begun
        after = kq.evaluate(_request(table["good/torch/gelu"], options.lane, None), timeout=300).category
    watch.stop()
    found = reconcile(engine, _BATCH, accepted, {name: entry.expected for name, entry in table.items()}, monkey.events)
    found.faults += stuck
    engine.dispose()
    fleet.stop((signal.SIGTERM, 90.0), (signal.SIGINT, 30.0))
    found.faults += _last_faults(fleet, watch, monkey.events, after, idle_gpu)
    record = {
        "lane": options.lane,
        "seed": options.seed,
        "calm": options.calm,
        "began_at": at,
        "submitting_s": submitted_s,
        "seconds": seconds,
        "per_s": len(accepted) / seconds,
        "counts": found.counts,
        "faults": found.faults,
        "struck": found.struck,
        "lives": [asdict(life) for life in watch.lives()],
        "gpu_bytes": {"idle": idle_gpu, "end": watch.gpu_used(), "samples": watch.gpu_bytes},
        "entries": Counter(accepted.values()),
        "events": [asdict(event) for event in monkey.events],
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    _show(found, monkey.events, record)
    return 1 if found.faults else 0


def _gallery(lane: str) -> list[Entry]:
    """Return the entries that are judged, each made quick."""
    from workers.judge.pipeline.tools import missing

    able = {backend for backend in backends.registered() if not missing(backend)} - {"cpp", "cuda"}
    left_out = {
        entry.name
        for entry in entries("cpu")
        if lane == "cpu" and entry.name.startswith(_INTERPRETED) and entry.name not in _QUICK_INTERPRETED
    }
    return [entry for entry in entries(lane) if entry.backend in able and entry.name not in left_out]


def _request(entry: Entry, lane: str, number: int | None) -> Request:
    """Return a request with few checks and timed calls, and short deadlines for entries that will reach them."""
    request = entry.request(lane)
    settings = request.settings
    timed = lane != "cpu" or entry.problem.stem not in _LARGE
    changes: dict[str, Any] = {"checks": 2, "timing": Timing(calls=5, warmup=0) if timed else Timing().off()}
    if lane == "cpu":
        limit = min(_CPU_MEMORY_BYTES, settings.limits.host_memory_bytes)
        changes["limits"] = settings.limits.model_copy(update={"host_memory_bytes": limit})
    if entry.expected in {Category.TIMEOUT, Category.REFERENCE_TIMEOUT}:
        # The deadlines that differ from the default are those that end it.
        short = settings.deadlines.model_dump(exclude_defaults=True)
        changes["deadlines"] = Deadlines(**{name: min(_DEADLINE_S[lane], value) for name, value in short.items()})
    return request.model_copy(
        update={
            "settings": settings.model_copy(update=changes),
            "batch": None if number is None else _BATCH,
            "idempotency_key": None if number is None else f"{_BATCH}-{number}",
        }
    )


def _mixture(
    options: argparse.Namespace, table: dict[str, Entry], begun: float
) -> Iterator[tuple[list[Request], list[str]]]:
    """Yield batches of requests with the names of their entries, until there are enough."""
    choose = random.Random(options.seed)
    good = [name for name, entry in table.items() if entry.expected is Category.PASSED]
    bad = [name for name in table if name not in good]
    hard = [name for name in _HARD if name in table]
    number = 0

    def one() -> str:
        if options.lane == "cpu":
            return choose.choice(list(table))
        if choose.random() >= _FAULTY:
            return choose.choice(good)
        return choose.choice(hard if choose.random() < 0.5 else bad)

    while number < options.evaluations and (options.minutes is None or time.monotonic() - begun < options.minutes * 60):
        count = min(_SUBMIT, options.evaluations - number)
        names = [one() for _ in range(count)]
        yield [_request(table[name], options.lane, number + i) for i, name in enumerate(names)], names
        number += count


def _start_fleet(root: Path, gpus: str | None, slots: int) -> Child:
    """Start a `kqueue up` with durable Postgres, because committed rows must survive its kills."""
    up = "import sys; sys.argv[0] = 'kqueue'; from kqueue.cli import main; main()"
    devices = ["--gpus", "none", "--cpu-slots", str(slots)]
    if gpus is not None:
        devices = ["--gpus", gpus, "--slots-per-gpu", str(slots), "--cpu-slots", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")}
    environment |= {"KQUEUE_HOME": str(root / "home"), "KQUEUE_SCRATCH": str(root / "scratch")}
    # The soak counts its submissions, and counts processes by their role, so no other source of work is wanted.
    environment |= {"PYTHONPATH": str(_ROOT), "KQUEUE_LOG_JSON": "true", "KQUEUE_PROBE_SHARE": "0"}
    fleet = Child(
        [sys.executable, "-c", up, "up", "--no-flower", "--no-http", *devices],
        log=root / "home" / "logs" / "up.log",
        environment=environment,
        death_signal=signal.SIGINT,
    )
    wait_until_ready(fleet, "kqueue up", lambda: load(home=root / "home").database_url is not None, _START_S)
    return fleet


def _monkey(options: argparse.Namespace, family: Family, config: Config) -> Monkey:
    database = make_url(config.require_database()).set(drivername="postgresql").render_as_string(hide_password=False)
    redis_url = config.require_redis().replace("redis+socket://", "unix://")
    return Monkey(family, database, redis_url, seed=options.seed, every_s=options.every)


def _submit(
    kq: Client,
    engine: Engine,
    config: Config,
    slots: int,
    requests: list[Request],
    names: list[str],
    accepted: dict[UUID, str],
) -> None:
    """Submit a batch when there is room for it. Repeat it under its keys until it is answered."""
    while True:
        try:
            if _has_room(engine, config, slots):
                tickets = kq.submit_batch(requests, allow_idle_lane=True)
                accepted |= {ticket.evaluation_id: name for ticket, name in zip(tickets, names, strict=True)}
                return
        except ServiceError:
            pass
        time.sleep(0.2)


def _has_room(engine: Engine, config: Config, slots: int) -> bool:
    """Return whether few messages wait and few enough evaluations are open."""
    import redis

    with transaction(engine) as connection:
        states = dict(
            connection.execute(text("SELECT state, count(*) FROM evaluations WHERE state <> 'done' GROUP BY 1")).all()
        )
    if sum(states.values()) < _WAITING * slots:
        return True
    if sum(states.values()) >= _OPEN * slots:
        return False
    try:
        with redis.Redis.from_url(config.require_redis().replace("redis+socket://", "unix://"), socket_timeout=2) as r:
            return sum(int(r.llen(f"kqueue.{lane}")) for lane in ("cpu", "gpu")) < _WAITING * slots / 2
    except redis.RedisError:
        return False


def _drain(engine: Engine) -> list[str]:
    """Wait for the last evaluations while some still end. Return the rest as faults."""
    least, deadline = math.inf, 0.0
    while True:
        with transaction(engine) as connection:
            left = connection.execute(text("SELECT id, state FROM evaluations WHERE state <> 'done'")).all()
            held = connection.execute(text("SELECT evaluation_id FROM attempts WHERE ended_at IS NULL")).all()
        if not left and not held:
            return []
        if len(left) + len(held) < least:
            least, deadline = len(left) + len(held), time.monotonic() + _STUCK_S
        if time.monotonic() > deadline:
            return [f"nothing ended for {_STUCK_S:.0f} s after the last act: {row.id} is {row.state}" for row in left]
        time.sleep(0.5)


def _last_faults(
    fleet: Child, watch: Watch, events: Sequence[Event], after: Category, idle_gpu: int | None
) -> list[str]:
    """Return the faults that remain after the fleet was stopped."""
    faults = [f"orphan: {orphan}" for orphan in watch.orphans()] + watch.faults
    faults += [line for life in watch.lives() for line in life.leaks()]
    faults += [f"{event.action}: {event.note}" for event in events if event.note]
    if after is not Category.PASSED:
        faults.append(f"the evaluation after the last is {after}, not passed")
    if fleet.status != 0:
        faults.append(f"kqueue up ended with status {fleet.status}")
    used = watch.gpu_used()
    if used is not None and idle_gpu is not None and used > idle_gpu + _GPU_SLACK_BYTES:
        faults.append(f"GPU memory: {idle_gpu >> 20} MiB before, {used >> 20} MiB after")
    return faults


def _show(found: Reconciliation, events: Sequence[Event], record: dict[str, Any]) -> None:
    print_table(("what", "n"), found.counts.items(), title="reconciliation")
    acts = Counter(event.action for event in events)
    rows = [(action, n, found.struck[action]) for action, n in sorted(acts.items())]
    print_table(("act of chaos", "n", "attempts"), rows)
    for fault in found.faults:
        print(f"FAULT {fault}")
    print(
        f"{record['counts']['accepted']} evaluations in {record['seconds']:.0f} s, {record['per_s']:.2f}/s, "
        f"{len(events)} acts of chaos, {len(found.faults)} faults"
    )


if __name__ == "__main__":
    sys.exit(main())
