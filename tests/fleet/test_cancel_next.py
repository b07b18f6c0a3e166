"""The death of a revoked evaluation's task process is noticed only after a spare one began the next evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from kqueue import broker
from kqueue.store import evaluations
from tests.chaos.rig import Whole
from workers.judge.host import linux


@pytest.fixture
def unseen(services: Any, fleet: Any) -> Iterator[Path]:
    """Return a file. While it exists, the worker notices no death of a task process."""
    file = services.directory / "deaths-are-unseen"
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def revoked(services: Any, fleet: Any, unseen: Path, request: pytest.FixtureRequest) -> UUID:
    """Revoke a running evaluation. The death of its task process is not noticed yet, and the next one can begin.

    With the parameter "claimed", the task process had claimed it but had not written its status page.
    """
    worker = fleet.live()[0].pid

    def leaves_a_spare() -> bool:
        services.until(lambda: len(linux.children(worker)) == 3, what="two clerks and the stand-in")
        unseen.touch()
        assert services.verdict(services.submit("ok")).passed
        services.until(lambda: len(linux.children(worker)) < 3, what="the death")
        time.sleep(0.3)  # an earlier evaluation's task process was possibly about to end
        if len(linux.children(worker)) == 2:
            return True
        unseen.unlink()
        return False

    # Celery's semaphore admits the next task early if the death of an earlier task process is noticed meanwhile.
    services.until(leaves_a_spare, what="a spare clerk beside one whose death is unseen")
    if getattr(request, "param", None) == "claimed":
        (services.directory / "stall-after-claim").touch()
    evaluation = services.submit("sleep 600")
    services.started(evaluation)
    unseen.unlink()
    services.until(lambda: len(linux.children(worker)) == 3, what="a spare clerk beside a clerk and the stand-in")
    unseen.touch()
    assert evaluations.cancel(services.engine, evaluation)
    broker.revoke(services.app, evaluation)
    return evaluation


def _categories(services: Any, evaluation: UUID) -> list[str | None]:
    return [attempt.category for attempt in services.attempts(evaluation)]


@pytest.mark.parametrize(
    ("revoked", "category"),
    [("judging", "cancelled"), pytest.param("claimed", "worker_lost", marks=pytest.mark.nightly)],
    indirect=["revoked"],
)
def test_the_next_evaluation_is_not_blamed(
    services: Any, unseen: Path, revoked: UUID, category: str, tmp_path: Path
) -> None:
    """The revoked evaluation is cancelled, its attempt is closed, and the next evaluation passes."""
    follower = services.submit(f"gate {tmp_path / 'gate'}")
    services.started(follower)
    unseen.unlink()
    services.until(lambda: services.attempts(revoked)[0].ended_at is not None, what="the revoked attempt's end")
    (tmp_path / "gate").touch()
    assert services.verdict(follower).category == "passed"
    Whole(services)(revoked, category="cancelled")
    assert _categories(services, revoked) == [category]
    assert _categories(services, follower) == ["passed"]


@pytest.mark.nightly
def test_each_death_is_told_of_its_own_evaluation(services: Any, unseen: Path, revoked: UUID) -> None:
    """The next evaluation's judge also dies before either death is noticed."""
    follower = services.submit("signal SIGSEGV")
    services.started(follower)
    unseen.unlink()
    verdict = services.verdict(follower)
    assert (verdict.category, verdict.written_by, verdict.facts.signal) == ("judge_error", "worker", "SIGSEGV")
    Whole(services)(revoked, category="cancelled")
    assert _categories(services, revoked) == ["cancelled"]


@pytest.mark.nightly
def test_a_hanging_test_of_the_gpu_ends_its_own_evaluation(
    services: Any, unseen: Path, revoked: UUID, tmp_path: Path
) -> None:
    """The revoked evaluation's dying judge exceeds the time of its GPU self-test, and the next evaluation goes on."""
    follower = services.submit(f"late {revoked} gate {tmp_path / 'gate'}")
    services.until(lambda: services.attempts(revoked)[0].ended_at is not None, what="the revoked attempt's end")
    unseen.unlink()
    (tmp_path / "gate").touch()
    assert services.verdict(follower).category == "passed"
    Whole(services)(revoked, category="cancelled")
    assert _categories(services, revoked) == ["gpu_unhealthy"]
