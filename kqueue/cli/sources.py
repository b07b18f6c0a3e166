"""From the arguments of `kqueue submit` to the fields of requests: files, folders, globs, JSON lines, settings.

What is wrong with one kernel or line is kept beside it and spoils none of the others.
"""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from kqueue.errors import InvalidRequest

#: A line of JSON holds two sources at most, each byte escaped as ``\u00xx`` at worst.
_MAX_LINE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel or line, read but not yet checked as a request.

    Attributes:
        where: the kernel's path, or ``line 3``.
        fields: of the request; empty where they could not be read.
        error: why they could not; None where they could.
    """

    where: str
    fields: Mapping[str, Any]
    error: InvalidRequest | None = None


def read_source(path: Path) -> str:
    """The text of a source file.

    Raises:
        InvalidRequest: it cannot be read or is no source; the message names it.
    """
    from kqueue.contract import MAX_SOURCE_BYTES

    try:
        with path.open("rb") as file:
            data = file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None
    if len(data) > MAX_SOURCE_BYTES:
        raise InvalidRequest(f"{path}: larger than {MAX_SOURCE_BYTES} bytes, which is what a source may have")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path}: not UTF-8 text (byte 0x{data[error.start]:02x} at offset {error.start}); save it as UTF-8"
        ) from None
    if not text.strip():
        raise InvalidRequest(f"{path}: the file is empty")
    return text


def read_problem(given: str) -> dict[str, str]:
    """The fields of a request for the problem in a file, or for a stored problem named ``sha256:HASH``.

    Raises:
        InvalidRequest: the file cannot be read or is no source; the message names it.
    """
    if given.startswith("sha256:"):
        return {"problem": given}
    path = Path(given)
    return {"problem": read_source(path), "problem_label": path.stem}


def find_kernels(patterns: Sequence[str]) -> list[Path]:
    """The files that paths, folders (their ``*.py``) and globs name, each once, in that order.

    Raises:
        InvalidRequest: a pattern names nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(path.glob("*.py"))
            if not matches:
                raise InvalidRequest(f"{pattern}: no .py file in this folder")
        elif path.exists() or not glob.has_magic(pattern):
            matches = [path]  # a file that does not exist is reported as a bad kernel beside the good ones
        else:
            # Path.glob takes no absolute patterns.
            matches = sorted(Path(m) for m in glob.glob(pattern, recursive=True) if Path(m).is_file())  # noqa: PTH207
            if not matches:
                raise InvalidRequest(f"{pattern}: no file matches")
        found.update(dict.fromkeys(matches))
    return list(found)


def read_settings(given: str | None, assignments: Iterable[str]) -> dict[str, Any]:
    """Settings from ``--settings`` (a JSON file, or JSON itself) with each ``--set path=value`` over them.

    Raises:
        InvalidRequest: not JSON, or an assignment without a name.
    """
    settings: dict[str, Any] = {}
    if given is not None:
        inline = given.lstrip().startswith("{")
        settings = _json_object(given if inline else read_source(Path(given)), "--settings" if inline else given)
    for assignment in assignments:
        name, mark, value = assignment.partition("=")
        if not mark or not all(name.split(".")):
            raise InvalidRequest(f"--set {assignment}: write name=value, such as deadlines.check_s=5")
        *parents, last = name.split(".")
        try:
            tree: dict[str, Any] = {last: json.loads(value)}
        except ValueError:
            tree = {last: value}
        for part in reversed(parents):
            tree = {part: tree}
        settings = merged(settings, tree)
    return settings


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``over`` laid upon it, objects within objects alike."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[name] = merged(cast("dict[str, Any]", below), cast("dict[str, Any]", value)) if both else value
    return result


def from_kernels(paths: Iterable[Path], fields: Mapping[str, Any]) -> Iterator[Entry]:
    """One entry for each kernel's file; ``fields`` holds the rest of the request."""
    for path in paths:
        yield _entry(str(path), lambda path=path: {**fields, "kernel": read_source(path), "kernel_label": path.stem})


def from_lines(path: str, fields: Mapping[str, Any]) -> Iterator[Entry]:
    """One entry for each line of a file of JSON lines (``-``: stdin), read as they come.

    A line is a Request. ``problem_file`` and ``kernel_file`` may stand for the sources: paths relative to
    the file's folder. What a line leaves out is taken from ``fields``.

    Raises:
        InvalidRequest: the file cannot be opened.
    """
    base = Path() if path == "-" else Path(path).parent
    with ExitStack() as stack:
        if path == "-":
            stream = sys.stdin.buffer
        else:
            try:
                stream = stack.enter_context(Path(path).open("rb"))
            except OSError as error:
                raise InvalidRequest(f"{path}: {error.strerror or error}") from None
        number = 0
        while line := stream.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > _MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(_MAX_LINE_BYTES)
                yield Entry(f"line {number}", {}, InvalidRequest(f"longer than {_MAX_LINE_BYTES} bytes"))
            elif line.strip():
                yield _entry(f"line {number}", lambda line=line: _from_line(line, base, fields))


def _from_line(line: bytes, base: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"not UTF-8 text (byte 0x{line[error.start]:02x} at offset {error.start})") from None
    record = _json_object(text)
    for name in ("problem", "kernel"):
        file = record.pop(f"{name}_file", None)
        if file is None:
            continue
        if name in record:
            raise InvalidRequest(f"{name} and {name}_file are both given: give one")
        if not isinstance(file, str) or not file or "\0" in file:
            raise InvalidRequest(f"{name}_file: a path is wanted, not {json.dumps(file)}")
        record[name] = read_source(base / file)
        record.setdefault(f"{name}_label", Path(file).stem)
    if "problem" in record:  # then the problem of the command line is not this one's, nor is its label
        fields = {name: value for name, value in fields.items() if name not in {"problem", "problem_label"}}
    return merged(fields, record)


def _json_object(text: str, where: str = "") -> dict[str, Any]:
    prefix = f"{where}: " if where else ""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{prefix}not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(f"{prefix}not usable JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{prefix}a JSON object is wanted, such as {{...}}")
    return cast("dict[str, Any]", value)


def _entry(where: str, fields: Callable[[], dict[str, Any]]) -> Entry:
    try:
        return Entry(where, fields())
    except InvalidRequest as error:
        return Entry(where, {}, error)
