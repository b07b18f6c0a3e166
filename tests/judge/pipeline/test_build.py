"""A separate process compiles extensions, and its libraries, local or in the store, harm no other kernel."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kqueue.categories import Category
from kqueue.contract import Deadlines, Limits, Outcome, Phase, Request
from kqueue.trees import pack
from tests.judge.extension import OTHER, PROBLEM, QUICK, TELL, judge, kernel, told
from tests.judge.rig import Rig
from tests.waiting import until
from workers.judge.candidate import libraries
from workers.judge.forkserver import builds
from workers.judge.host.artifacts import Entry
from workers.judge.pipeline import build
from workers.judge.sandbox import shelf

pytestmark = pytest.mark.slow("compiles C++")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kqueue-builds-") as slot:
        yield Path(slot) / "builds"


@pytest.fixture(scope="module")
def rig(judge_environment: None, folder: Path) -> Iterator[Rig]:
    with Rig(builds=folder) as rig:
        assert rig.forkserver.builds is not None
        yield rig


@pytest.fixture(autouse=True)
def _empty_store(folder: Path) -> None:
    for path in folder.glob("*"):
        path.unlink()


def where(outcome: Outcome) -> tuple[Category, str]:
    """Return the category and the origin of the kernel's libraries."""
    return outcome.category, outcome.evidence.build.where


FROM_BUILDER, FROM_STORE = (Category.PASSED, "builder"), (Category.PASSED, "store")
REFUSED_OTHER = """
try:
    build(SOURCE + "no c++ at all;", "other")
except Exception:
    pass
"""


def test_a_builder_compiles_a_source_once(rig: Rig, folder: Path) -> None:
    source = kernel(top=REFUSED_OTHER, after=TELL)
    first, second = judge(rig, source), judge(rig, source)
    assert (where(first), where(second)) == (FROM_BUILDER, FROM_STORE), second
    key, peak_bytes = first.evidence.build.key, first.evidence.build.peak_bytes
    assert first.evidence.build.libraries == 1
    assert second.evidence.build.model_dump() | {"seconds": 0} == {
        "where": "store", "libraries": 1, "seconds": 0, "peak_bytes": peak_bytes,
        "earlier_seconds": first.evidence.build.seconds, "key": key,
    }  # fmt: skip
    [builder], [candidate] = told(first, "builder"), told(first, "candidate")
    assert builder.startswith("1 compiled")
    assert builder.endswith("GPU ''")
    assert candidate.startswith("0 compiled")
    assert told(second, "candidate")[0].startswith("0 compiled")
    if rig.slot.uid is not None:
        assert f"uid {rig.slot.uid}," in candidate
        assert f"uid {rig.slot.uid}," not in builder
    assert {"builder", "candidate"} <= set(first.evidence.cpu_s or {})
    assert [path.name for path in folder.iterdir()] == [key]
    assert folder.stat().st_mode & 0o777 == 0o700
    until(lambda: not list(rig.slot.scratch.iterdir()))


TREE_KERNEL = """import torch
import mine{number}
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x * 2
"""


def test_the_build_of_a_tree_serves_all_its_sources(rig: Rig, folder: Path, tmp_path: Path) -> None:
    """It is kept by the tree and the command, with its refusal. A source's own failure is not kept for others."""
    (tmp_path / "a").write_text("")
    tree, store = pack(tmp_path), rig.forkserver.builds
    assert store is not None

    def judged(number: int, build: str) -> Outcome:
        source = tree.line(build=["sh", "-c", build]) + TREE_KERNEL.format(number=number)
        return rig.judge(Request(problem=PROBLEM, kernel=source, trees=[tree.text], backend="torch", settings=QUICK))

    build = 'touch mine1.py; echo \'import torch.utils.cpp_extension as e; e.load("x", ["/gone"])\' > mine2.py'
    first, second = judged(1, build), judged(2, build)
    assert (where(first), where(second)) == (FROM_BUILDER, (Category.COMPILE_ERROR, "store"))
    assert store.get(first.evidence.build.key).header.libraries[0].name == shelf.TREE
    refused = judged(1, "echo 'a.cu:1:2: error: no'; exit 1").message
    entries = (store.get(path.name) for path in folder.iterdir())
    assert [entry.header.refusal.message for entry in entries if entry.header.refusal] == [refused]
    assert refused.startswith("no\n")


SETUP = """from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension
setup(name="two", ext_modules=[CppExtension("mine._C", ["c/two.cpp"])], cmdclass={"build_ext": BuildExtension})
"""
TWO = """#include <Python.h>
static PyObject* number(PyObject*, PyObject*) { return PyLong_FromLong(2); }
static PyMethodDef methods[] = {{"number", number, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "", -1, methods};
extern "C" PyObject* PyInit__C() { return PyModule_Create(&definition); }
"""


@pytest.mark.nightly
def test_an_extension_of_setup_py(rig: Rig, tmp_path: Path) -> None:
    """`setup.py build_ext --inplace` builds the C++ extension of a package."""
    [(tmp_path / name).mkdir() for name in ("c", "mine")]
    for name, text in {"setup.py": SETUP, "c/two.cpp": TWO, "mine/__init__.py": ""}.items():
        (tmp_path / name).write_text(text)
    tree = pack(tmp_path)
    kernel = TREE_KERNEL.format(number="._C").replace("x * 2", "x * mine._C.number()")
    source = tree.line(build=["python", "setup.py", "build_ext", "--inplace"]) + kernel
    outcome = rig.judge(Request(problem=PROBLEM, kernel=source, trees=[tree.text], backend="torch", settings=QUICK))
    assert where(outcome) == FROM_BUILDER, outcome


@pytest.mark.nightly
def test_a_version_of_the_same_name_keeps_its_own_library(rig: Rig) -> None:
    second = (
        "first = numbers; numbers = build(SOURCE.replace('(2)', '(3)').replace('PyInit_numbers', 'PyInit_numbers_v1'))"
    )
    body = "assert (first.number(), numbers.number()) == (2, 3); numbers = first"
    outcome = judge(rig, kernel(after=f"{second}\n{body}\n{TELL}"))
    assert where(outcome) == FROM_BUILDER, outcome
    assert outcome.evidence.build.libraries == 2
    assert told(outcome, "candidate")[0].startswith("0 compiled")


# Refusals ------------------------------------------------------------------------------------------------

REFUSED = "print(WHO, flush=True); SOURCE += 'no c++ at all;'; build(SOURCE)"
COMPILER = """
Path("compiler").write_text('''#!/bin/sh
case "$*" in *-dump*|*--version*|*-v) exec c++ "$@";; esac
{does}
''')
Path("compiler").chmod(0o700)
os.environ["CXX"] = str(Path("compiler").absolute())
"""


def test_a_compiler_s_refusal_is_final(rig: Rig) -> None:
    first, second = judge(rig, kernel(top=REFUSED)), judge(rig, kernel(top=REFUSED))
    assert (second.category, second.phase) == (Category.COMPILE_ERROR, Phase.LOAD)
    assert (second.phase, second.message, second.facts) == (first.phase, first.message, first.facts)
    assert "does not name a type" in first.message + first.log
    for outcome in (first, second):
        assert "builder" in outcome.log.splitlines()
        assert "candidate" not in outcome.log.splitlines()
    assert first.evidence.build is None
    assert (second.evidence.build.where, second.evidence.build.libraries) == ("store", 0)


def test_a_refusal_for_want_of_resources_is_not_kept(rig: Rig, folder: Path) -> None:
    for said, lasting in (
        ("a.cpp:1:2: error: no", True),
        ("a.cpp:1:2: error: no\nc++: fatal error: Killed signal terminated program cc1plus", False),
        ("a.cpp:1:2: fatal error: error writing to /tmp/a.s: No space left on device", False),
        ("a.cpp:1:2: error: virtual memory exhausted: Cannot allocate memory", False),
        ("c++: error: fork: Resource temporarily unavailable", False),
        ("", False),
    ):
        assert libraries.is_lasting(said) is lasting, said
    killed = (
        "echo 'a.cpp:1:2: error: no'; echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1"
    )
    assert judge(rig, kernel(top=COMPILER.format(does=killed))).category is Category.COMPILE_ERROR
    assert list(folder.iterdir()) == []


def test_a_builder_s_timeout_and_its_limits_are_not_kept(rig: Rig, folder: Path) -> None:
    settings = QUICK.model_copy(update={"deadlines": Deadlines(compile_s=1)})
    outcome = judge(rig, kernel(top=COMPILER.format(does="sleep 100")), settings)
    assert (outcome.category, outcome.phase) == (Category.COMPILE_TIMEOUT, Phase.COMPILE)
    greedy = "if WHO == 'builder':\n    everything = bytearray(b'x') * (1 << 30); time.sleep(10)"
    settings = QUICK.model_copy(update={"limits": Limits(host_memory_bytes=700 << 20)})
    assert judge(rig, kernel(after=greedy), settings).evidence.build.skipped is not None
    assert list(folder.iterdir()) == []


def test_a_failure_of_the_builder_alone_is_left_to_the_candidate(rig: Rig) -> None:
    outcome = judge(rig, kernel(top="if WHO == 'builder': raise RuntimeError('not here')", after=TELL))
    assert where(outcome) == (Category.PASSED, "candidate"), outcome
    assert "not here" in outcome.evidence.build.skipped
    assert told(outcome, "candidate")[0].startswith("1 compiled")
    fails = "import subprocess\nif WHO == 'builder': subprocess.Popen(['sleep', '100']); raise RuntimeError('not here')"
    first, second = judge(rig, kernel(after=fails)), judge(rig, kernel(after=fails))
    assert (where(first), where(second)) == (FROM_BUILDER, FROM_STORE), second
    assert first.evidence.build.skipped == second.evidence.build.skipped
    assert "not here" in (second.evidence.build.skipped or "")


class _BuildBesideGpu(build.Build):
    def __init__(self, *given: Any) -> None:
        *given, asked = given
        super().__init__(*given, replace(asked, on_gpu=not asked.on_gpu))


ASKED_TWICE = """
os.environ["CXX"] = str(Path("compiler").absolute())
Path("compiler").write_text('''#!/bin/sh
case "$*" in *" -c "*) echo ran >> $HOME/ran;; esac
exec c++ "$@"
''')
Path("compiler").chmod(0o700)
try:
    build(SOURCE + "no c++ at all;", "other")
except Exception as error:
    ran = Path(os.environ["HOME"], "ran")
    print(f"{WHO}: {ran.exists()} {'does not name a type' in str(error)}", flush=True)
"""


@pytest.mark.nightly
def test_beside_a_gpu_only_the_candidate_s_compiler_refuses(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_architectures", lambda: "9.0+PTX")
    monkeypatch.setattr(build, "Build", _BuildBesideGpu)
    outcome = judge(rig, kernel(top="if WHO == 'builder': build(SOURCE + 'no c++ at all;')", after=TELL))
    assert outcome.category is Category.PASSED, outcome
    assert "does not name a type" in outcome.evidence.build.skipped
    assert told(outcome, "candidate")[0].startswith("1 compiled")
    refused = judge(rig, kernel(top=REFUSED))
    assert (refused.category, refused.phase) == (Category.COMPILE_ERROR, Phase.LOAD)
    assert "candidate" in refused.log.splitlines()
    outcome = judge(rig, kernel(top=ASKED_TWICE))
    assert outcome.category is Category.PASSED, outcome
    assert (told(outcome, "builder"), told(outcome, "candidate")) == (["True True"], ["False True"])


# Attacks -------------------------------------------------------------------------------------------------

WRITE = """
if WHO == "candidate":
    library = Path(numbers.__file__)
    for name, attempt in {
        "chmod": lambda: library.chmod(0o777),
        "overwrite": lambda: library.write_bytes(b""),
        "unlink": library.unlink,
        "beside": lambda: (library.parent / "more.so").write_bytes(b""),
        "key": lambda: (library.parents[1] / ("0" * 64)).mkdir(),
        "rename": lambda: library.rename(library.with_name("gone")),
        "link": lambda: os.link("library.cpp", library.with_name("linked.so")),
        "symlink": lambda: library.with_name("symlinked.so").symlink_to("/etc/passwd"),
    }.items():
        try:
            attempt()
        except OSError:
            continue
        print(f"{WHO}: {name} worked", flush=True)
    print(f"{WHO}: tried", flush=True)
"""


def test_the_candidate_cannot_write_where_the_libraries_lie(rig: Rig) -> None:
    if rig.slot.uid is None and rig.forkserver.isolation["files"] is not True:
        pytest.skip("without uid or Landlock nothing keeps it from its own libraries")
    outcome = judge(rig, kernel(after=WRITE))
    assert outcome.category is Category.PASSED, outcome
    # The owner of a file can change its mode, which Landlock does not control. That gives no access.
    harmless = ["chmod worked"] if rig.slot.uid is None else []
    assert told(outcome, "candidate") == [*harmless, "tried"]


def test_a_builder_that_plants_a_library_harms_its_own_source_alone(rig: Rig) -> None:
    swap = 'if WHO == "builder": (made() / "numbers.so").write_bytes(other_library(7).read_bytes())'
    for slot in ("builder", "store"):
        assert where(judge(rig, kernel(top=OTHER, after=swap))) == (Category.WRONG_VALUES, slot)
    assert where(judge(rig, kernel())) == FROM_BUILDER
    assert where(judge(rig, kernel(after="# another"))) == FROM_BUILDER


PLANT = """
if WHO == "builder":
    for i, plant in enumerate([
        lambda at: at.symlink_to("/etc"),
        lambda at: (at.mkdir(), (at / "passwd.so").symlink_to("/etc/passwd")),
        lambda at: (at.mkdir(), os.truncate(os.open(at / "huge.so", os.O_CREAT | os.O_RDWR), 1 << 30)),
        lambda at: (at.mkdir(), os.mkfifo(at / "pipe.so")),
        lambda at: (at.mkdir(), (at / "a.so").write_bytes(b"a"), os.link(at / "a.so", "elsewhere")),
        lambda at: (at.mkdir(), (at / "a.txt").write_bytes(b"a")),
        lambda at: at.write_bytes(b"a"),
    ]):
        plant(Path("made", f"{i:064x}"))
    Path("made/not-a-key").mkdir()
    Path("made/not-a-key/a.so").write_bytes(b"a")
else:
    print(f"{WHO}: {len(list(Path(numbers.__file__).parents[1].rglob('*.so')))} found", flush=True)
"""


def test_links_pipes_and_giants_of_a_builder_are_left_behind(rig: Rig, folder: Path) -> None:
    outcome = judge(rig, kernel(after=PLANT))
    assert outcome.category is Category.PASSED, outcome
    assert outcome.evidence.build.libraries == 1
    assert told(outcome, "candidate") == ["1 found"]
    [path] = folder.iterdir()
    assert [found.name for found in Entry.unpack(path.read_bytes(), path.name).header.libraries] == ["numbers.so"]


LATE = """
if WHO == "builder" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        (made() / "numbers.so").write_bytes(b"late")
        time.sleep(100)
    os._exit(0)
"""


@pytest.mark.nightly
def test_a_daemon_of_the_builder_is_a_violation(rig: Rig, folder: Path) -> None:
    outcome = judge(rig, kernel(after=LATE))
    assert (outcome.category, outcome.facts.leftovers) == (Category.SANDBOX_VIOLATION, 1)
    assert list(folder.iterdir()) == []


REACH = """
store, key = Path({store!r}), {key!r}
for name, attempt in {{
    "list": lambda: list(os.scandir(store)),
    "parent": lambda: list(os.scandir(store.parent)),
    "stat": lambda: (store / key).stat(),
    "read": lambda: (store / key).read_bytes(),
    "write": lambda: (store / ("0" * 64)).write_bytes(b""),
    "replace": lambda: os.rename("library.cpp", store / key),
    "unlink": lambda: (store / key).unlink(),
    "touch": lambda: os.utime(store / key),
    "link": lambda: os.link(store / key, "linked"),
    "symlink": lambda: (os.symlink(store / key, "symlinked"), Path("symlinked").read_bytes()),
    "chmod": lambda: store.chmod(0o777),
    "mkdir": lambda: store.mkdir(parents=True),
    "root": lambda: Path("/proc/1/root" + str(store / key)).read_bytes(),
    "judge": lambda: Path(f"/proc/{{os.getppid()}}/root" + str(store / key)).read_bytes(),
    "shell": lambda: __import__("subprocess").check_output(["cat", str(store / key)]),
}}.items():
    try:
        attempt()
    except Exception:
        continue
    print(f"{{WHO}}: {{name}} worked", flush=True)
print(f"{{WHO}}: tried", flush=True)
"""


def test_no_sealed_process_reaches_the_store(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    if rig.slot.uid is None:
        pytest.skip("without a uid of their own such a folder is no store")
    with tempfile.TemporaryDirectory(dir=sys.prefix) as slot:
        folder = Path(slot, "builds")
        Path(slot).chmod(0o755)
        inside = replace(rig.slot, build_store=str(folder))
        monkeypatch.setattr(rig.forkserver, "builds", builds.open_store(inside, rig.forkserver.isolation, os.environ))
        key = judge(rig, kernel()).evidence.build.key

        def entries() -> dict[str, tuple[int, bytes]]:
            return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}

        before = entries()
        outcome = judge(rig, kernel(after=REACH.format(store=str(folder), key=key)))
        assert outcome.category is Category.PASSED, outcome
        for who in ("builder", "candidate"):
            lines = told(outcome, who)
            assert lines[-1] == "tried"
            assert set(lines[:-1]) <= {"mkdir worked", "parent worked"}, lines
        after = entries()
        assert {name: after[name] for name in before} == before
        assert len(after) == len(before) + 1


# Unit tests ----------------------------------------------------------------------------------------------


def test_a_key_is_the_request_without_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def key(slot: str, content: str = "int a;", flags: tuple[str, ...] = ("-O2",), verbose: bool = False) -> str:
        scratch = tmp_path / slot
        scratch.mkdir(exist_ok=True)
        source = scratch / "main.cpp"
        source.write_text(content)
        asked = ("name", [str(source)], [*flags, f"-I{scratch}"], None, None, None, None, str(scratch))
        more = {"verbose": verbose, "with_cuda": None, "with_sycl": None, "is_python_module": True}
        return libraries.key(libraries.builder()._jit_compile, asked, more | {"is_standalone": False}, scratch)

    assert key("a") == key("b") == key("c", verbose=True)
    keys = {key("a"), key("a", "int b;"), key("a", flags=("-O3",))}
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert len(keys | {key("a")}) == 4


def test_beside_a_gpu_the_builder_names_it_and_admits_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    with libraries.Keeper(tmp_path, "9.0+PTX", lambda: None).installed():
        flags = libraries.builder()._get_cuda_arch_flags()
        assert "TORCH_CUDA_ARCH_LIST" not in os.environ
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
        own = libraries.builder()._get_cuda_arch_flags()
        for ask in (torch.cuda.is_available, torch.cuda.get_device_capability, torch.cuda.device_count):
            with pytest.raises(libraries.LeftToCandidateError):
                ask()
    assert flags == ["-gencode=arch=compute_90,code=compute_90", "-gencode=arch=compute_90,code=sm_90"]
    assert own == ["-gencode=arch=compute_80,code=sm_80"]


def test_a_lock_that_no_process_holds_is_removed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lock, arguments = tmp_path / "lock", {"build_directory": str(tmp_path)}

    def compile_it(build_directory: str) -> None:
        raise AssertionError(build_directory)

    libraries.drop_stale_lock(compile_it, (), arguments)
    with lock.open("w"):
        libraries.drop_stale_lock(compile_it, (), arguments)
        assert lock.exists()
    libraries.drop_stale_lock(compile_it, (), arguments)
    assert not lock.exists()
    assert f"removed {lock}, a lock of torch.utils.cpp_extension that no process holds" in capfd.readouterr().out


def test_a_shelf_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    whole = [("a" * 64, "a.so", b"1"), ("b" * 64, shelf.REFUSED, b"2")]
    shelf.fill(tmp_path / "whole", whole)
    assert shelf.read(tmp_path / "whole") == whole
    with pytest.raises(ValueError, match="is not a library"):
        shelf.fill(tmp_path / "broken", [*whole, ("c" * 64, "c.txt", b"3")])
    assert shelf.read(tmp_path / "broken") == []


@pytest.mark.parametrize(
    ("made", "owner", "bound_bytes", "taken"),
    [(3, 0, 1000, 2), (100, 0, 1 << 20, 64), (1, 1, 1000, 0)],
    ids=["bytes", "number", "owner"],
)
def test_few_files_of_the_builder_s_own_are_taken(
    tmp_path: Path, made: int, owner: int, bound_bytes: int, taken: int
) -> None:
    for i in range(made):
        slot = tmp_path / "scratch" / shelf.MADE / f"{i:064x}"
        slot.mkdir(parents=True)
        (slot / "a.so").write_bytes(bytes(400))
    target = tmp_path / "shelf"
    shelf.make(target)
    shelf.take(tmp_path / "scratch", target, os.getuid() + owner, bound_bytes)
    found = list(target.rglob("*.so"))
    assert len(found) == len(list(target.iterdir())) == taken
    assert all(path.stat().st_size == 400 and path.stat().st_mode & 0o777 == 0o644 for path in found)
