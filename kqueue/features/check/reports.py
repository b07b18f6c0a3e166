"""The report of a check as Markdown for a pull request, as JUnit's XML, and as JSON. The words are foreign text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

from kqueue.features.check.run import Row, State
from kqueue.text import one_line

#: Exit statuses, in order of precedence.
STATUSES: Final[Mapping[State, int]] = {State.WRONG: 1, State.SLOWER: 6, State.UNJUDGED: 3}
_MARKS: Final = {State.WRONG: "❌", State.SLOWER: "🐢", State.UNJUDGED: "⚠️", State.RIGHT: "✅", State.SKIPPED: "➖"}


def status_of(rows: Sequence[Row]) -> int:
    """Return the exit status of a check."""
    return next((status for state, status in STATUSES.items() if any(row.state is state for row in rows)), 0)


def summary(rows: Sequence[Row]) -> str:
    """Return the numbers of rows by result, the worst first."""
    counts = Counter(row.state for row in rows)
    order = (*STATUSES, State.RIGHT, State.SKIPPED)
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state]) or "nothing to judge"


def speed(row: Row) -> str:
    """Return the speed of head relative to base, with its interval."""
    if row.speed is None or row.interval is None:
        return ""
    return f"{row.speed:.4f} ({row.interval[0]:.4f} to {row.interval[1]:.4f})"


def record(base: str, head: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a check in JSON."""
    listed = [row.record() for row in rows]
    return {"base": base, "head": head, "status": status_of(rows), "summary": summary(rows), "rows": listed}


def markdown(base: str, head: str, rows: Sequence[Row]) -> str:
    """Return a check as a table of Markdown."""
    timed = any(map(speed, rows))
    about = "Speed is head's divided by base's, with an interval of 98 %." if timed else "No speeds were compared."
    lines = [
        f"### kqueue check: {summary(rows)}",
        "",
        f"`{head[:12]}` against `{base[:12]}`. {about}",
        "",
        f"| | operator |{' speed |' * timed} |",
        f"|---|---|{'---|' * timed}---|",
        *(
            f"| {_MARKS[row.state]} | {_cell(row.name)} |{f' {speed(row)} |' * timed} {_cell(row.words)} |"
            for row in rows
        ),
        "",
    ]
    found = (one for row in rows if (one := row.environment) is not None)
    places = {place(one.device, one.driver, one.torch, one.triton) for one in found}
    lines += [f"On {_cell(one)}" for one in sorted(places)]
    return "\n".join(lines) + "\n"


def junit(base: str, head: str, rows: Sequence[Row]) -> str:
    """Return a check as JUnit's XML: an error is a row that could not be judged."""
    suite = ET.Element("testsuite", name=f"kqueue check of {head[:12]} against {base[:12]}", tests=str(len(rows)))
    suite.set("failures", str(sum(row.state in (State.WRONG, State.SLOWER) for row in rows)))
    suite.set("errors", str(sum(row.state is State.UNJUDGED for row in rows)))
    suite.set("skipped", str(sum(row.state is State.SKIPPED for row in rows)))
    for row in rows:
        case = ET.SubElement(suite, "testcase", classname="kqueue.check", name=one_line(row.name))
        words = one_line(" ".join(filter(None, (row.words, speed(row)))))
        match row.state:
            case State.WRONG | State.SLOWER:
                ET.SubElement(case, "failure", type=str(row.state), message=words)
            case State.UNJUDGED:
                ET.SubElement(case, "error", type=str(row.state), message=words)
            case State.SKIPPED:
                ET.SubElement(case, "skipped", message=words)
            case State.RIGHT:
                ET.SubElement(case, "system-out").text = words
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def place(device: str, driver: str | None, torch: str, triton: str | None) -> str:
    """Return the device and the software on which a row was judged, so that their change is seen."""
    parts = {"driver": driver, "torch": torch, "Triton": triton}
    return ", ".join([device, *(f"{name} {version}" for name, version in parts.items() if version)])


def _cell(value: str) -> str:
    """Return foreign text as code, in which nothing is a link, a mention or markup."""
    return "`" + one_line(value).replace("`", "'").replace("|", "\\|") + "`"
