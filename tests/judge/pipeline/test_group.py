"""Problems with WORLD: a kernel runs in several sealed processes, which reach each other and nothing else."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kqueue.categories import Category
from kqueue.contract import Outcome, Phase, Request, Settings
from tests.judge.rig import Rig
from workers.judge.ending import EvaluationEnded
from workers.judge.forkserver.control import End
from workers.judge.host.exclusive import rooms
from workers.judge.pipeline import group, static

pytestmark = pytest.mark.slow("forks two processes for each of two ranks")

HEAD = """
import os, socket, time
import torch
import torch.distributed as dist

WORLD = 2

"""
FORWARD = """class {name}(torch.nn.Module):
    def forward(self, x):
        {first}
        total = x * (1 + dist.get_rank())
        dist.all_reduce(total)
        {last}
        return total

"""
INPUTS = """
def get_inputs():
    return [torch.randn(8, 8)]
"""


def model(name: str, first: str = "pass", last: str = "pass") -> str:
    return HEAD + FORWARD.format(name=name, first=first, last=last)


PROBLEM = model("Model") + INPUTS


def judge(rig: Rig, kernel: str, problem: str = PROBLEM, *, timed: bool = False, check_s: float = 30) -> Outcome:
    timing, deadlines = {"calls": 6, "warmup": 1}, {"check_s": check_s}
    settings = Settings.model_validate({"checks": 2, "timing": timing, "deadlines": deadlines})
    if not timed:
        settings = settings.model_copy(update={"timing": settings.timing.off()})
    return rig.judge(Request(problem=problem, kernel=kernel, backend="torch", settings=settings))


def networks(pid: int) -> int:
    """Return how many networks a process holds open."""
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd") if os.path.lexists(entry.path)]  # noqa: PTH115
    return sum(link.startswith("net:") for link in links)


def test_a_rank_that_is_at_no_line_of_the_kernel_is_not_the_late_one() -> None:
    late = EvaluationEnded(Category.CRASHED, "late", Phase.CHECK, signal="SIGKILL")
    logs = ('(most recent call first)File "/x/kernel.py", line 9', "")
    ends: list[Any] = [SimpleNamespace(ended=SimpleNamespace(reason=End.DEADLINE, log=log)) for log in logs]
    assert min(ends, key=lambda end: group._weight(late, end)) is ends[0]


def test_a_right_kernel_passes_and_is_timed(rig: Rig) -> None:
    """Each rank has other inputs and answers right. The group's time is measured, and of its networks one stays."""
    outcome = judge(rig, model("ModelNew"), timed=True)
    assert outcome.category is Category.PASSED, (outcome.message, outcome.log)
    assert outcome.message.startswith(
        "right on 2 input sets, in 2 ranks; but none of the input sets is a hidden variant"
    )
    assert outcome.runtime is not None
    assert outcome.evidence.verified_calls
    assert networks(rig.forkserver.pid) <= 2


@pytest.mark.parametrize(
    ("first", "last", "category"),
    [
        ("pass", "total += dist.get_rank()", Category.WRONG_VALUES),
        ("pass", "if dist.get_rank(): total = self.__dict__.setdefault('kept', total)", Category.WRONG_VALUES),
        ("while dist.get_rank() == 1: time.sleep(0.01)", "pass", Category.TIMEOUT),
        ("pass", "dist.barrier() if dist.get_rank() == 1 else None", Category.TIMEOUT),
        ("while dist.get_rank() == 1: time.sleep(0.01)\n        time.sleep(60)", "pass", Category.TIMEOUT),
        ("os.abort() if dist.get_rank() == 1 else None", "pass", Category.CRASHED),
        ("x.new_empty(1 << 50) if dist.get_rank() == 1 else None", "pass", Category.HOST_OUT_OF_MEMORY),
        ("x.add_(dist.get_rank())", "pass", Category.INPUT_MUTATED),
    ],
    ids=["wrong", "precomputed", "hanging", "waiting", "both hanging", "crashed", "out of memory", "changed input"],
)
def test_the_rank_that_failed_first_is_named(rig: Rig, first: str, last: str, category: Category) -> None:
    """Whatever its peer then does, the rank that failed is named, and all ranks end."""
    outcome = judge(rig, model("ModelNew", first, last), check_s=2 if category is Category.TIMEOUT else 30)
    assert (outcome.category, outcome.facts.rank) == (category, 1), (outcome.message, outcome.log)
    assert outcome.message.startswith("rank 1: ")
    assert rig.sealed() == []


def test_a_failure_of_the_reference_is_the_problems(rig: Rig) -> None:
    """A reference that raises in one rank is to blame, and so is a number of ranks that is none."""
    broken = judge(rig, model("ModelNew"), model("Model", "assert dist.get_rank() == 0, 'no'") + INPUTS)
    assert (broken.category, broken.facts.rank) == (Category.REFERENCE_ERROR, 1), broken.message
    with pytest.raises(EvaluationEnded, match="WORLD = 2 is stated once"):
        static.world("WORLD = 99")
    check = "CHECK_BOUND = 1e-2\ndef check(reference_outputs, outputs, inputs):\n    return True\n"
    for more, name in (("CALLS = 2\n", "CALLS"), (check, "check()")):
        clash = judge(rig, model("ModelNew"), PROBLEM + more)
        assert (clash.category, clash.message) == (
            Category.INVALID_PROBLEM,
            f"WORLD and {name} cannot be combined: state one of them",
        )


REACH = """for family, place in {places}:
            link = socket.socket(family, socket.SOCK_STREAM)
            try:
                link.connect(place)
            except OSError:
                link.close()
            else:
                raise RuntimeError(f"reached {{place}}")
        try:
            socket.socket(getattr(socket, "AF_VSOCK", 40), socket.SOCK_STREAM)
        except OSError:
            pass
        else:
            raise RuntimeError("reached the hypervisor")"""


def test_a_group_reaches_nothing_else(rig: Rig, tmp_path: Path) -> None:
    """A rank connects neither to the host's network nor to any local socket."""
    tmp_path.chmod(0o755)
    path, name = str(tmp_path / "door"), "\0kqueue-door"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as door, socket.socket(socket.AF_UNIX) as hidden:
        tcp.bind(("127.0.0.1", 0))
        door.bind(path)
        hidden.bind(name)
        places: list[tuple[int, object]] = [(2, tcp.getsockname()), (1, path), (1, name)]
        for one in (tcp, door, hidden):
            one.listen()
        for family, place in places:
            with socket.socket(family) as link:
                link.connect(place)  # pyright: ignore[reportArgumentType] -- without the seal, it is reached
        outcome = judge(rig, model("ModelNew", REACH.format(places=places)))
    assert outcome.category is Category.PASSED, (outcome.message, outcome.log)


MEETS = """folder, own, pids, places = os.environ["TEMPDIR"], os.getpid(), [None, None], [None, None]
        dist.all_gather_object(pids, own)
        dist.all_gather_object(places, os.stat("/dev/shm").st_dev)
        assert places[0] == places[1], "NCCL would not let them use each other's memory"
        link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        link.bind(f"{folder}/{own}")
        dist.barrier()
        file = os.memfd_create("memory")
        os.write(file, str(own).encode())
        other = pids[1 - dist.get_rank()]
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, file.to_bytes(4, "little"))
        link.sendmsg([b"fd"], [rights], 0, f"{folder}/{other}")
        found = os.pread(socket.recv_fds(link, 2, 1)[1][0], 99, 0)
        assert found == str(other).encode(), found
        os.unlink(f"{folder}/{own}")"""


def test_ranks_share_memory_by_descriptors(rig: Rig) -> None:
    """Like torch's symmetric memory, ranks send each other descriptors by a path that the reference does not see."""
    leaves = "open(os.environ['TEMPDIR'] + '/mine', 'w').close()"
    kernel = model("ModelNew", f"assert 'mine' not in os.listdir(os.environ['TEMPDIR'])\n        {MEETS}")
    outcome = judge(rig, kernel, model("Model", leaves) + INPUTS)
    assert outcome.category is Category.PASSED, (outcome.message, outcome.log)


def test_a_host_with_fewer_gpus_says_so(rig: Rig) -> None:
    """A group needs as many GPUs as ranks, its own slot's first."""
    slot = replace(rig.slot, device="GPU-0", peers=("GPU-1", "GPU-2"))
    assert group.devices_of(slot, 2) == ("GPU-0", "GPU-1")
    with pytest.raises(EvaluationEnded, match=r"runs on 4 GPUs .* this worker can use 3"):
        group.devices_of(slot, 4)


def test_two_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Groups book the same GPUs in one order, whichever slot they begin at."""
    locks, turns = [tmp_path / "a.lock", tmp_path / "b.lock"], list[int]()

    def book(number: int) -> None:
        for _ in range(20):
            with rooms(locks[:: 1 - 2 * number], alone=True):
                turns.append(number)

    both = [threading.Thread(target=book, args=(number,), daemon=True) for number in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert sorted(turns) == [0] * 20 + [1] * 20
