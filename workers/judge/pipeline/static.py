"""Static checks of a kernel's source: syntax, the entry point, and findings that suggest a cheat.

They need no device, and reject a hopeless kernel in milliseconds. A finding is a label with evidence: a line of the
source and its meaning. ``cheat`` is reserved for code that has no other use in a kernel. Most cheats can only be
suspected from the source, and are caught by their behavior. Nothing of the source is executed, imported or unpickled.

Findings come from :mod:`workers.judge.pipeline.rules` and from kernelguard, a second opinion. Both have a limit of
CPU time, because a source can be written to delay them: kernelguard's regular expressions are slow on some texts.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import keyword
import re
import signal
import tokenize
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from types import FrameType
from typing import Final, Literal

import kernelguard
from pydantic import TypeAdapter

from kqueue import passes, shapes
from kqueue.backends import PYTEST
from kqueue.categories import Category
from kqueue.contract import Phase, Policy, Request, Tolerances, named_tree
from kqueue.errors import InvalidRequest
from kqueue.evidence import Finding, Severity
from kqueue.integrations import extraction
from workers.judge.ending import EvaluationEnded
from workers.judge.pipeline import grades, rules
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.findings import RULES
from workers.judge.pipeline.rules import ENTRY

#: Variable with which a problem sets its own tolerance, and the maxima. The second also bounds the comparison of all
#: values together, which must still distinguish an answer from none.
_TOLERANCE: Final = "OUTPUT_TOLERANCE"
_MOST_ATOL: Final = 1.0
_MOST_RTOL: Final = 0.3
#: Variable with which a problem that defines check() states the change of right outputs that it refuses, and the names
#: of that function's parameters.
_BOUND: Final = "CHECK_BOUND"
_CHECKED: Final = ["reference_outputs", "outputs", "inputs"]
#: A line that begins or ends a Markdown block of code.
_FENCE: Final = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
#: Maximum number of findings of one rule, and in total.
_OF_ONE_RULE: Final = 3
_FINDINGS: Final = 40
_EVIDENCE_CHARS: Final = 160
#: kernelguard's limits: characters of the source, and seconds of CPU time (it usually takes 0.02).
_GUARD_CHARS: Final = 64 << 10
_GUARD_S: Final = 1.0
#: CPU time in seconds for the project's own rules, which is their usual time for a megabyte.
_OWN_S: Final = 10.0
#: Words of a source that can run work in parallel on the GPU, with its own streams or a library's (cuDNN's convolutions
#: and recurrent layers). Imports of modules that are not listed below count too.
_SIDE_BY_SIDE: Final = re.compile(r"stream|graph|cudnn|conv|lstm|gru|rnn|ctc|linalg", re.IGNORECASE)
_IMPORTS: Final = re.compile(r"(?:^|[;:])[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([^;\n]+))", re.MULTILINE)
_IMPORTED: Final = re.compile(r"(?:^|,)\s*(\w+)")
_IN_LINE: Final = frozenset({"__future__", "torch", "triton", "math", "typing", "functools", "numpy", "einops", "os"})
#: Comments of Python and C++, but not directives, white space, and names that are neither called nor an attribute, with
#: the dot after them.
_LAYOUT: Final = re.compile(
    r"(?m)#(?!\s*(?:define|el|end|if|include|pragma|undef))[^\n]*|(?:^|(?<=[;{}]))[ \t]*//[^\n]*|/\*[^*]*\*/|\s"
    r"|(?<![\w.])([A-Za-z_]\w*+)(?![ \t]*\()(\.?)"
)
#: Modules whose code can be interrupted.
_INTERRUPTIBLE: Final = frozenset(
    {"ast", "kernelguard", "re", "tokenize", "workers.judge.pipeline.provenance", extraction.__name__, rules.__name__}
)


def findings(source: str, backend: str, *, own_s: float = _OWN_S) -> list[Finding]:
    """Apply all rules to a kernel's source. Call it from the main thread.

    ``own_s`` is the maximum CPU time in seconds of the project's own rules.

    Returns:
        The most severe first, at most 3 per rule and 40 in total.
    """
    all_findings = [*_own(source, backend, own_s), *_guard(source)]
    order = list(Severity)
    all_findings.sort(key=lambda finding: (order.index(finding.severity), finding.line or 0, finding.rule))
    kept, counts = list[Finding](), Counter[tuple[str, str]]()
    for finding in all_findings:
        key = finding.by, finding.rule
        counts[key] += 1
        if counts[key] <= _OF_ONE_RULE and finding not in kept:
            kept.append(finding)
    return kept[:_FINDINGS]


def enforce(found: Sequence[Finding], policy: Policy) -> None:
    """End the evaluation of a kernel that has a ``cheat`` finding, if the policy is to reject it.

    Raises:
        EvaluationEnded: ``rejected_by_policy``, with the findings in the facts.
    """
    cheats = [finding for finding in found if finding.severity is Severity.CHEAT]
    if policy is Policy.REJECT and cheats:
        first = cheats[0]
        raise EvaluationEnded(
            Category.REJECTED_BY_POLICY,
            f"line {first.line}: {first.rule}: {first.meaning}",
            Phase.PREPARE,
            findings=cheats,
        )


def without_fence(source: str) -> tuple[str, Finding | None]:
    """Return a kernel without the Markdown around it, and a finding with its place in the text.

    The kernel keeps its line numbers. A source without a fence, or that is valid Python, is returned unchanged.
    """
    if not (fence := _FENCE.search(source)) or _is_python(source):
        return source, None
    try:
        with _cpu_time(_OWN_S):
            taken = extraction.take(source)
    except _TimeUp:
        return source, None
    if not taken.note or ENTRY not in taken.kernel:
        return source, None
    severity, meaning = RULES["markdown_fence"]
    line = source.count("\n", 0, fence.start()) + 1
    blank = "\n" * (taken.lines[0] - 1) if taken.lines else ""
    return blank + taken.kernel, _finding("markdown_fence", severity, line, taken.note, "kqueue", meaning)


def _parsed(source: str) -> ast.Module:
    """Return the tree that an import makes of a source. Under another encoding the rules would read another text."""
    content = source.encode()
    tree = ast.parse(content)
    name, lines = tokenize.detect_encoding(io.BytesIO(content).readline)
    if name.lower() not in ("utf-8", "utf8"):
        raise SyntaxError(f"declares the encoding {name}: only UTF-8 is read", ("", len(lines), 1, lines[-1].decode()))
    return tree


def program_of(source: str) -> str:
    """Return a hash of a kernel that comments, white space and names of variables do not change.

    A number stands for each name, in the order of their first uses. The tree that the kernel names counts too.
    """
    numbers = dict[str, str]()

    def numbered(found: re.Match[str]) -> str:
        name, dot = found.groups("")
        # A name that is first used with a dot is built in, or a module's.
        if not name or keyword.iskeyword(name) or (dot and name not in numbers):
            return name + dot
        return numbers.setdefault(name, f"\0{len(numbers)};") + dot

    tree = named_tree(source)
    whole = _LAYOUT.sub(numbered, source) + ("\0" + " ".join((tree.hash, tree.root, *tree.build)) if tree else "")
    return hashlib.sha256(whole.encode()).hexdigest()


def _is_python(source: str) -> bool:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return bool(_parsed(source))
    return False


def check_problem(source: str) -> None:
    """Reject a problem that is not Python, or whose shapes or request for gradients are malformed.

    Raises:
        EvaluationEnded: ``invalid_problem``.
    """
    try:
        tree = _parsed(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise invalid_problem(f"the problem's source is not valid Python: {error}") from None
    for name in ("Model", "get_inputs"):
        if not re.search(rf"\b{name}\b", source) and not any(map(_imports_anything, ast.walk(tree))):
            raise invalid_problem(f"the problem's source never names {name}, which it must define")
    check_bound(source)
    try:
        passes.asked_by(source)
        for shape in shapes.read(source):
            shapes.problem_of(source, shape)
    except InvalidRequest as error:
        raise invalid_problem(str(error)) from None


def shapes_of(request: Request) -> tuple[shapes.Shape, ...]:
    """Return the shapes of a request's problem, or none if it names none or :func:`check_problem` rejects it."""
    if request.backend != PYTEST and shapes.NAME in request.problem:
        with contextlib.suppress(EvaluationEnded):
            check_problem(request.problem)
            return shapes.read(request.problem)
    return ()


def asks_backward(request: Request) -> bool:
    """Return whether gradients are asked for, or False if :func:`check_problem` rejects the problem."""
    with contextlib.suppress(InvalidRequest):
        asked = request.settings.backward or passes.asked_by(request.problem)
        return asked and request.backend != PYTEST
    return False


def tolerance(source: str) -> Tolerances | None:
    """Read the tolerance that a problem sets for its outputs, or for each, from its text. Return None if it sets none.

    Raises:
        EvaluationEnded: ``invalid_problem`` if it is no such literal, or so wide that anything would be right.
    """
    values = [value for _, _, value in shapes.assigned(source, _TOLERANCE)]
    if not values:
        return None
    try:
        [value] = values
        given = ast.literal_eval(value) if value is not None else None
        parsed = TypeAdapter[Tolerances](Tolerances).validate_python(given)
        if all(one is None or (one.atol <= _MOST_ATOL and one.rtol <= _MOST_RTOL) for one in grades.each(parsed)):
            return parsed
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    form = f'{_TOLERANCE} = {{"atol": 1e-3, "rtol": 1e-2}}'
    most = f"at most {_MOST_ATOL:g} and {_MOST_RTOL:g}, or as a list of one for each output, None for the usual one"
    raise invalid_problem(f"a problem gives its tolerance once, as {form}, {most}")


def calls(source: str) -> int | None:
    """Read the number of forwards in each call from a problem's text. Raise ``invalid_problem`` if it is malformed."""
    match [value for _, _, value in shapes.assigned(source, shapes.CALLS)]:
        case []:
            return None
        case [ast.Constant(value=int() as number)] if 2 <= number <= 9:
            return number
        case _:
            form = (
                f"{shapes.CALLS} = 2 is stated once, at the top level, for 2 to 9 forwards without a reset between them"
            )
            raise invalid_problem(f"{form}. A variable {shapes.CALLS} for another purpose needs another name")


def world(source: str) -> int:
    """Read the number of ranks from a problem's text, 0 for none. Raise ``invalid_problem`` if it is malformed."""
    if (number := shapes.ranks(source)) < 0:
        form = f"{shapes.WORLD} = 2 is stated once, at the top level, for 1 to {shapes.MOST_RANKS} ranks"
        raise invalid_problem(f"{form}. A variable {shapes.WORLD} for another purpose needs another name")
    return number


def check_bound(source: str) -> float | None:
    """Read the bound of a problem's check() from its text. Raise ``invalid_problem`` if only one of them is there."""
    values = [value for _, _, value in shapes.assigned(source, _BOUND)]
    functions = [node for node in ast.parse(source.encode()).body if isinstance(node, ast.FunctionDef)]
    defined = [node for node in functions if node.name == "check"]
    if not values and [argument.arg for node in defined for argument in node.args.args] != _CHECKED:
        return None
    match values:
        case [ast.Constant(value=float() | int() as bound)] if defined and 0 < bound <= 1:
            return float(bound)
        case _:
            raise invalid_problem(
                f"a problem with its own check defines check({', '.join(_CHECKED)}) and states once, at its top level,"
                f" a relative change from 0 to 1 of right outputs that it refuses, such as {_BOUND} = 1e-2"
            )


def queues(*sources: str) -> int:
    """Return the number of hardware queues for a process that runs some sources, or 0 for the driver's default.

    One queue is enough for one stream, and makes opening a GPU two to three times as fast. Work on several streams
    would wait in it: cuDNN's LSTM then takes 1.5 times as long.
    """
    lines = (match for source in sources for match in _IMPORTS.findall(source))
    imported = {name for origin, names in lines for name in (origin, *_IMPORTED.findall(names)) if name}
    return 0 if imported - _IN_LINE or any(map(_SIDE_BY_SIDE.search, sources)) else 1


def check(source: str) -> None:
    """Reject a source that cannot be imported or cannot define the entry point.

    Raises:
        EvaluationEnded: ``syntax_error`` or ``entry_point_missing``.
    """
    try:
        tree = _parsed(source)
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
    """Return whether a node is a star import or code created at run time, which could define any name."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name == "*" for alias in node.names)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("exec", "eval")


# The project's own rules -----------------------------------------------------------------------------


def _own(source: str, backend: str, seconds: float) -> Iterator[Finding]:
    hits = set[tuple[str, int]]()
    try:
        with _cpu_time(seconds):
            for hit in rules.hits(source, backend):
                hits.add(hit)
    except _TimeUp:
        hits.add(("rules_stopped", 1))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.split("\n")  # Like Python: splitlines() has other line ends too.
    for rule, line in hits:
        severity, meaning = RULES[rule]
        yield _finding(rule, severity, line, lines[line - 1] if line <= len(lines) else "", "kqueue", meaning)


def _finding(
    rule: str, severity: str, line: int | None, evidence: str, by: Literal["kqueue", "kernelguard"], meaning: str
) -> Finding:
    evidence, meaning = _printable(evidence), _printable(meaning)
    return Finding(rule=rule, severity=Severity(severity), line=line, evidence=evidence, by=by, meaning=meaning)


def _printable(text: str) -> str:
    text = " ".join(text[: 4 * _EVIDENCE_CHARS].split())
    return "".join(char if char.isprintable() else "\ufffd" for char in text[:_EVIDENCE_CHARS])


# kernelguard -----------------------------------------------------------------------------------------


class _TimeUp(BaseException):
    """The time limit has passed. A ``BaseException``, so that no handler in the interrupted code catches it."""


def _guard(source: str) -> Iterator[Finding]:
    """Yield kernelguard's findings. Its rules use similarity, so no finding counts as more than ``suspicious``."""
    if len(source) > _GUARD_CHARS:
        yield _about_the_guard("guard_skipped")
        return
    try:
        with _cpu_time(_GUARD_S):
            result = kernelguard.analyze_code(source, compute_structural_hash=False)
    except _TimeUp:
        yield _about_the_guard("guard_stopped")
        return
    except Exception:  # noqa: BLE001 -- third-party rules can fail in any way on an untrusted source
        return
    for match in result["matched_patterns"]:
        pattern = str(match["pattern"])
        policy = kernelguard.get_rule_policy(pattern)
        weak = policy.max_outcome == kernelguard.TELEMETRY_ONLY
        meaning = f"matches the package kernelguard's rule for {policy.technique_family.replace('_', ' ')}"
        severity = "note" if weak else "suspicious"
        yield _finding(pattern.lower(), severity, None, str(match.get("evidence", "")), "kernelguard", meaning)


def _about_the_guard(rule: str) -> Finding:
    severity, meaning = RULES[rule]
    return _finding(rule, severity, None, "", "kqueue", meaning)


@contextlib.contextmanager
def _cpu_time(seconds: float) -> Generator[None]:
    """Interrupt the block with :class:`_TimeUp` after a number of seconds of this process's CPU time."""
    running = True

    def up(_signal: int, frame: FrameType | None) -> None:
        # Not in a finalizer or a garbage collection callback, where Python swallows exceptions. The next signal comes
        # elsewhere.
        if running and frame is not None and frame.f_globals.get("__name__") in _INTERRUPTIBLE:
            raise _TimeUp

    previous = signal.signal(signal.SIGVTALRM, up)
    # Repeat the signal until one arrives where the exception can be raised.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
