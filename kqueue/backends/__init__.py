"""Backends: the languages and libraries of kernels, with one file for each.

An installed package registers one by an entry point in the group ``kqueue.backends``. Its name is the backend's, and it
refers to a :class:`Backend`::

    [project.entry-points."kqueue.backends"]
    mylang = "my_package.kqueue_backend:MYLANG"

Clients, services and judges load the description, so its module imports nothing but this one. A description helps to
judge honest kernels. Nothing that protects the judge depends on it, because any source can be submitted as any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from kqueue.registry import entries

GROUP: Final = "kqueue.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A language or library of kernels.

    Attributes:
        name: name in requests, such as ``triton``.
        description: a few words for people.
        modules: modules that a kernel imports, such as ``cuda.tile``. An import of one shows the backend, and a worker
            without one cannot judge it.
        distributions: packages of which one brings the modules, for the doctor.
        install: the package to install. ``{cuda}`` stands for CUDA's major version.
        words: expression that matches names of arguments and texts, such as file names, that show the backend.
        includes: backends whose signs mean nothing in a source that shows this one.
        extensions: True if torch's extension builder compiles the sources.
        compilers: programs that it needs, of ``c++``, ``nvcc`` and ``tileiras``.
        triton: True if Triton compiles its kernels. The ``cpu`` lane interprets them.
        cpu: True if the ``cpu`` lane can judge it.
        own_kernels: False if all GPU work of an honest kernel can be a library's. Otherwise it is a decoy.
        kernel_decorators: last parts of the names of decorators that make a GPU kernel of a function.
        kernel_wrappers: the same for functions that make one of their first argument.
        kernel_namers: the same for functions that take the kernel's name, with its position and the default name.
        kernel_names: expressions that match a kernel's name on the GPU. Their group ``name`` is its name in the source.
            The same name always matches.
        library: expression that matches the names of the library's own GPU kernels from their beginning.
        compile_errors: qualified names of exceptions, or of their base classes, that mean that compilation failed.
        resource_errors: the same for launches that exceed the GPU's resources.
        memory_errors: the same for exhausted GPU memory.
        caches: environment variables that name directories of caches.
        environment: environment variables of sealed processes, with their values.
        prepare: function that a sealed process calls with the first module and torch once the source is imported, if
            that module is loaded.
    """

    name: str
    description: str
    modules: tuple[str, ...] = ()
    distributions: tuple[str, ...] = ()
    install: str = ""
    words: str = ""
    includes: tuple[str, ...] = ()
    extensions: bool = False
    compilers: tuple[str, ...] = ()
    triton: bool = False
    cpu: bool = False
    own_kernels: bool = True
    kernel_decorators: tuple[str, ...] = ()
    kernel_wrappers: tuple[str, ...] = ()
    kernel_namers: tuple[tuple[str, int, str], ...] = ()
    kernel_names: tuple[str, ...] = ()
    library: str = ""
    compile_errors: tuple[str, ...] = ()
    resource_errors: tuple[str, ...] = ()
    memory_errors: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[Any, Any], None] | None = None


#: Not a kernel's backend but a repository's tests, which replace the problem. ``kqueue pytest --fleet`` submits them.
TESTS: Final = Backend(name="pytest", description="a repository's tests", modules=("pytest",), cpu=True)
PYTEST: Final = TESTS.name


@cache
def registered() -> Mapping[str, Backend]:
    """Return the backends by name in alphabetical order. Raise ConfigError if one cannot be used, or there is none."""
    return entries(GROUP, Backend, PYTEST)


def installed(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def find(name: str) -> Backend:
    """Return the backend with this name, or :data:`TESTS`. Raise KeyError if there is none."""
    return TESTS if name == PYTEST else registered()[name]


def names() -> list[str]:
    """Return the names that a request can have: the backends of kernels, and ``pytest``."""
    return [*registered(), PYTEST]


def on_cpu() -> list[str]:
    """Return the names of the backends of kernels that the ``cpu`` lane can judge."""
    return [backend.name for backend in registered().values() if backend.cpu]


class Known:
    """Annotation of a text that must be the name of a backend or ``pytest``.

    The registry is read when the first value is validated, because a client does not need it to start.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Return the validation of a name."""
        return core_schema.no_info_plain_validator_function(_known)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of the names."""
        return {"type": "string", "enum": names()}


def _known(value: Any) -> str:
    if isinstance(value, str) and (value == PYTEST or value in registered()):
        return value
    *first, last = (f"'{name}'" for name in names())
    raise PydanticCustomError("enum", "Input should be {expected}", {"expected": f"{', '.join(first)} or {last}"})
