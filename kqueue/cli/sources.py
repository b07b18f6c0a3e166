"""Turn arguments of commands (files, folders, globs, JSON lines, settings) into fields of requests.

An error in one kernel or line is stored in its :class:`Entry` and does not affect the remaining ones. A function raises
InvalidRequest if a file or text is malformed. The message names it.
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
from kqueue.files import read_text

#: Maximum size in bytes of a JSON line. It has up to two sources, and JSON can escape each byte as ``\u00xx``.
_MAX_LINE_BYTES: Final = 16 << 20
#: Maximum number of kernel files of a command. Their sources are held in memory.
_MOST_KERNELS: Final = 10_000
#: Endings of files that describe problems of other projects.
_SETS: Final = frozenset({".json", ".jsonl", ".parquet", ".yml"})
#: Advice on files that are not Python, with their endings.
_OTHERS: Final = {
    "put its text into a .py file, and compile it there by torch.utils.cpp_extension.load_inline": ".cu .cuh .cpp .h",
    "give the source from which it was compiled, in a .py file": ".ptx .cubin .fatbin .so .o",
    "there is no backend for Mojo": ".mojo",
    "unpack it, and name the .py files in it": ".zip .tar .gz .tgz .bz2 .xz .zst .7z .whl",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel file or a JSON line, not yet validated as a request, with the reason why it could not be read."""

    where: str
    fields: Mapping[str, Any]
    error: InvalidRequest | None = None


def read_source(path: Path) -> str:
    """Read a source file."""
    from kqueue.contract import MAX_SOURCE_BYTES

    for advice, endings in _OTHERS.items():
        if path.suffix.lower() in endings.split():
            raise InvalidRequest(f"{path}: kernels and problems are files of Python: {advice}")
    text = read_text(path, MAX_SOURCE_BYTES)
    if not text.strip():
        raise InvalidRequest(f"{path}: the file is empty")
    return text


def read_problem(given: str) -> dict[str, str]:
    """Return a request's fields for the problem in a file, in another project's set, or stored as ``sha256:HASH``.

    A set is a folder or a file without the ending ``.py``, and ``SET#NAME`` one of its problems.
    """
    if given.startswith("sha256:"):
        return {"problem": given}
    path, name = Path(given), None
    if not path.exists() and "#" in given:
        folder, _, name = given.rpartition("#")
        path = Path(folder)
    if name is not None or path.is_dir() or path.suffix in _SETS:
        from kqueue import formats

        problem = formats.one(path, name)
        return {"problem": problem.source, "problem_label": problem.name[-200:]}
    return {"problem": read_source(path), "problem_label": path.stem}


def read_tree(given: str | None) -> dict[str, Any]:
    """Return the fields of a tree that ``--tree`` names. :func:`adapted` turns them into fields of a request."""
    if given is None:
        return {}
    from kqueue import trees

    tree, root = trees.pack_given(given)
    return {"trees": [tree.text], _LINE: tree.line(root)}


#: Field with the line that begins each kernel. Requests have no such field.
_LINE: Final = "line of the tree"


def adapted(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a request's fields with the kernel in the form that a translated problem needs, in its tree."""
    problem, kernel = fields.get("problem"), fields.get("kernel")
    if isinstance(problem, str) and isinstance(kernel, str) and "TRANSLATED_FROM" in problem:
        from kqueue import formats

        fields = {**fields, "kernel": formats.kernel(problem, kernel)}
    if _LINE in fields:
        fields = {**fields, "kernel": f"{fields[_LINE]}{kernel}"}
        del fields[_LINE]
    return fields


def find_kernels(patterns: Sequence[str]) -> list[Path]:
    """Return the files of paths, folders (their ``*.py``) and globs, in order and without duplicates."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        if not pattern:
            raise InvalidRequest("a kernel's name is empty: give a file, folder or glob")
        path = Path(pattern)
        if path.is_dir():
            matches = sorted(path.glob("*.py"))
            if not matches:
                raise InvalidRequest(f"{pattern}: no .py file in this folder: a kernel is one")
        elif path.exists() or not glob.has_magic(pattern):
            matches = [path]  # a missing file is reported later, as one bad kernel
        else:
            # Path.glob accepts no absolute patterns. Unlike glob.glob it follows no link to a folder above.
            found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
            matches = sorted(one for one in found if one.is_file() and _hidden(one) <= _hidden(path))
            if not matches:
                raise InvalidRequest(f"{pattern}: no file matches")
        paths.update(dict.fromkeys(matches))
    if len(paths) > _MOST_KERNELS:
        raise InvalidRequest(f"{len(paths)} kernels: give at most {_MOST_KERNELS} at once, or JSON lines with --jsonl")
    return list(paths)


def _hidden(path: Path) -> set[str]:
    return {part for part in path.parts if part.startswith(".")}


def read_settings(given: str | None, assignments: Iterable[str]) -> dict[str, Any]:
    """Return the settings in a JSON file or in inline JSON, overridden by each ``--set path=value``."""
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
    """Return ``base`` updated with ``over``, recursively."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[name] = merged(cast("dict[str, Any]", below), cast("dict[str, Any]", value)) if both else value
    return result


def from_kernels(paths: Iterable[Path], fields: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield one entry for each kernel file. ``fields`` has the rest of the request."""
    for path in paths:
        yield _entry(
            str(path), lambda path=path: adapted({**fields, "kernel": read_source(path), "kernel_label": path.stem})
        )


def with_backend(entry: Entry) -> Entry:
    """Return an entry with the backend that its source shows, unless it names one or has an error."""
    from kqueue.judging import guess_backend

    kernel = entry.fields.get("kernel")
    if entry.error is not None or "backend" in entry.fields or not isinstance(kernel, str):
        return entry
    return _entry(entry.where, lambda: {**entry.fields, "backend": guess_backend(kernel)})


def from_lines(path: str, fields: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield one entry for each line of a JSON lines file (``-`` for stdin) while the file is read.

    A line is a Request. It can name ``problem_file`` and ``kernel_file`` instead of the sources, relative to the
    file's folder. ``fields`` provides the defaults.
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
            raise InvalidRequest(f"{name}_file: give a path, not {json.dumps(file)}")
        found = read_problem(str(base / file)) if name == "problem" else {}
        record[name] = found.get("problem") or read_source(base / file)
        record.setdefault(f"{name}_label", found.get("problem_label", Path(file).stem))
    if "problem" in record:  # a line with its own problem must not inherit the command line's label
        fields = {name: value for name, value in fields.items() if name not in {"problem", "problem_label"}}
    return adapted(merged(fields, record))


def _json_object(text: str, where: str = "") -> dict[str, Any]:
    prefix = f"{where}: " if where else ""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"{prefix}not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(f"{prefix}JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{prefix}not a JSON object: give {{...}}")
    return cast("dict[str, Any]", value)


def _entry(where: str, fields: Callable[[], dict[str, Any]]) -> Entry:
    try:
        return Entry(where, fields())
    except InvalidRequest as error:
        return Entry(where, {}, error)
