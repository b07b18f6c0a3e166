"""The parts that the adapters of :mod:`kqueue.formats` share. They read texts as data and never run them.

A function raises InvalidRequest if a text or file is malformed. The message has the reason.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kqueue import shapes
from kqueue.contract import MAX_SOURCE_BYTES
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.files import read_text as read_file

#: Variable of a translated problem with its format, and with the facts that a translation of kernels needs.
ORIGIN: Final = "TRANSLATED_FROM"
#: An import of torch under a name that files of a set do not use.
TORCH: Final = "\nimport torch as _torch\n"
#: Names that a translated problem defines.
_OURS: Final = frozenset({"Model", "get_inputs", "get_init_inputs"})
_MOST_BYTES: Final = 16 << 20
_MOST_NAME: Final = 60


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in kqueue's form, differences from the set's own judgement, and texts of the set's kernels by name."""

    name: str
    source: str
    notes: tuple[str, ...] = ()
    solutions: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        parsed(self.source, "the translated problem")
        if len(self.source.encode()) > MAX_SOURCE_BYTES:
            raise InvalidRequest(f"the translated problem is larger than {MAX_SOURCE_BYTES} bytes")
        for shape in self.shapes:
            shapes.problem_of(self.source, shape)

    @property
    def shapes(self) -> tuple[shapes.Shape, ...]:
        """The input shapes. Empty if the problem has only one."""
        return shapes.read(self.source)


@dataclass(frozen=True, slots=True)
class Refused:
    """An entry of a set that cannot be translated, with the reason."""

    name: str
    reason: str


def origin(problem: str) -> dict[str, Any]:
    """Return what a translated problem says about its kernels. Empty for other problems."""
    try:
        for node in ast.parse(problem).body if ORIGIN in problem else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ORIGIN:
                return dict(ast.literal_eval(node.value))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return {}


def each(path: Path, marker: str, translate: Callable[[Path, str, Path], Problem]) -> Iterator[Problem | Refused]:
    """Yield the translation of each folder at a path that has a file of this name."""
    for file in files(path, marker):
        root = path if path.is_dir() and path != file.parent else file.parent.resolve().parent
        name = str(file.parent.resolve().relative_to(root.resolve()))
        yield attempt(name, lambda folder=file.parent, name=name, root=root: translate(folder, name, root))


def attempt(name: str, translate: Callable[[], Problem]) -> Problem | Refused:
    """Return an entry's translation, or the reason why there is none."""
    try:
        return translate()
    except InvalidRequest as error:
        return Refused(name, str(error))


def files(path: Path, pattern: str) -> list[Path]:
    """Return the files of this name at a path, ``task_2`` before ``task_10``, without those in hidden folders."""
    found = filter(Path.is_file, path.rglob(pattern) if path.is_dir() else [path] if path.match(pattern) else [])
    shown = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    return sorted(shown, key=lambda file: re.sub(r"\d+", lambda digits: digits[0].zfill(9), str(file)))


def valid(model: Any, fields: object) -> Any:
    """Return data as an instance of a model."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        fault = error.errors()[0]
        raise InvalidRequest(f"{'.'.join(map(str, fault['loc'])) or 'it'}: {fault['msg']}") from None


def read_text(path: Path) -> str:
    """Return a file's text."""
    return read_file(path, _MOST_BYTES)


def fields(text: str | bytes) -> dict[str, Any]:
    """Return a JSON object's fields. Empty if it is none."""
    try:
        known = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def yaml_of(file: Path) -> object:
    """Return the content of a YAML file."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(f"{file.name} needs PyYAML: `pip install 'kqueue[cli]'`") from None
    try:
        return yaml.safe_load(read_text(file))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file.name} is not YAML: {' '.join(str(error).split())}") from None


def parsed(source: str, what: str) -> ast.Module:
    """Return the syntax tree of a source."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"{what} is not valid Python: {error}") from None


def defined(source: str | ast.Module) -> set[str]:
    """Return the names that a source binds at its top level. Empty if it is not valid Python."""
    try:
        body = (parsed(source, "") if isinstance(source, str) else source).body
    except InvalidRequest:
        return set()
    names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    names |= {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return names | {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def reference(source: str, what: str, needs: set[str], ours: frozenset[str] = _OURS) -> ast.Module:
    """Return the syntax tree of a reference that defines some names, and none of ``ours``."""
    names = defined(tree := parsed(source, what))
    if missing := needs - names:
        raise InvalidRequest(f"{what} does not define {min(missing)}")
    if taken := ours & names:
        raise InvalidRequest(f"{what} has another use for the name {min(taken)}")
    return tree


def function(tree: ast.Module | ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return a function that a module or class defines."""
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def with_modules(source: str, modules: Mapping[str, str], what: str) -> str:
    """Return a source that first makes the modules that it imports, from their sources."""
    order: dict[str, None] = {}

    def need(tree: ast.Module) -> None:
        names = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
        for name in sorted(names & modules.keys() - order.keys()):
            order[name] = None
            need(parsed(modules[name], f"{name}.py"))
            order[name] = order.pop(name)  # after the modules that it imports

    need(tree := parsed(source, what))
    if not order:
        return source
    lines = ["import sys as _sys", "import types as _types"]
    for name in order:
        lines.append(f"_sys.modules[{name!r}] = _module = _types.ModuleType({name!r})")
        lines.append(f"exec(compile({modules[name]!r}, {name + '.py'!r}, 'exec'), vars(_module))")
    # `from __future__ import` stays in front.
    future = [node.end_lineno or 0 for node in tree.body if getattr(node, "module", None) == "__future__"]
    text = source.splitlines()
    return "\n".join([*text[: max(future, default=0)], *lines, *text[max(future, default=0) :], ""])


def assignments(facts: Mapping[str, Any], listed: Sequence[object], **more: object) -> str:
    """Return the text that assigns a translated problem's origin, its shapes (if any), and other literals."""
    rows = "".join(f"    {shape!r},\n" for shape in listed)
    text = f"{ORIGIN} = {facts!r}\n" + (f"{shapes.NAME} = [\n{rows}]\n" if rows else "")
    return text + "".join(f"{name} = {value!r}\n" for name, value in more.items())


def distinct(listed: Iterable[dict[str, Any]], notes: list[str], what: str) -> list[dict[str, Any]]:
    """Return shapes with different arguments, each with a name, at most :data:`kqueue.shapes.MOST`.

    Of equal ones the first stays. A note says how many were left out.
    """
    unlike: dict[str, dict[str, Any]] = {}
    for shape in listed:
        unlike.setdefault(repr(shape["args"]), shape)
    kept = list(unlike.values())
    if len(kept) > (most := shapes.MOST):
        notes.append(f"{most} of {len(kept)} {what}, evenly spread over their list")
        kept = [kept[number * len(kept) // most] for number in range(most)]
    for number, shape in enumerate(kept, 1):
        given = ", ".join(f"{name}={value!r}" for name, value in shape["args"].items())
        shape["name"] = f"{number}: {shape.get('name') or given}"[:_MOST_NAME].rstrip()
    return kept
