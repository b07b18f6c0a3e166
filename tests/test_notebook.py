"""HTML of verdicts and profiles for notebooks."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from uuid import uuid4

from kqueue.categories import Category
from kqueue.contract import Outcome, Verdict
from kqueue.evidence import KernelProfile, Profile
from kqueue.states import Writer
from tests.samples import ended, measurement, passed

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> & \x1b[31m\u202e'\""


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= {(tag, ""), *((tag, name) for name, _ in attrs)}


def html_of(value: object) -> str:
    """Return the HTML after checking that nothing of a hostile text became a tag or an attribute."""
    page = value._repr_html_()  # type: ignore[attr-defined]
    allowed = {(tag, "") for tag in ("pre", "img")}
    allowed |= {("pre", "style"), ("img", "alt"), ("img", "src")}
    assert Tags(page).found <= allowed
    assert not set("\x1b\u202e") & set(page)
    for image in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page):
        assert b"<script" not in base64.b64decode(image)
    return page


def test_a_failed_kernel_and_its_hostile_texts() -> None:
    """Messages, labels and names of kernels are escaped."""
    page = html_of(ended(Category.WRONG_VALUES, message=HOSTILE))
    assert "wrong_values" in page
    assert "&lt;script&gt;" in page
    now = datetime.now(UTC)
    named = Verdict(
        **ended(Category.WRONG_VALUES, message=HOSTILE).model_dump(exclude=set(Outcome.model_computed_fields)),
        evaluation_id=uuid4(),
        backend="torch",
        lane="cpu",
        attempts=1,
        written_by=Writer.WORKER,
        submitted_at=now,
        finished_at=now,
        problem_label=HOSTILE,
        kernel_label=HOSTILE,
    )
    assert html_of(named).count("&lt;script&gt;") >= 2


def test_times_and_profiles() -> None:
    """A timed kernel has its times and a picture, and a profile its kernels."""
    page = html_of(passed().model_copy(update={"runtime": measurement(0.5), "baseline": measurement(1.0)}))
    assert "CORRECT" in page
    assert 'src="data:image/svg+xml;base64,' in page
    kernel = KernelProfile(name=HOSTILE, launches=1, duration_ms=5.0)
    assert "&lt;script&gt;" in html_of(Profile(by="cupti", kernels=(kernel,), seconds=1.0))
