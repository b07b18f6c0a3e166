"""The operators of a repository, from a TOML file (`docs/check.md`), and the sources by which a judge compares them."""

from __future__ import annotations

import ast
import math
import random
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kqueue.contract import Precision, Tolerance
from kqueue.errors import InvalidRequest

#: Reference that is the base revision's own operator.
BASE: Final = "base"
#: Names of packages that a tree cannot have: the judge has its own, or calls the adapter's module like this.
_TAKEN: Final = sys.stdlib_module_names | {"kernel", "kqueue", "migrations", "numpy", "torch", "triton", "workers"}
_ENTRY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_MOST_OPERATORS: Final = 200
_MOST_BYTES: Final = 1 << 20
#: Largest size of a dimension.
_MOST_SIZE: Final = 1 << 31


def _expression(value: Any) -> Any:
    """Check that a text is one expression of Python."""
    if isinstance(value, str):
        try:
            ast.parse(value.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"is no expression of Python ({error})") from None
        if "\n" in value.strip():
            raise ValueError("is an expression of one line")
    return value


def _name(value: Any) -> Any:
    """Check that a text is a name of Python that the sources do not use otherwise."""
    if isinstance(value, str) and (not value.isidentifier() or value in ("entry", "self", "torch")):
        raise ValueError(f"{value!r} is no name for an input or a size")
    return value


_Size = Annotated[int, Field(ge=0, le=_MOST_SIZE)]
_Name = Annotated[str, BeforeValidator(_name)]
_Expression = Annotated[str, BeforeValidator(_expression), Field(min_length=1, max_length=1000)]
_Dimension = _Name | _Size
_Entry = Annotated[str, Field(pattern=f"^{_ENTRY.pattern}$")]
_Word = Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\x00\r\n]+$")]


class Operator(BaseModel):
    """One operator."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    name: Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[\w.+-]+$")]
    entry: _Entry = Field(alias="import")
    call: _Expression | None = None
    reference: Annotated[str, Field(min_length=1, max_length=200)] = BASE
    reference_call: _Expression | None = None
    inputs: dict[_Name, list[_Dimension] | _Expression] = {}
    init: dict[_Name, _Dimension | float | bool | _Expression] = {}
    shapes: Annotated[list[dict[_Name, _Size | tuple[_Size, _Size]]], Field(min_length=1, max_length=32)] = [{}]
    dtypes: Annotated[list[Precision], Field(min_length=1)] = [Precision.FP32]
    tolerance: Tolerance | None = None
    backend: str | None = None
    gradients: bool = False
    slower: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The part by which head can be slower than base."""

    @model_validator(mode="after")
    def _fits_together(self) -> Operator:
        if not self.inputs and not self.reference_file:
            raise ValueError("inputs: give the tensors that it takes")
        for shape in self.shapes:
            known = {*shape}
            for dimensions in self.inputs.values():
                names = {one for one in dimensions if isinstance(one, str)} if isinstance(dimensions, list) else set()
                if unknown := sorted(names - known):
                    raise ValueError(f"shapes: {shape} has no size {unknown[0]}")
            for name, size in shape.items():
                if isinstance(size, tuple) and size[0] > size[1]:
                    raise ValueError(f"shapes: {name}: the range {list(size)} is empty")
        if not (self.reference == BASE or self.reference_file or _ENTRY.fullmatch(self.reference)):
            raise ValueError("reference: give `base`, `package.module:function`, or a file `.py` with the class Model")
        return self

    @property
    def reference_file(self) -> str:
        """The path of the file with the reference, or nothing."""
        return self.reference if self.reference.endswith(".py") else ""

    def cases(self) -> Iterator[Case]:
        """Yield each shape in each dtype. A range gives a random size. Small sizes are as likely as large ones."""
        for shape in self.shapes:
            sizes = {name: _drawn(*size) if isinstance(size, tuple) else size for name, size in shape.items()}
            for dtype in self.dtypes:
                yield Case(self, shape, sizes, dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of an operator in one dtype."""

    operator: Operator
    given: Mapping[str, int | tuple[int, int]]
    sizes: Mapping[str, int]
    dtype: Precision

    @property
    def shape(self) -> str:
        """The sizes and ranges that are given, in words."""
        return listed(self.given)

    @property
    def drawn(self) -> str:
        """The sizes that were drawn from ranges, in words."""
        return listed({name: size for name, size in self.sizes.items() if self.given[name] != size})


def listed(sizes: Mapping[str, int | tuple[int, int]]) -> str:
    """Return sizes and ranges in words."""
    return ", ".join(f"{name}={'..'.join(map(str, size)) if isinstance(size, tuple) else size}"
                     for name, size in sizes.items())  # fmt: skip


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    root: Annotated[str, Field(pattern=r"^([\w-][\w.-]*(/[\w-][\w.-]*)*)?$")] = ""
    build: Annotated[tuple[_Word, ...], Field(max_length=100)] = ()
    operator: Annotated[list[Operator], Field(min_length=1, max_length=_MOST_OPERATORS)]


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of a revision by name, the folder where their imports begin, and the command that builds them."""

    root: str
    by_name: Mapping[str, Operator]
    build: tuple[str, ...] = ()


def read(path: Path, shown: str) -> Operators:
    """Return the operators that a file lists. ``shown`` names it in errors. Raise InvalidRequest if it is malformed."""
    listed: dict[str, Any] = {}
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidRequest(f"{shown}: at most {_MOST_BYTES >> 20} MiB are read")
        listed = tomllib.loads(path.read_text(encoding="utf-8"))
        given = _File.model_validate(listed)
    except OSError as error:
        advice = "list the operators there (docs/check.md) and commit it, or give an absolute path to --config"
        raise InvalidRequest(f"{shown}: {error.strerror}: {advice}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{shown}: no TOML: {error}") from None
    except ValidationError as error:
        # Of the forms of a value, the message of the one that is wrong in itself says most.
        fault = min(error.errors(), key=lambda fault: fault["type"] != "value_error")
        parts = [str(part + 1) if isinstance(part, int) else part for part in fault["loc"]]
        is_known = parts[0] == "operator" and len(parts) > 1
        if is_known and isinstance(one := listed["operator"][int(parts[1]) - 1], dict):
            parts[:2] = [str(one.get("name", f"operator {parts[1]}"))]
        where = ".".join([*parts[:1], *(part for part in parts[1:] if part.isidentifier() or part.isdigit())])
        words = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            kinds: tuple[type[BaseModel], ...] = (_File, Operator, Tolerance)
            known = [one.alias or name for kind in kinds for name, one in kind.model_fields.items()]
            meant = get_close_matches(parts[-1], known, 1)
            where, words = ".".join(parts[:-1]), f"unknown key `{parts[-1]}`"
            words += f": did you mean `{meant[0]}`?" if meant else ""
        raise InvalidRequest(": ".join(filter(None, (shown, where, words)))) from None
    by_name = {one.name: one for one in given.operator}
    if len(by_name) < len(given.operator):
        names = [one.name for one in given.operator]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"{shown}: two operators are called {twice}")
    for one in given.operator:
        if (package := re.split("[.:]", one.entry)[0]) in _TAKEN:
            raise InvalidRequest(f"{shown}: {one.name}: the judge has its own module {package}: give another name")
    return Operators(given.root.strip("/"), by_name, given.build)


def file_of(module: str, files: frozenset[str], root: str) -> str | None:
    """Return the path of a module's file, if it is one of a tree's files."""
    path = PurePosixPath(root, *module.split("."))
    for each in (f"{path}.py", f"{path}/__init__.py", *sorted(one for one in files if one.startswith(f"{path}."))):
        if each in files:
            return each
    return None


def problem_of(case: Case, line: str, reference: str) -> str:
    """Return the source of the problem. ``line`` names the tree of the reference, and ``reference`` is its file.

    The reference is imported when the model is constructed, because a tool that examines a kernel imports the problem
    into the kernel's process.
    """
    operator = case.operator
    sizes = "".join(f"{name} = {size}\n" for name, size in case.sizes.items())
    inputs = [_input(one) for one in operator.inputs.values()]
    init = ", ".join(f"{name!r}: {value}" for name, value in operator.init.items())
    makers = f"def get_inputs():\n    return [{', '.join(inputs)}]\n\n\ndef get_init_inputs():\n    return {{{init}}}\n"
    if operator.reference_file:
        makers = "" if re.search(r"^def get_inputs\b", reference, re.MULTILINE) else f"\n\n{sizes}\n\n{makers}"
        return f"{line}{reference.rstrip()}\n{makers}"
    entry = operator.entry if operator.reference == BASE else operator.reference
    call = operator.call if operator.reference == BASE else operator.reference_call
    model = _model("Model", operator, call, f"        {_import(entry)}\n")
    return f"{line}import torch\n\n{sizes}\n\n{makers}\n\n{model}"


def kernel_of(operator: Operator, line: str) -> str:
    """Return the source of the kernel: an adapter of the operator in the tree that ``line`` names."""
    return f"{line}import torch\n{_import(operator.entry)}\n\n\n{_model('ModelNew', operator, operator.call)}"


def _model(name: str, operator: Operator, call: str | None, imports: str = "") -> str:
    taken = ", ".join(operator.inputs)
    parameters = f"self, {taken}" if taken else "self, *inputs"
    return f"""class {name}(torch.nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
{imports}        self.entry = entry(*args, **kwargs) if isinstance(entry, type) else entry

    def forward({parameters}):
        entry = self.entry
        return {call or f"entry({taken or '*inputs'})"}
"""


def _import(entry: str) -> str:
    module, _, name = entry.partition(":")
    return f"from {module} import {name} as entry"


def _input(given: list[str | int] | str) -> str:
    return given if isinstance(given, str) else f"torch.randn({', '.join(map(str, given)) or '()'})"


def _drawn(low: int, high: int) -> int:
    number = random.SystemRandom().uniform(math.log(low + 1), math.log(high + 2))
    return min(high, max(low, int(math.exp(number)) - 1))
