"""Checks that need no device: what settles a hopeless kernel in milliseconds, and labels for what looks like a cheat.

Findings are labels with evidence: a line of the source and what it means. ``cheat`` is kept for what serves nothing
else in a kernel; most cheats can only be suspected from a source, and are caught by what they do. Nothing of the source
is executed, imported or unpickled. Our own rules are in :mod:`workers.judge.trial.rules`; a second opinion is
kernelguard's. Both are bounded in CPU time, as a source may be written to hold them up: kernelguard's expressions take
very long over some texts.
"""

from __future__ import annotations

import ast
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import kernelguard

from kqueue.categories import Category
from kqueue.contract import Backend, Phase, Policy
from workers.judge.ending import EvaluationEnded
from workers.judge.trial import rules
from workers.judge.trial.rules import ENTRY

#: Findings of one rule, and in all.
_OF_ONE_RULE: Final = 3
_FINDINGS: Final = 40
_EVIDENCE_CHARS: Final = 160
#: What kernelguard is given: sources up to so many characters, for so many seconds of CPU time (usual: 0.02).
_GUARD_CHARS: Final = 64 << 10
_GUARD_S: Final = 1.0
#: And our own rules: what is usual for a megabyte.
_OWN_S: Final = 10.0
#: The modules whose code can be broken off.
_INTERRUPTIBLE: Final = frozenset(
    {"ast", "kernelguard", "re", "tokenize", "workers.judge.trial.rules", "workers.judge.trial.provenance"}
)


def findings(source: str, backend: Backend) -> list[dict[str, Any]]:
    """What rules find in a kernel's source, the most severe first. To be called from the main thread.

    Returns:
        JSON-safe records: ``rule``, ``severity`` (``note``, ``suspicious``, ``cheat``), ``line`` (None where the rule
        tells none), ``evidence`` (text of the source, shortened, without controls), ``by`` (``kqueue`` or
        ``kernelguard``) and ``meaning``. At most 3 of a rule and 40 in all.
    """
    found = [*_own(source, backend), *_guard(source)]
    order = {"cheat": 0, "suspicious": 1, "note": 2}
    found.sort(key=lambda finding: (order[finding["severity"]], finding["line"] or 0, finding["rule"]))
    kept, counts = list[dict[str, Any]](), Counter[tuple[str, str]]()
    for finding in found:
        key = finding["by"], finding["rule"]
        counts[key] += 1
        if counts[key] <= _OF_ONE_RULE and finding not in kept:
            kept.append(finding)
    return kept[:_FINDINGS]


def enforce(found: list[dict[str, Any]], policy: Policy) -> None:
    """End the evaluation of a kernel with a ``cheat`` where the policy says so.

    Raises:
        EvaluationEnded: ``rejected_by_policy``, with the findings in the facts.
    """
    cheats = [finding for finding in found if finding["severity"] == "cheat"]
    if policy is Policy.REJECT and cheats:
        first = cheats[0]
        raise EvaluationEnded(
            Category.REJECTED_BY_POLICY,
            f"line {first['line']}: {first['rule']}: {first['meaning']}",
            Phase.PREPARE,
            findings=cheats,
        )


def check_problem(source: str) -> None:
    """Refuse a problem that is not Python.

    Raises:
        EvaluationEnded: ``invalid_problem``.
    """
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EvaluationEnded(
            Category.INVALID_PROBLEM, f"the problem's source is not valid Python: {error}", Phase.REFERENCE
        ) from None


def check(source: str) -> None:
    """Refuse what cannot be imported or cannot define the entry point.

    Raises:
        EvaluationEnded: ``syntax_error`` or ``entry_point_missing``.
    """
    try:
        tree = ast.parse(source)
        compile(tree, "kernel.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise EvaluationEnded(
            Category.SYNTAX_ERROR,
            f"line {error.lineno}: {error.msg}",
            Phase.PREPARE,
            line=error.lineno,
            column=error.offset,
            text=(error.text or "").rstrip(),
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise EvaluationEnded(Category.SYNTAX_ERROR, f"not valid Python: {error}", Phase.PREPARE) from None
    if ENTRY not in source and not any(_imports_anything(node) for node in ast.walk(tree)):
        raise EvaluationEnded(
            Category.ENTRY_POINT_MISSING, f"the source never names {ENTRY}, the class to define", Phase.PREPARE
        )


def _imports_anything(node: ast.AST) -> bool:
    """Whether a name could come from elsewhere: a star import, or code made at run time."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")


# Our own rules ---------------------------------------------------------------------------------------


def _own(source: str, backend: Backend) -> Iterator[dict[str, Any]]:
    hits = set[tuple[str, int]]()
    try:
        with _cpu_time(_OWN_S):
            for hit in rules.hits(source, backend):
                hits.add(hit)
    except _TimeUp:
        hits.add(("rules_stopped", 1))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.splitlines()
    for rule, line in hits:
        severity, meaning = rules.RULES[rule]
        yield _finding(rule, severity, line, lines[line - 1] if line <= len(lines) else "", "kqueue", meaning)


def _finding(rule: str, severity: str, line: int | None, evidence: str, by: str, meaning: str) -> dict[str, Any]:
    return {
        "rule": rule,
        "severity": severity,
        "line": line,
        "evidence": _printable(evidence),
        "by": by,
        "meaning": _printable(meaning),
    }


def _printable(text: str) -> str:
    text = " ".join(text[: 4 * _EVIDENCE_CHARS].split())
    return "".join(char if char.isprintable() else "\ufffd" for char in text[:_EVIDENCE_CHARS])


# kernelguard -----------------------------------------------------------------------------------------


class _TimeUp(BaseException):
    """Its time is up. No handler of exceptions in it may keep this one."""


def _guard(source: str) -> Iterator[dict[str, Any]]:
    """kernelguard's opinion; its rules accuse by likeness, so that none of it counts for more than suspicion."""
    if len(source) > _GUARD_CHARS:
        yield _about_the_guard("guard_skipped")
        return
    try:
        with _cpu_time(_GUARD_S):
            result = kernelguard.analyze_code(source, compute_structural_hash=False)
    except _TimeUp:
        yield _about_the_guard("guard_stopped")
        return
    except Exception:  # noqa: BLE001 -- whatever a stranger's rules make of a stranger's source
        return
    for match in result["matched_patterns"]:
        pattern = str(match["pattern"])
        policy = kernelguard.get_rule_policy(pattern)
        weak = policy.max_outcome == kernelguard.TELEMETRY_ONLY
        meaning = f"kernelguard's rule for {policy.technique_family.replace('_', ' ')}"
        severity = "note" if weak else "suspicious"
        yield _finding(pattern.lower(), severity, None, str(match.get("evidence", "")), "kernelguard", meaning)


def _about_the_guard(rule: str) -> dict[str, Any]:
    severity, meaning = rules.RULES[rule]
    return _finding(rule, severity, None, "", "kqueue", meaning)


@contextmanager
def _cpu_time(seconds: float) -> Generator[None]:
    """Break the block off with :class:`_TimeUp` after so much CPU time of this process."""
    running = True

    def up(_signal: int, frame: FrameType | None) -> None:
        # Not in a finaliser or a callback of the collector, where it would be swallowed and printed: the next
        # signal comes elsewhere.
        if running and frame is not None and frame.f_globals.get("__name__") in _INTERRUPTIBLE:
            raise _TimeUp

    previous = signal.signal(signal.SIGVTALRM, up)
    # Again and again, until one comes where it can be raised and nothing has swallowed it.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
