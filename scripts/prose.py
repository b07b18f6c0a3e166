"""Check the language of docstrings, comments, messages, Markdown and commit subjects.

CONTRIBUTING.md states the rule. Each habit below has a plain replacement, and no word is exempt. Code spans, code
blocks, quotations of a word in double quotes, names in backquotes, and the kernels and problems of `examples` and
`benchmarks` are not prose and are not checked.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent
#: Folders and files that are checked where no path is given.
_CHECKED: Final = (
    *("kqueue", "workers", "migrations", "scripts", "benchmarks", "examples", "docs"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
#: Folders of kernels and problems, whose sources are data.
_DATA: Final = frozenset({"kernels", "problems"})
#: The last commit that predates the check of subjects.
_SUBJECTS_SINCE: Final = "044c2a9"
_SUBJECT: Final = re.compile(r"(?:Ask|Have|Keep|Know|Let|Look|Say|Take|Tell)\b")
_OPENING: Final = re.compile(r"(?:What|How|Whether|Where|Who|Whose|When|Which)\b")
#: Habits of sentences that are not questions, with the advice for each.
_HABITS: Final = (
    (re.compile(r"\bwhat (?:is|are|was|were|it|they|has|have|had|can|could|must|does)\b", re.I), "write the noun"),
    (re.compile(r"(?:^|[.:;] )(?:Whoever|Whatever|Who|That which|Those (?:who|that)|What)\b"), "name the subject"),
    (re.compile(r"\bmay\b"), "write can, might or must not"),
    (re.compile(r"; "), "write two sentences"),
    (re.compile(r"\b(?:nobody|somebody|anybody|everybody|whoever)\b", re.I), "name the process or the user"),
    (re.compile(r"\b(?:tell|tells|told|telling)\b", re.I), "write report, return or record"),
    (re.compile(r"\bothers\b", re.I), "name them"),
    (re.compile(r", as (?:it|they|he|the|this|that|these|there|nothing|each|an?|its|their|all|no)\b"), "write because"),
    (re.compile(r"\bbeside\b", re.I), "write next to, in addition to or compared with"),
    (re.compile(r", in (?:bytes|seconds|milliseconds|ms|nanoseconds)\.$"), "write 'Size in bytes of'"),
    (re.compile(r"\b(?:that of|those of|of (?:its|their) own|such as are|be had|had alone|anew)\b", re.I), "rephrase"),
)
#: Spans that are not prose: roles, code, links' targets, quoted words.
_SPANS: Final = re.compile(r":[\w:]+:`[^`]*`|``[^`]*``|`[^`]*`|\]\([^)]*\)|https?://\S+|\"[^\"]*\"|<[^>]*>")
#: Signs that a string is SQL or source code.
_CODE: Final = re.compile(r"\b(?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|WITH|FROM)\b|[={}]|def |\\")
_SECTION: Final = re.compile(r"(?:Args|Attributes|Returns|Raises|Yields|Note|Example|Examples):$")


def main() -> int:
    """Print each finding as ``file:line: habit: sentence``. Return 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path, help="files or folders instead of the whole project")
    parser.add_argument("--count", action="store_true", help="print the number of findings by file instead")
    asked = parser.parse_args()
    found = [f"{path}:{line}: {text}" for path in _files(asked.paths) for line, text in _findings(path)]
    if not asked.paths:
        found += [f"commit {subject}" for subject in _subjects()]
    if asked.count:
        counts = Counter(text.split(":")[0] for text in found)
        print(*(f"{count:5} {name}" for name, count in counts.most_common()), sep="\n")
    else:
        print(*found, sep="\n", end="\n" if found else "")
    print(f"prose: {len(found)} findings", file=sys.stderr)
    return 1 if found else 0


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths or [_ROOT / name for name in _CHECKED]:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (f for f in found if f.suffix in {".py", ".md"} and _DATA.isdisjoint(f.relative_to(path).parts))


def _subjects() -> Iterator[str]:
    """Yield the subjects of new commits with a verb that hides the change. None in a shallow clone."""
    log = ["git", "-C", str(_ROOT), "log", "--no-merges", "--format=%h %s", f"{_SUBJECTS_SINCE}..HEAD"]
    subjects = subprocess.run(log, capture_output=True, text=True, check=False).stdout.splitlines()
    yield from (subject for subject in subjects if _SUBJECT.match(subject.partition(" ")[2]))


def _findings(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    try:
        paragraphs = list(_of_python(text) if path.suffix == ".py" else _of_markdown(text))
    except SyntaxError:
        return  # a kernel of the gallery has a syntax error on purpose
    for line, paragraph, is_docstring in paragraphs:
        if is_docstring and _OPENING.match(paragraph):
            yield line, f"begin with a verb or a noun: {paragraph[:100]}"
        # A span becomes one word, so that the text around it remains a sentence.
        prose = _SPANS.sub("X", paragraph)
        for sentence in re.split(r"(?<=[.?!:]) (?=[A-Z])", prose):
            if sentence.endswith("?"):
                continue
            for habit, advice in _HABITS:
                if found := habit.search(sentence):
                    yield line, f"{advice}: {sentence[max(0, found.start() - 50) : found.end() + 50].strip()}"


def _of_python(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the line, the text and a flag for a docstring's first paragraph, of docstrings, comments and messages."""
    tree = ast.parse(source)
    docstrings = {id(node): node for node in _docstrings(tree)}
    for node in docstrings.values():
        for number, (offset, paragraph) in enumerate(_paragraphs(str(node.value))):
            yield node.lineno + offset, paragraph, number == 0
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            yield from _message(node.lineno, words)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from _message(node.lineno, node.value)
    comment: list[str] = []
    begin = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            begin = begin if comment else token.start[0]
            comment.append(re.sub(r"noqa: [A-Z0-9, ]+(?:--)?", "", token.string.lstrip("#: ")).strip())
        elif token.type not in {tokenize.NL, tokenize.INDENT, tokenize.DEDENT} and comment:
            yield begin, " ".join(comment), False
            comment = []


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings that are statements, such as the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _message(line: int, text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield a string if it is prose: words on one line that are neither SQL nor source code."""
    is_code = "\n" in text or _CODE.search(text)
    if not is_code and len(re.findall(r"[A-Za-z]{2,}", text)) > 2:
        yield line, text.strip(), False


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs and items of a docstring with the numbers of their first lines, without code blocks."""
    lines: list[str] = []
    begin = 0
    is_code = False
    for number, line in enumerate([*text.splitlines(), ""]):
        stripped = line.strip()
        is_item = re.match(r"[*-] |[\w*, ]+: ", stripped) and not lines
        if not stripped or _SECTION.fullmatch(stripped) or re.match(r"[*|-] ?|>>>|\.\.\. ", stripped):
            if lines and not is_code:
                yield begin, " ".join(lines)
            is_code = bool(lines) and lines[-1].endswith("::")
            lines = []
            if not stripped or _SECTION.fullmatch(stripped) or stripped.startswith((">>>", "...", "|")):
                continue
        if not lines:
            begin = number
            stripped = re.sub(r"^[\w*, ]+: ", "", stripped) if is_item else stripped
        elif re.match(r"\w+(?:, \w+)*: ", stripped):
            yield begin, " ".join(lines)
            lines, begin, stripped = [], number, re.sub(r"^[\w, ]+: ", "", stripped)
        lines.append(stripped)


def _of_markdown(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the paragraphs, list items and table cells of Markdown with the numbers of their first lines."""
    lines: list[str] = []
    begin = 0
    fence = ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if fence or stripped.startswith(("```", "~~~")):
            fence = "" if fence and stripped.startswith(fence) else fence or stripped[:3]
            stripped = ""
        starts = re.match(r"[*+-] |\d+\. |#|>|\|", stripped)
        if (not stripped or starts) and lines:
            yield begin, " ".join(lines), False
            lines = []
        if stripped.startswith("|"):
            yield from ((number, cell.strip(), False) for cell in re.split(r"(?<!\\)\|", stripped) if cell.strip())
        elif stripped and not stripped.startswith(("<!--", "#!")):
            begin = begin if lines else number
            lines.append(re.sub(r"^(?:[*+-]|\d+\.|#+|>) ", "", stripped))


if __name__ == "__main__":
    sys.exit(main())
