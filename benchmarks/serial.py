"""Measure which steps a host serializes: `python benchmarks/serial.py --out DIR [--at-once N,...] [--gpus N,...]`.

An evaluation forks processes, seals them, and opens a GPU in each. Linux and the driver do parts of that for one
process at a time. The rate of such a part does not grow with the number of slots, and its duration does.

For each slot a program starts like a worker of a fleet, with a real fork server. It then repeats one step, each time in
a new fork. All slots begin together, after one operation that does not count. Each step is measured for `--seconds`
with each number of slots, on one GPU and spread evenly over each further number of GPUs. The columns of the table are
means in seconds:

- `fork`: from the call to the child's first instruction. `prepare`: what precedes the step, such as a context.
- `step`: its duration. `step user`, `step sys`: its CPU time in user code and in the kernel. `step wait`: the rest.
- `exit`: from the step's end until the child is reaped, including the end of its mappings and of its GPU context.
- `user`, `sys`, `wait`: the same for the whole operation, with the parent's CPU time.
- `host`: the host's CPU time for each operation, including kernel threads, the fork server, and other programs.

Figures go to `DIR/serial.json`, the table to `DIR/serial.txt`. With `--lane cpu` it measures the steps that need no
GPU. The exit status is 0 only if no step failed. Run it as the fleet's user, on a quiet host.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest import mock
from uuid import uuid4

import torch

from kqueue.config import load
from kqueue.folders import clean_environment
from workers.judge.candidate import harness, profile
from workers.judge.channel import flags, gpu_memory, packets, semaphores
from workers.judge.channel.orders import Opening, Order
from workers.judge.forkserver import files, handle, prewarm, process
from workers.judge.gpu.devices import choose, devices
from workers.judge.host import linux
from workers.judge.pipeline.exchange import await_opening
from workers.judge.sandbox import cgroups, self_check
from workers.judge.sandbox.seal import Profile, Role
from workers.plan import Scratch, environment, plan
from workers.slot import Slot

#: Time limits in seconds of an operation, which is then killed, and of a wait for a slot. Size of shared GPU memory.
OPERATION_S, PATIENCE_S, SHARED_BYTES = 60, 300.0, 2 << 20
TIMES = ("fork", "prepare", "step", "step user", "step sys", "step wait", "exit", "user", "sys", "wait", "host")


@dataclass
class Parent:
    """The process of a slot that forks operations, prepared like a fork server."""

    slot: Slot
    forkserver: handle.ForkServer
    check: self_check.SelfCheck

    def profile(self) -> Profile:
        """Return the profile of a new candidate."""
        scratch, host_bytes = str(self.slot.scratch / uuid4().hex), linux.physical_bytes() // 2
        return Profile(Role.CANDIDATE, self.slot.uid, scratch, 512, 2 << 30, host_bytes, 8 << 20, 2 << 30)

    def group(self) -> cgroups.Group:
        """Create a candidate's control group. Raise OSError if the host permits none."""
        if (group := self.check.groups.group(linux.physical_bytes() // 2, 512)) is None:
            raise OSError(f"no control groups: {self.check.measures['cgroup_memory']}")
        return group


#: A step: a generator that prepares the step before its first ``yield``, and cleans up after its second.
Step = Callable[[Parent], Generator[None]]


def fork(_parent: Parent) -> Generator[None]:
    """Do nothing, so that only a fork and an exit are measured."""
    yield


def network_namespace(_parent: Parent) -> Generator[None]:
    """Create a network namespace. Linux removes it after the exit."""
    yield
    linux.unshare(linux.CLONE_NEWNET)


def private_files(parent: Parent) -> Generator[None]:
    """Create a candidate's private file system, and attach it in a new mount namespace."""
    if (covers := parent.check.means.covers) is None:
        raise OSError(f"no mounts: {parent.check.measures['mounts']}")
    own = parent.profile()
    yield
    covers.attach(files.Files(own, covers).mount, own.scratch)


def control_group(parent: Parent) -> Generator[None]:
    """Create and remove a control group."""
    yield
    parent.group().remove()


def joined_group(parent: Parent) -> Generator[None]:
    """Move another process into a control group."""
    group, (ours, theirs) = parent.group(), multiprocessing.Pipe()
    if (pid := os.fork()) == 0:
        theirs.send("forked")
        theirs.recv()
        group.join()
        theirs.send("joined")
        linux.leave(0)
    ours.recv()
    yield
    ours.send("join")
    ours.recv()
    yield
    os.waitpid(pid, 0)
    group.remove()


def sealed_process(parent: Parent) -> Generator[None]:
    """Request a candidate from the slot's fork server, and wait until it is sealed and has opened its device."""
    yield
    candidate = process.SealedProcess(parent.forkserver, parent.profile(), OPERATION_S)
    opening = Opening("cuda" if parent.slot.on_gpu else "cpu", queues=1)
    await_opening(candidate, candidate.send(Order.OPEN, payload=opening))
    yield
    candidate.stop()


def cu_init(_parent: Parent) -> Generator[None]:
    """Initialise the driver."""
    yield
    gpu_memory.driver("cuInit", 0)


def bare_context(_parent: Parent) -> Generator[None]:
    """Create a context without torch."""
    gpu_memory.driver("cuInit", 0)
    yield
    gpu_memory.driver("cuDevicePrimaryCtxRetain", ctypes.byref(ctypes.c_void_p()), 0)


def torch_context(_parent: Parent) -> Generator[None]:
    """Initialise the driver and torch, and fill a tensor."""
    yield
    opened()


def pinned_page(_parent: Parent) -> Generator[None]:
    """Register a page of flags with the context, and unregister it."""
    opened()
    page = flags.attach(flags.create())
    yield
    semaphores.Semaphores(page).close()


def cublas_handle(_parent: Parent) -> Generator[None]:
    """Multiply matrices for the first time."""
    matrix = opened()
    yield
    (matrix @ matrix).cpu()


def memory_handle(_parent: Parent) -> Generator[None]:
    """Allocate memory, which another process maps and unmaps, and free it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        linux.die_with(os.getppid())()
        opened()
        theirs.send(b"opened")
        _, [descriptor] = packets.receive_with_fds(theirs, 8)
        gpu_memory.open_descriptor(descriptor, SHARED_BYTES).close()
        theirs.send(b"unmapped")
        linux.leave(0)
    opened()
    ours.recv(8)
    yield
    mapping, descriptor = gpu_memory.allocate(SHARED_BYTES)
    packets.send_with_fds(ours, b"memory", [descriptor])
    ours.recv(8)
    mapping.close()
    yield
    os.waitpid(pid, 0)


def triton_kernel(parent: Parent) -> Generator[None]:
    """Load and launch a Triton kernel from Triton's cache."""
    from workers.judge.forkserver import first_kernel

    rows = opened()
    with prewarm.cached_in(str(parent.slot.scratch / "triton")):
        yield
        first_kernel.normalise[(1,)](rows, rows, len(rows), **first_kernel.CONSTANTS)
        torch.cuda.synchronize()


def cupti(_parent: Parent) -> Generator[None]:
    """Record the kernels of a call with CUPTI."""
    call = opened().zero_
    yield
    profile.kernels(call)


def opened() -> torch.Tensor:
    """Open the GPU, and return a matrix there."""
    matrix = torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    return matrix


#: The steps that use no GPU, those that need one, and all. A sealed process uses the slot's device.
HOST: Final = (fork, network_namespace, private_files, control_group, joined_group)
GPU = (cu_init, bare_context, torch_context, pinned_page, cublas_handle, memory_handle, triton_kernel, cupti)
STEPS: Final[dict[str, Step]] = {step.__name__: step for step in (*HOST, *GPU, sealed_process)}


def serve(slot: Slot, requests: Connection) -> None:
    """Start like this slot's worker, then perform the requested steps until the connection closes."""
    harness.preload()
    forkserver = handle.fork(slot)
    forkserver.wait_ready()
    # Now this process becomes like the fork server. Candidates with one stream get these settings with an order.
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_DEVICE_MAX_COPY_CONNECTIONS": "1"}
    check = self_check.prepare(slot.uid, os.environ["CUDA_VISIBLE_DEVICES"])
    with prewarm.cached_in(str(slot.scratch / "triton")):
        prewarm.put(prewarm.prepare())
    gc.freeze()
    requests.send(check.report() | {"mappings": linux.read("/proc/self/maps").count("\n")})
    parent = Parent(slot, forkserver, check)
    with contextlib.suppress(EOFError):
        while True:
            step, seconds = requests.recv()
            requests.send(perform(step, parent))
            done, begun = list[dict[str, Any]](), time.monotonic() if requests.recv() else -seconds
            while time.monotonic() < begun + seconds:
                done.append(perform(step, parent))
            requests.send((time.monotonic() - begun, done))
    forkserver.stop()
    check.groups.close()
    linux.leave(0)  # skips libraries' destructors, which would print errors


def perform(step: Step, parent: Parent) -> dict[str, Any]:
    """Perform a step in a new process. Return its times in seconds, or its error."""
    reader, writer = os.pipe()
    begun, user, system = now()
    if (pid := os.fork()) == 0:
        os.write(writer, json.dumps(perform_here(step, parent)).encode())
        linux.leave(0)
    os.close(writer)
    result = json.loads(os.read(reader, 4096) or '{"error": "it died, or took too long"}')
    os.close(reader)
    child = os.wait4(pid, 0)[2]
    ended, ended_user, ended_system = now()
    if "error" in result:
        return result
    entry, start, end = result.pop("at")
    user, system = child.ru_utime + ended_user - user, child.ru_stime + ended_system - system
    times = {"fork": entry - begun, "prepare": start - entry, "step": end - start, "exit": ended - end}
    return result | times | {"user": user, "sys": system, "wait": max(0.0, ended - begun - user - system)}


def perform_here(step: Step, parent: Parent) -> dict[str, Any]:
    """Perform a step in this new process. Return the times of begin, start and end, and of the step, or the error."""
    entry = time.monotonic()
    signal.alarm(OPERATION_S)
    try:
        running = step(parent)
        next(running, None)
        start, user, system = now()
        next(running, None)
        end, ended_user, ended_system = now()
        next(running, None)
    except BaseException as error:  # noqa: BLE001 -- any error of Linux or the driver is a result
        return {"error": f"{type(error).__name__}: {error}"[:1000]}
    user, system = ended_user - user, ended_system - system
    wait = max(0.0, end - start - user - system)
    return {"at": (entry, start, end), "step user": user, "step sys": system, "step wait": wait}


def now() -> tuple[float, float, float]:
    """Return the clock, and this process's CPU time in user code and in the kernel."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), used.ru_utime, used.ru_stime


@contextlib.contextmanager
def slots(count: int, gpus: Sequence[str]) -> Generator[tuple[list[Connection], list[dict[str, Any]]]]:
    """Start slots, in turn on each of the GPUs with these UUIDs, or on the CPU. Yield connections and reports."""
    with tempfile.TemporaryDirectory(prefix="kqueue-serial-") as folder, contextlib.ExitStack() as stack:
        root, cores = Path(folder), len(os.sched_getaffinity(0))
        root.chmod(0o711)  # candidates with other uids must reach their scratch directories
        counts = {"slots_per_gpu": -(-count // len(gpus)), "cpu_slots": 0} if gpus else {"cpu_slots": count}
        config = load(home=root / "home", scratch=root / "scratch", gpus=",".join(gpus) or "none", **counts)
        planned = plan(config, [device for device in devices() if device.uuid in gpus], cores)
        scratch = Scratch(config.scratch)
        stack.callback(scratch.release)
        connections, spawning = list[Connection](), multiprocessing.get_context("spawn")
        for slot in scratch.assign(sorted(planned, key=lambda slot: int(slot.name.rpartition("-")[2]))[:count]):
            ours, theirs = spawning.Pipe()
            program = spawning.Process(target=serve, args=(slot, theirs), daemon=True)
            variables = clean_environment(environment(slot, config, cores, os.environ))
            with mock.patch.dict(os.environ, variables, clear=True):
                program.start()
            theirs.close()
            connections.append(ours)
            stack.callback(program.join, 30.0)
            stack.callback(ours.close)
        yield connections, [received(connection) for connection in connections]


def received(connection: Connection) -> Any:
    """Return a slot's next message. Raise TimeoutError if it takes too long."""
    if not connection.poll(PATIENCE_S):
        raise TimeoutError("a slot does not answer")
    return connection.recv()


def measure(name: str, seconds: float, connections: Sequence[Connection]) -> dict[str, Any]:
    """Repeat a step in all slots at once for some seconds. Return the rate and the mean times, or an error."""
    from speed import cpu_seconds  # speed's other imports would change the slots' processes

    for connection in connections:
        connection.send((STEPS[name], seconds))
    firsts = [received(connection) for connection in connections]
    for connection in connections:
        connection.send(not any("error" in first for first in firsts))
    busy = cpu_seconds()
    results = [received(connection) for connection in connections]
    busy = cpu_seconds() - busy
    done = [each for _, times in results for each in times]
    if errors := [each["error"] for each in (*firsts, *done) if "error" in each]:
        return {"error": errors[0]}
    means = {name: round(sum(each[name] for each in done) / len(done), 5) for name in TIMES[:-1]}
    means |= {"per_s": round(sum(len(times) / took for took, times in results), 2), "operations": len(done)}
    return means | {"host": round(busy / len(done), 5)}


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the text table."""
    yield f"{'':17}{'gpus':>5}{'slots':>6}{'per_s':>9}" + "".join(f"{name:>10}" for name in TIMES)
    for row in rows:
        figures = f" {row['error']}" if "error" in row else "".join(f"{row[time]:10.4f}" for time in TIMES)
        yield f"{row['name']:17}{row['gpus']:5}{row['slots']:6}{row.get('per_s', 0):9.2f}{figures}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the figures")
    parser.add_argument("--lane", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--at-once", default="1,4,8,16", help="numbers of slots (1,4,8,16)")
    parser.add_argument("--gpus", help="numbers of GPUs (1, and all of this host's)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each measurement (2)")
    parser.add_argument("--only", default=",".join(STEPS), help="steps (%(default)s)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    levels = [*map(int, options.at_once.split(","))]
    found = choose("all", devices(), os.environ.get("CUDA_VISIBLE_DEVICES")) if options.lane == "gpu" else []
    counts = sorted(map(int, options.gpus.split(","))) if options.gpus else sorted({min(1, len(found)), len(found)})
    if max(counts) > len(found) or (options.lane == "gpu" and not found):
        parser.error(f"this host has {len(found)} GPUs")
    rows, reports = list[dict[str, Any]](), dict[int, Any]()
    for gpus in counts:
        left_out = {*(HOST if gpus > counts[0] else ()), *(() if gpus else GPU)}
        names = [name for name in options.only.split(",") if STEPS[name] not in left_out]
        with slots(max(levels), [device.uuid for device in found[:gpus]]) as (connections, reports[gpus]):
            for name, level in itertools.product(names, levels):
                figures = measure(name, options.seconds, connections[:level])
                rows.append({"name": name, "gpus": gpus, "slots": level} | figures)
                print(json.dumps(rows[-1]), flush=True)
    lines = "\n".join(table(sorted(rows, key=lambda row: [*STEPS].index(row["name"]))))
    figures = {"cores": os.cpu_count(), "gpus": [gpu.name for gpu in found], "slots": reports, "rows": rows}
    (options.out / "serial.json").write_text(json.dumps(figures, indent=1) + "\n")
    (options.out / "serial.txt").write_text(lines + "\n")
    print(lines)
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
