"""The typed facts and evidence of outcomes, and the required fields of each category."""

from __future__ import annotations

import itertools
import json
import re
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from pydantic import ValidationError

from kqueue import evidence
from kqueue.categories import CATEGORIES, Blame, Category
from kqueue.contract import Outcome, Verdict
from kqueue.evidence import NEEDS, Evidence, Facts, Isolation, Measurement
from kqueue.figures import caption
from tests.samples import ended
from tests.stored import SHUFFLED, STORED
from workers.judge.sandbox.level import MEASURES

TIME = Measurement(
    basis="cpu_clock",
    count=5,
    **dict.fromkeys(("median_ms", "q1_ms", "q3_ms", "mean_ms", "min_ms", "max_ms", "overhead_ms", "std_ms"), 1.0),
    cold_l2=False,
)


#: A value for each fact of which a category needs one of several. Zero and empty texts are values.
ONE_OF: dict[str, Any] = {
    "exception": "builtins.MemoryError", "held_bytes": 1, "reason": "memory", "signal": "SIGSEGV", "exit_status": 0,
    "structure": "T", "output": 0, "clocks": {}, "foreign_processes": [],
}  # fmt: skip


#: Last words of names of shares, ratios and tensors' values, which have no unit.
PURE = "share|ratio|speedup|interval|spread|weight|precision|error|norm|tol|bound|occupancy|hits|expected|got"


def stored(**fields: Any) -> dict[str, Any]:
    now = datetime.now(UTC)
    row = {"evaluation_id": uuid4(), "category": "crashed", "backend": "torch", "lane": "cpu", "attempts": 1}
    return row | {"written_by": "judge", "submitted_at": now, "finished_at": now} | fields


def test_the_row_of_a_version_before_is_read_whole() -> None:
    """Every key in the plain JSON of older judges has a field and is returned unchanged. Two parts have two forms."""
    for row in (STORED, STORED | {"compiled_baseline": TIME.model_dump(mode="json"), "foreign_processes": "unknown"}):
        verdict = Verdict.load(stored(evidence=row))
        assert verdict.evidence.model_dump(mode="json") == row
        assert json.loads(verdict.evidence.model_dump_json()) == row


def test_every_quantity_has_a_unit() -> None:
    """A field's name ends in the unit that its description states. Other numbers are counts, shares and ratios."""
    units = {"milliseconds": "ms", "seconds": "s", "bytes": "bytes", "MHz": "MHz", "10^9 bytes per second": "GB/s"}
    parts = [one for one in vars(evidence).values() if isinstance(one, type) and issubclass(one, evidence.Part)]
    for name, field in (pair for part in parts for pair in part.model_fields.items()):
        stated = re.search(rf"\bin ({'|'.join(map(re.escape, units))})\b", field.description or "")
        unit, kind = caption(f"the_{name}")[1], str(field.annotation)
        assert stated is None or unit == units[stated[1]] or not re.search("int|float", kind) or "bytes_" in name, name
        assert unit or "float" not in kind or re.search(f"({PURE})$", name), name


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"checker": {}},
            f"the problem's own check() decided, which refuses changes of 0.01, and it accepts {SHUFFLED}",
        ),
        (
            {"constant_outputs": [0, 2]},
            "output 0, 2 of the reference is the same for all inputs, so a constant is right",
        ),
        ({"comparison": {"precision_downgrade": True}}, "its values have a lower precision than the reference's"),
        ({"comparison": {"strict_correct": False}}, "the strict comparison refuses it"),
        ({"unvaried": "it draws nothing"}, "none of the input sets is a hidden variant: it draws nothing"),
        ({"timed_variants": {"slower": True}}, "it takes longer on hidden variants"),
        ({"provenance": {"decoy": True}}, "its own GPU code did almost none of the work"),
        ({"findings": [STORED["findings"][0] | {"severity": "cheat"}]}, "its source has code for cheating"),
        (
            {"findings": [STORED["findings"][0] | {"rule": "buffers_not_kept"}]},
            "it does not change its model as the reference does",
        ),
        (
            {"findings": [STORED["findings"][0] | {"rule": "buffers_not_compared"}]},
            "a part of the reference's model was too large to be compared",
        ),
        (
            {"findings": [STORED["findings"][0] | {"rule": "weights_hidden"}]},
            "constant initial values hide a part of the reference",
        ),
    ],
)
def test_a_label_that_makes_a_pass_mean_little_has_words(fields: dict[str, Any], words: str) -> None:
    """Each label is in the end of the message, and without one the message has no such end."""
    name, value = next(iter(fields.items()))
    labelled = STORED[name] | value if isinstance(value, dict) else value
    plain = STORED | {"unvaried": None, "checker": None}
    assert Evidence.model_validate(plain | {name: labelled}).doubts == f"; but {words}"
    assert Evidence.model_validate(plain).doubts == Evidence().doubts == ""


@pytest.mark.parametrize("category", Category)
def test_an_outcome_has_what_its_category_needs(category: Category) -> None:
    """The required fields are enough, and an outcome without one of them is refused with its name."""
    least = ended(category)
    needs = NEEDS[category]
    assert {*needs.facts, *needs.one_of} <= Facts.model_fields.keys()
    without: list[tuple[str, dict[str, Any]]] = []
    if needs.message:
        without.append(("message", {"message": ""}))
    if needs.phase:
        without.append(("phase", {"phase": None}))
    without += [(f"facts.{name}", {"facts": least.facts.model_dump(exclude={name})}) for name in needs.facts]
    if needs.one_of:
        without.append((f"facts.{needs.one_of[-1]}", {"facts": least.facts.model_dump(exclude=set(needs.one_of))}))
    for name, change in without:
        with pytest.raises(ValidationError, match=name):
            least.model_copy(update=change)
    for name in needs.one_of:
        assert ended(category, facts={name: ONE_OF[name]}).category is category


def test_only_a_passed_kernel_has_times() -> None:
    """Another outcome's time would count as a speed. A timed kernel was verified, so it has a runtime."""
    for category, name in itertools.product(set(Category) - {Category.PASSED}, ("runtime", "baseline")):
        with pytest.raises(ValidationError, match="only a passed kernel has times"):
            ended(category, **{name: TIME})
    with pytest.raises(ValidationError, match="needs runtime"):
        Outcome(category=Category.PASSED, evidence=Evidence(verified_calls=16))
    assert Outcome(category=Category.PASSED, runtime=TIME, evidence=Evidence(verified_calls=16)).runtime == TIME


@pytest.mark.parametrize(
    "wrong",
    [
        {"evidence": {"isolated": True}}, {"evidence": {"build": STORED["build"] | {"compiler": "gcc"}}},
        {"evidence": {"checks": "many"}}, {"evidence": {"findings": [{"rule": "seed"}]}},
        {"evidence": {"isolation": STORED["isolation"] | {"files": False}}}, {"facts": {"sginal": "SIGSEGV"}},
        {"facts": {"hack": "clever"}}, {"facts": {"instead_of": "nonsense"}}, {"isolation": {}},
    ],
    ids=str,
)  # fmt: skip
def test_a_judge_cannot_write_what_has_no_place(wrong: dict[str, Any]) -> None:
    """Unknown fields and wrong types are refused at every level, also in copies."""
    with pytest.raises(ValidationError):
        Outcome.model_validate({"category": "passed", **wrong})
    with pytest.raises(ValidationError):
        Outcome(category=Category.PASSED).model_copy(update=wrong)


def test_a_row_of_another_version_is_read() -> None:
    """Unknown fields and unreadable entries are dropped, and the rest stays."""
    verdict = Verdict.load(
        stored(
            message="it died",
            facts={"signal": "SIGSEGV", "colour": "red", "line": {"from": 1}, "first": [{"index": [1]}]},
            evidence=STORED
            | {"isolation": "strong", "weather": {"rain": True}, "checks": "nine", "floor": {"more": 1}},
            environment={"device": "a CPU", "torch": "2", "python": "3", "host": "here", "cores": 2},
            colour="red",
        )
    )
    assert verdict.facts == Facts(signal="SIGSEGV")
    left = STORED.keys() - {"isolation", "checks", "floor"}
    assert verdict.evidence == Evidence.model_validate({name: STORED[name] for name in left})
    assert verdict.environment is not None
    assert verdict.environment.device == "a CPU"
    assert Verdict.load(stored(environment={"device": 7})).environment is None


def test_a_row_need_not_have_what_its_category_needs() -> None:
    """Stored verdicts are read without required fields, because the rule is for judges."""
    assert Verdict.load(stored(category="wrong_values")).facts == Facts()


def test_a_row_that_is_no_verdict_is_refused() -> None:
    """Only entries of facts, evidence and environment can be dropped."""
    for wrong in ({"backend": None}, {"category": "lost"}, {"attempts": None}, {"facts": "none"}):
        with pytest.raises(ValidationError):
            Verdict.load(stored(**wrong))


def test_what_has_no_value_is_absent_from_json() -> None:
    """Facts and evidence omit fields without a value, and represent NaN and the infinities as text."""
    assert Outcome(category=Category.PASSED).model_dump(mode="json")["evidence"] == {}
    place = {"index": [0], "expected": float("-inf"), "got": float("nan")}
    facts = ended(Category.WRONG_VALUES).facts.model_copy(update={"first": [place]})
    told = json.loads(facts.model_dump_json())
    assert told["first"] == [{"index": [0], "expected": "-Infinity", "got": "NaN"}]
    assert told == facts.model_dump(mode="json")
    assert "signal" not in told


def test_every_measure_of_the_seal_has_its_field() -> None:
    """Verdicts can hold each field of the fork server's report on isolation."""
    assert Isolation.model_fields.keys() == {"level", "view", "torch", *MEASURES}


def test_only_a_judged_kernel_is_compiled_or_correct() -> None:
    """A failure of the fleet never counts as `compiled=False`, because it is no statement on the kernel."""
    others = [info for info in CATEGORIES.values() if info.blame not in (Blame.NONE, Blame.CANDIDATE)]
    assert {info.blame for info in others} == {Blame.PROBLEM, Blame.FLEET, Blame.NOBODY}
    assert {(info.compiled, info.correctness) for info in others} == {(None, None)}
