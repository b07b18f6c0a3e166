"""The corpus of hostile problems: one small program for each known way to misuse the role of a reference.

Each is in a file under ``hostile/``, and ``compose.py`` completes it to a problem. Its docstring describes the attempt
and its result. A program whose attempt succeeds raises an exception with :data:`SUCCEEDED`, and ends differently from
the expectation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kqueue.categories import Category
from kqueue.contract import Deadlines, Limits, Request, Settings, Timing
from tests.integrity.compose import compose, programs_of

HERE: Final = Path(__file__).resolve().parent / "hostile"
#: The text of each program, by its file and name.
TEXTS: Final = {f"{file.stem}/{name}": text for file in HERE.glob("*.py") for name, text in programs_of(file).items()}
#: Secret that programs search for and must not find, in the judge's environment and in a world-readable file.
SECRET: Final = "secret-of-the-fleet"
#: Message of programs whose attempt succeeded.
SUCCEEDED: Final = "ATTACK SUCCEEDED"

#: Right for every problem of the corpus.
KERNEL: Final = """
# THIS-IS-THE-KERNELS-SOURCE
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, *args):
        super().__init__()
    def forward(self, x, *others):
        return x * 2 + 1
"""
HONEST: Final = compose("", "problem")

_PASSED: Final = Category.PASSED
_INVALID: Final = Category.INVALID_PROBLEM
_ERROR: Final = Category.REFERENCE_ERROR
_LATE: Final = Category.REFERENCE_TIMEOUT


@dataclass(frozen=True, slots=True)
class Outside:
    """Targets on the host: a world-writable folder with a file and a socket, and a loopback port."""

    directory: Path
    port: int

    def named_in(self, program: str) -> str:
        """Return a program with these values for the placeholders in its file."""
        return program.replace("/tmp/kqueue-outside", str(self.directory)).replace("28188", str(self.port))


@dataclass(frozen=True, slots=True)
class Hostile:
    """One hostile problem, named by its file and name, such as ``reach/files``, and the categories that are right.

    A second evaluation can find the first one's reference kept: ``again`` has its categories if they differ, and
    ``replaced`` requires that the reference is replaced then.
    """

    name: str
    expected: frozenset[Category]
    again: frozenset[Category] | None = None
    replaced: bool = False
    timed: bool = False
    reference_s: float = 30.0

    @property
    def path(self) -> Path:
        """Return the file that holds it."""
        return HERE / f"{self.name.partition('/')[0]}.py"

    @property
    def mechanism(self) -> str:
        """Return its docstring: the attempt and its result."""
        return ast.get_docstring(ast.parse(TEXTS[self.name])) or ""

    def source(self) -> str:
        """Return the whole program, completed by the shared parts of a problem."""
        return compose(TEXTS[self.name], "problem")

    def request(self, outside: Outside) -> Request:
        """Return a request for a right kernel with limits that are soon reached."""
        return request(outside.named_in(self.source()), timed=self.timed, reference_s=self.reference_s)


def request(problem: str, *, timed: bool = False, reference_s: float = 30.0) -> Request:
    """Return a request to judge the corpus's kernel against a problem."""
    settings = Settings(
        checks=2,
        timing=Timing(calls=5, warmup=0) if timed else Timing().off(),
        deadlines=Deadlines(reference_s=reference_s, load_s=20, compile_s=3, construct_s=20, check_s=20, time_s=5),
        limits=Limits(
            host_memory_bytes=256 << 20, output_bytes=1 << 20, processes=64, file_bytes=64 << 20, scratch_bytes=16 << 20
        ),
    )
    return Request(problem=problem, kernel=KERNEL, backend="torch", lane="cpu", settings=settings)


def _rows(folder: str, expected: Category | set[Category], *names: str, **more: Any) -> Iterator[Hostile]:
    categories = frozenset({expected} if isinstance(expected, Category) else expected)
    for name in names:
        yield Hostile(f"{folder}/{name}", categories, **more)


def problems() -> list[Hostile]:
    """Return the corpus."""
    reach = "files environment proc descriptors sockets database signals kernel_source neighbours_files"
    made = "shapes_change dtypes_change scalars_change count_changes structure_changes answers_change nan elsewhere"
    made += " nothing odd_dtype huge_structure subclass reducer million_scalars long_string"
    told = "garbage pickle other_order closed descriptors exports endless_shape large_shape"
    scalar_page = "garbage deep bytes tensors collisions unhashable integer no_arguments"
    full = "memory_of_children memory_without_a_name output disk disk_one_file disk_in_the_deep"
    ends = "segfault_at_import abort_in_initial exit_in_inputs system_exit_in_constructor interrupt_in_forward hangup"
    late = "import_sleeps initial_holds_the_interpreter constructor_stops inputs_spin forward_sleeps as_compilation"
    return [
        *_rows("reach", _PASSED, *reach.split(), "shared_memory"),
        *_rows("resources", _PASSED, "daemon"),
        *_rows("resources", {_PASSED, _ERROR}, "fork_bomb"),
        *_rows("resources", _ERROR, *full.split(), "disk_without_a_name", "descriptors"),
        *_rows("overruns", _LATE, *late.split(), "unprintable", "check_spins", reference_s=3),
        *_rows("overruns", _LATE, "forward_when_timed", timed=True, reference_s=8),
        *_rows("deaths", _ERROR, *ends.split(), "claims_gpu_memory", "unfit_words", "speaks_for_the_seal"),
        *_rows("deaths", _PASSED, "looks_killed", "raises_when_collected"),
        *_rows("deaths", _INVALID, "names_itself_the_harness"),
        *_rows("answers", _INVALID, *made.split(), "recursion", "large_tensors", "no_list"),
        *_rows("answers", _ERROR, "long_integer", "large"),
        *_rows("answers", _INVALID, "recursive_structure"),
        *_rows("answers", _PASSED, "strange_layouts"),
        *_rows("words", _ERROR, *told.split(), *(f"sheet_{name}" for name in scalar_page.split())),
        *_rows("words", _INVALID, "negative_shape", "sheet_places", "sheet_places_beyond", "sheet_objects"),
        *_rows("words", _PASSED, "shrinks_memory", "lies_about_the_call"),
        *_rows("words", {_ERROR, _INVALID}, "twice"),
        *_rows("words", {_PASSED, _ERROR, _INVALID}, "sheet_changes"),
        *_rows("words", {_PASSED, _ERROR, _INVALID, Category.WRONG_VALUES, Category.NONDETERMINISTIC}, "late_writer"),
        *_rows("kept", _PASSED, "state", "patched_libraries", "patched_harness", replaced=True),
        *_rows("kept", _PASSED, "stops", "speaks_ahead", "hangs", "random", replaced=True),
        *_rows("kept", _PASSED, "default_dtype", "handlers", "busy_thread", "dies", "does_not_rest"),
        *_rows("kept", _PASSED, "lies_later", again=frozenset({_INVALID})),
    ]
