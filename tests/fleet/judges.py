"""A worker's application whose judge obeys the kernel's source: `segv`, `sleep 2`, ..."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import UUID

if __name__ == "__main__":
    from workers import start

    start.become_worker("judges")

import billiard.pool

import workers.app
import workers.messages
import workers.pool
from kqueue.categories import Category
from kqueue.contract import Outcome, Phase
from kqueue.errors import DatabaseUnavailable
from kqueue.evidence import Facts, WrongLocation
from kqueue.store import evaluations
from workers.app import app  # noqa: F401
from workers.judge.host import linux
from workers.judge.host.exclusive import room
from workers.judge.host.status_page import StatusPage
from workers.judge.sandbox import cgroups

#: The folder with the files that control the judges.
JUDGES = Path(os.environ["JUDGES"])
PASSED = Outcome(category=Category.PASSED, message="as told")
WRONG = Outcome(
    category=Category.WRONG_VALUES,
    message="off by one",
    phase=Phase.CHECK,
    facts=Facts(output=0, kind="given", wrong=1, of=1, first=(WrongLocation(index=(0,), expected=1, got=2),)),
)


def sleep_holding_the_gil(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def use_up_the_memory() -> None:
    """Exceed a separate control group's memory, so that the kernel kills only this process."""
    cgroups.Groups().group(64 << 20, 512).join()
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)))


def end(how: str, *argument: str) -> None:
    if how == "signal":
        os.kill(os.getpid(), getattr(signal, argument[0]))
        time.sleep(600)
    elif how == "null":
        ctypes.string_at(0)
    elif how == "exit":
        os._exit(int(argument[0]))
    elif how == "sysexit":
        sys.exit(int(argument[0]))
    elif how == "gil":
        sleep_holding_the_gil(600)
    elif how == "hog":
        use_up_the_memory()
    elif how == "closefds":
        # Hostile: it closes the descriptors that the parent watches, ignores SIGTERM and keeps running.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(3, 4096)
        while True:
            time.sleep(1)


def orphan(pid_file: str) -> None:
    """Start a grandchild outside this process group and session."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(3, 4096)
            Path(pid_file).write_text(str(os.getpid()))
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()
    while not Path(pid_file).exists():
        time.sleep(0.01)


def span(file: Path, seconds: float) -> Outcome:
    begun = time.monotonic()
    time.sleep(seconds)
    with file.open("a") as out:
        out.write(f"{begun} {time.monotonic()}\n")
    return PASSED


def wait_for(gate: Path) -> Outcome:
    while not gate.exists():
        time.sleep(0.01)
    return PASSED


def read(file: Path, how: str, *argument: str) -> Outcome:
    """Record the process id, then end like a judge that has only read sources."""
    with file.open("a") as out:
        out.write(f"{os.getpid()}\n")
    if how != "well":
        end(how, *argument)
    return Outcome(category=Category.ENTRY_POINT_MISSING, message="as told", phase=Phase.PREPARE)


def judge(action, arguments, number, place, status_page):
    match action:
        case "ok":
            pass
        case "wrong":
            return WRONG
        case "sleep" | "sleep-once":
            time.sleep(float(arguments[0]) if action == "sleep" else 600 if number == 1 else 0)
        case "gate":
            return wait_for(Path(arguments[0]))
        case "unhealthy-once":
            if number == 1:
                return Outcome(category=Category.GPU_UNHEALTHY, message="computed 6")
        case "hang-in-self-test":
            status_page.enter(Phase.SELF_TEST, time.monotonic() + 0.5)
            sleep_holding_the_gil(600)
        case "span" | "suspect":
            if action == "suspect" and number < 3:
                os.kill(os.getpid(), signal.SIGKILL)
            with room(place.lock, alone=place.alone):  # like a judge
                return span(Path(arguments[0]), float(arguments[1]))
        case "raise":
            raise ZeroDivisionError("the judge's own mistake")
        case "orphan":
            orphan(arguments[0])
        case "write":
            Path(arguments[0]).write_text(str(os.getpid()))
            time.sleep(float(arguments[1]))
        case _:
            end(action, *arguments)
    return PASSED


def once(word: str) -> bool:
    file = JUDGES / word
    if there := file.exists():
        file.unlink()
    return there


def fail(at: str) -> None:
    if (JUDGES / f"fail-at-{at}").exists():
        raise OSError(f"told to fail at {at}")


class Watchdog(workers.app._Watchdog):
    def obey(self, words) -> None:
        fail("ready")
        super().obey(words)


class StandIn:
    """Stands in for the fork server and the judge supervisor: a child of the worker's parent that outlives tasks."""

    def __init__(self, slot) -> None:
        fail("start")
        while (JUDGES / "hang-at-start").exists():
            time.sleep(0.1)
        self._process = subprocess.Popen(["sleep", "infinity"])
        self.pid = self._process.pid
        self.conditions = "told"
        self.status_page = StatusPage()

    def judge(self, request, place, backend, caches) -> Outcome:
        action, *arguments = request.kernel.split()
        self.status_page.judge(*self.status_page.attempt)
        if action == "read":
            self.status_page.enter(Phase.PREPARE)
            return read(Path(arguments[0]), *arguments[1:])
        self.status_page.use()
        self.status_page.enter(Phase.CHECK)
        if action == "late":  # first, the late writes of another evaluation's dying judge
            self.status_page.judge(UUID(arguments[0]), 1)
            self.status_page.enter(Phase.SELF_TEST, time.monotonic())
            _, action, *arguments = arguments
        if action == "known":  # first report the environment
            backend.environment({"device": "none", "torch": "none", "python": "none", "host": "here"})
            action, *arguments = arguments
        if action == "import" and (JUDGES / "broken").exists():  # the fleet's own evaluation
            raise ZeroDivisionError("a broken judge")
        return judge(action, arguments, claimed[-1].number, place, self.status_page)

    def wait_ready(self, minimum: str) -> None:
        pass

    def alive(self) -> bool:
        return self._process.poll() is None

    def work(self) -> bool:
        return not linux.is_zombie(self.pid)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


_claim = evaluations.claim
#: Claims of this child.
claimed: list[evaluations.Claim] = []


def claim(engine, evaluation_id, **options):
    if once("die-before-claim"):
        os.kill(os.getpid(), signal.SIGKILL)
    mine = _claim(engine, evaluation_id, **options)
    if mine is not None:
        if once("die-after-claim"):
            os.kill(os.getpid(), signal.SIGKILL)
        if once("stall-after-claim"):
            time.sleep(600)
        if once("lose-the-claims-answer"):
            raise DatabaseUnavailable("the connection broke in the moment of the commit")
        claimed.append(mine)
    return mine


_warm_up, _parent = evaluations.warm_up, os.getpid()


def warm_up(engine, **options) -> None:
    if os.getpid() != _parent:
        fail("child")
    _warm_up(engine, **options)


_offset = billiard.pool._get_send_offset


def send_offset(connection):
    send = _offset(connection)

    def send_part(data, offset):
        sent = send(data, offset)
        if once("quit-while-writing"):
            os.kill(os.getpid(), signal.SIGQUIT)
        return sent

    return send_part


_maintain = workers.pool._Pool.maintain_pool


def maintain_pool(pool) -> None:
    """Hide dead children while a control file exists, as if they died slowly."""
    if not (JUDGES / "deaths-are-unseen").exists():
        _maintain(pool)


billiard.pool._get_send_offset = send_offset
evaluations.claim = claim
evaluations.warm_up = warm_up
workers.app._Watchdog = Watchdog
workers.pool._Pool.maintain_pool = maintain_pool
workers.app.start_judges = StandIn
_task = workers.messages.task


def task(payload, queue):
    """Rebuild a message with the hard limit of its label, which can be shorter than a real message allows."""
    made = _task(payload, queue)
    if limit := re.search(r" problem=limit=([\d.]+) ", made["headers"]["kwargsrepr"]):
        made["headers"]["timelimit"] = [float(limit[1]), None]
    return made


workers.messages.task = task
