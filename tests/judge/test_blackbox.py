"""The flight recorder, between a parent and its children."""

from __future__ import annotations

import os
from collections.abc import Callable
from uuid import uuid4

from kqueue.contract import Phase
from workers.judge.host.blackbox import BlackBox, make_page


def in_child(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_the_parent_learns_which_child_was_used_up() -> None:
    """It is the last one that said so, and the parent itself stays as it was."""
    box = BlackBox()
    first, second = in_child(box.use), in_child(box.use)
    other = in_child(box.begin)
    assert [box.used_up(pid) for pid in (first, second, other)] == [False, True, False]
    assert not box.used


def test_closing_an_attempt_leaves_its_child_used_up() -> None:
    """The record of an attempt and the child's end are two things."""
    box = BlackBox()

    def judge() -> None:
        box.open(uuid4(), 1)
        box.enter(Phase.CHECK)
        box.use()
        box.close()

    pid = in_child(judge)
    assert box.read() is None
    assert box.used_up(pid)


def test_a_new_process_has_no_past() -> None:
    """Linux gives numbers of processes anew: what an earlier one with the same number did counts for nothing."""
    box = BlackBox()
    box.use()
    assert box.used_up(os.getpid())
    box.begin()
    assert not box.used_up(os.getpid())


def test_a_page_is_seen_by_whoever_has_its_descriptor() -> None:
    """Another holder of the page reads the step, or the phase where there is none; nothing of an earlier attempt."""
    page = make_page()
    writer, reader = BlackBox(page), BlackBox(page)
    os.close(page)
    assert reader.read() is None

    def step() -> str | None:
        record = reader.read()
        assert record is not None
        return record.step

    writer.open(uuid4(), 2)
    assert step() is None
    writer.enter(Phase.CHECK)
    assert step() == "check"
    writer.at("wait_for_device")
    assert step() == "wait_for_device"
    writer.at("")
    assert step() == "check"
    writer.at("a step whose name is longer than the page has room for it")
    assert step() == "a step whose name is longer than"
    writer.open(uuid4(), 1)
    assert step() is None
    writer.close()
    assert reader.read() is None
