"""The status page, shared by a parent and its children."""

from __future__ import annotations

import os
from collections.abc import Callable
from uuid import uuid4

from kqueue.contract import Phase
from workers.judge.host.status_page import TASK_PROCESSES, StatusPage, make_page


def in_task_process(box: StatusPage, task_process: int, act: Callable[[], None] = lambda: None) -> None:
    """Call a function in a new task process."""
    pid = os.fork()
    if pid == 0:
        try:
            box.begin(task_process)
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_the_parent_learns_which_task_process_was_used_up() -> None:
    """A task process stays used up until another one replaces it, even if its attempt is closed."""
    box = StatusPage()

    def judge() -> None:
        box.open(uuid4(), 1)
        box.use()
        box.close()

    in_task_process(box, 0, box.use)
    in_task_process(box, 1)
    assert [box.used_up(task_process) for task_process in range(TASK_PROCESSES)] == [True, False]
    in_task_process(box, 1, judge)
    in_task_process(box, 0)
    assert [box.used_up(task_process) for task_process in range(TASK_PROCESSES)] == [False, True]
    assert box.read() == []
    assert not box.used


def test_a_dead_task_process_is_reported_next_to_its_successor() -> None:
    box = StatusPage()
    died, next_one = uuid4(), uuid4()
    in_task_process(box, 0, lambda: box.open(died, 3))
    in_task_process(box, 1, lambda: box.open(next_one, 1))
    assert [(record.evaluation_id, record.number) for record in box.read()] == [(died, 3), (next_one, 1)]
    record = box.find(died)
    assert record is not None
    box.forget(record)
    assert box.find(died) is None
    in_task_process(box, 0, lambda: box.open(died, 4))
    box.forget(record)
    assert [record.evaluation_id for record in box.read()] == [died, next_one]


def test_a_judges_position_is_that_of_its_own_attempt() -> None:
    box = StatusPage()
    died, next_one = uuid4(), uuid4()
    in_task_process(box, 0, lambda: box.open(died, 1))
    box.judge(died, 1)
    in_task_process(box, 1, lambda: box.open(next_one, 1))
    box.enter(Phase.SELF_TEST, deadline=0.1)
    box.at("self-test")
    first, second = box.read()
    assert (first.phase, first.overdue, first.step) == (Phase.SELF_TEST, True, "self-test")
    assert (second.phase, second.overdue, second.step) == (None, False, None)


def test_a_page_is_seen_by_whoever_has_its_descriptor() -> None:
    evaluation = uuid4()
    page = make_page()
    writer, reader = StatusPage(page), StatusPage(page)
    os.close(page)
    assert reader.read() == []

    def step() -> str | None:
        [record] = reader.read()
        return record.step

    writer.open(evaluation, 2)
    assert step() is None
    writer.judge(evaluation, 2)
    assert step() is None
    writer.enter(Phase.CHECK)
    assert step() == "check"
    writer.at("wait_for_device")
    assert step() == "wait_for_device"
    writer.at("")
    assert step() == "check"
    writer.at("a step whose name is longer than the page has room for it")
    assert step() == "a step whose name is longer than"
    writer.open(evaluation, 3)
    assert step() is None
    writer.close()
    assert reader.read() == []
