"""What compiles is a process of its own, and what it hands on harms nobody but its own kernel."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kqueue.categories import Category
from kqueue.contract import Deadlines, Phase
from tests.judge.extension import OTHER, QUICK, TELL, judge, kernel, told
from tests.judge.rig import Rig
from tests.waiting import until
from workers.judge.candidate import libraries
from workers.judge.sandbox import shelf
from workers.judge.trial import build

pytestmark = pytest.mark.slow("compiles C++")


def test_the_candidate_imports_what_the_builder_has_compiled(rig: Rig) -> None:
    """It runs no compiler, and another user has run it."""
    outcome = judge(rig, kernel(after=TELL))
    assert outcome.category is Category.PASSED, outcome
    assert outcome.evidence.build.model_dump() | {"seconds": 0, "peak_bytes": 0} == {
        "where": "builder",
        "libraries": 1,
        "seconds": 0,
        "peak_bytes": 0,
    }
    [builder], [candidate] = told(outcome, "builder"), told(outcome, "candidate")
    assert builder.startswith("1 compiled")
    assert builder.endswith("GPU ''")
    assert candidate.startswith("0 compiled")
    worked = outcome.evidence.cpu_s or {}
    assert worked["builder"] > worked["candidate"]
    if rig.place.uid is not None:
        assert f"uid {rig.place.uid}," in candidate
        assert f"uid {rig.place.uid}," not in builder


IN_TMP = """
place = Path("/tmp/extensions/numbers")
place.mkdir(parents=True)
(place / "library.cpp").write_text(SOURCE)
def build():
    return cpp_extension.load("numbers", [str(place / "library.cpp")], ["-O0"], build_directory=str(place))
"""


def test_a_kernel_that_builds_in_tmp_finds_nobody_else_there(rig: Rig) -> None:
    """Published kernels do: it would fail if the folder were there, or could not be made."""
    if rig.forkserver.isolation["mounts"] is not True:
        pytest.skip(f"mounts: {rig.forkserver.isolation['mounts']}")
    for _ in range(2):
        outcome = judge(rig, kernel(top=IN_TMP))
        assert outcome.category is Category.PASSED, outcome
        assert outcome.evidence.build.where == "builder"
    assert not Path("/tmp/extensions/numbers").exists()


def test_nothing_is_left_of_a_build(rig: Rig) -> None:
    """Neither the builder's directory nor the libraries."""
    assert judge(rig, kernel()).category is Category.PASSED
    until(lambda: not list(rig.place.scratch.iterdir()))


def test_a_version_of_the_same_name_keeps_its_own_library(rig: Rig) -> None:
    """torch numbers libraries of one name that differ; each must be found again by its own name."""
    second = (
        "first = numbers; numbers = build(SOURCE.replace('(2)', '(3)').replace('PyInit_numbers', 'PyInit_numbers_v1'))"
    )
    body = "assert (first.number(), numbers.number()) == (2, 3); numbers = first"
    outcome = judge(rig, kernel(after=f"{second}\n{body}\n{TELL}"))
    assert outcome.category is Category.PASSED, outcome
    assert outcome.evidence.build.libraries == 2
    assert told(outcome, "candidate")[0].startswith("0 compiled")


def test_a_compiler_s_word_is_final_and_its_output_in_the_log(rig: Rig) -> None:
    """No candidate compiles what was refused."""
    outcome = judge(rig, kernel(top="print(WHO, flush=True); SOURCE += 'no c++ at all;'; build(SOURCE)"))
    assert (outcome.category, outcome.phase) == (Category.COMPILE_ERROR, Phase.LOAD)
    assert "does not name a type" in outcome.message + outcome.log
    assert "builder" in outcome.log.splitlines()
    assert "candidate" not in outcome.log.splitlines()


def test_a_compiler_that_does_not_end_is_ended(rig: Rig) -> None:
    """By the deadline for compilation, in the builder."""
    slow = """
Path("slow").write_text("#!/bin/sh\\nsleep 100\\n")
Path("slow").chmod(0o700)
os.environ["CXX"] = str(Path("slow").absolute())
"""
    outcome = judge(rig, kernel(top=slow), QUICK.model_copy(update={"deadlines": Deadlines(compile_s=1)}))
    assert (outcome.category, outcome.phase) == (Category.COMPILE_TIMEOUT, Phase.COMPILE)


def test_what_fails_only_in_the_builder_is_left_to_the_candidate(rig: Rig) -> None:
    """A module may need what only the candidate has: its failure there is not the kernel's."""
    outcome = judge(rig, kernel(top="if WHO == 'builder': raise RuntimeError('not here')", after=TELL))
    assert outcome.category is Category.PASSED, outcome
    assert outcome.evidence.build.where == "candidate"
    assert "not here" in outcome.evidence.build.skipped
    assert told(outcome, "candidate")[0].startswith("1 compiled")


class _BuildBesideGpu(build.Build):
    def __init__(self, *given: Any) -> None:
        *given, asked = given
        super().__init__(*given, replace(asked, on_gpu=not asked.on_gpu))


@pytest.fixture
def beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge takes its candidate for one with a GPU."""
    monkeypatch.setattr(build, "_architectures", lambda: "9.0+PTX")
    monkeypatch.setattr(build, "Build", _BuildBesideGpu)


@pytest.mark.usefixtures("beside_a_gpu")
def test_beside_a_gpu_only_the_candidate_s_compiler_refuses(rig: Rig) -> None:
    """Its flags may come from the GPU, and others from its absence."""
    outcome = judge(rig, kernel(top="if WHO == 'builder': build(SOURCE + 'no c++ at all;')", after=TELL))
    assert outcome.category is Category.PASSED, outcome
    assert "does not name a type" in outcome.evidence.build.skipped
    assert told(outcome, "candidate")[0].startswith("1 compiled")
    refused = judge(rig, kernel(top="print(WHO, flush=True); build(SOURCE + 'no c++ at all;')"))
    assert (refused.category, refused.phase) == (Category.COMPILE_ERROR, Phase.LOAD)
    assert "candidate" in refused.log.splitlines()


@pytest.mark.usefixtures("beside_a_gpu")
def test_beside_a_gpu_what_the_builder_s_compiler_refused_is_compiled_once(rig: Rig) -> None:
    """The candidate hears the builder's compiler when it asks for the very same, and may do something else then."""
    top = """
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
    outcome = judge(rig, kernel(top=top))
    assert outcome.category is Category.PASSED, outcome
    assert (told(outcome, "builder"), told(outcome, "candidate")) == (["True True"], ["False True"])


def test_other_variables_for_the_compilers_make_another_library(rig: Rig) -> None:
    """What a kernel asks of them without a GPU, such as other architectures, is not what it asks beside one."""
    top = 'os.environ["TORCH_CUDA_ARCH_LIST"] = "7.5" if WHO == "builder" else "9.0"'
    outcome = judge(rig, kernel(top=top, after=TELL))
    assert outcome.category is Category.PASSED, outcome
    assert told(outcome, "candidate")[0].startswith("1 compiled")


def test_a_compiler_that_outlives_the_build_is_no_daemon(rig: Rig) -> None:
    """A module that fails in one thread while another compiles has left nothing behind."""
    two = """
if WHO == "builder":
    import subprocess
    subprocess.Popen(["sleep", "100"])
    raise RuntimeError("not here")
"""
    outcome = judge(rig, kernel(top=two))
    assert outcome.category is Category.PASSED, outcome
    assert "not here" in outcome.evidence.build.skipped


def test_a_daemon_of_the_builder_is_a_violation(rig: Rig) -> None:
    """As one of the candidate's is."""
    daemon = """
if WHO == "builder" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(100)
    os._exit(0)
"""
    outcome = judge(rig, kernel(top=daemon))
    assert outcome.category is Category.SANDBOX_VIOLATION, outcome
    assert outcome.facts.leftovers == 1


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
    """They are the fleet's, and read-only for it."""
    if rig.place.uid is None and rig.forkserver.isolation["files"] is not True:
        pytest.skip("without uid or Landlock nothing keeps it from its own libraries")
    outcome = judge(rig, kernel(after=WRITE))
    assert outcome.category is Category.PASSED, outcome
    # A file's mode is its owner's to change, whom Landlock does not heed: it opens nothing.
    harmless = ["chmod worked"] if rig.place.uid is None else []
    assert told(outcome, "candidate") == [*harmless, "tried"]


PLANT = """
if WHO == "builder":
    place = made()
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


def test_what_a_builder_plants_is_left_behind(rig: Rig) -> None:
    """Links, pipes, giants, and what has no key; the honest library beside them is taken."""
    outcome = judge(rig, kernel(after=PLANT))
    assert outcome.category is Category.PASSED, outcome
    assert outcome.evidence.build.libraries == 1
    assert told(outcome, "candidate") == ["1 found"]


def test_another_library_under_a_key_is_that_kernel_s_own_loss(rig: Rig) -> None:
    """The next evaluation of the same sources compiles them anew."""
    swap = """
if WHO == "builder":
    (made() / "numbers.so").write_bytes(other_library(7).read_bytes())
"""
    assert judge(rig, kernel(top=OTHER, after=swap)).category is Category.WRONG_VALUES
    assert judge(rig, kernel()).category is Category.PASSED


def test_a_key_is_what_was_asked_for_and_not_where(tmp_path: Path) -> None:
    """Builder and candidate have different directories; other flags or sources make another library."""

    def key(place: str, content: str = "int a;", flags: tuple[str, ...] = ("-O2",), verbose: bool = False) -> str:
        scratch = tmp_path / place
        scratch.mkdir(exist_ok=True)
        source = scratch / "main.cpp"
        source.write_text(content)
        asked = ("name", [str(source)], [*flags, f"-I{scratch}"], None, None, None, None, str(scratch))
        more = {
            "verbose": verbose,
            "with_cuda": None,
            "with_sycl": None,
            "is_python_module": True,
            "is_standalone": False,
        }
        return libraries.key(libraries.builder()._jit_compile, asked, more, scratch)

    assert key("a") == key("b") == key("c", verbose=True)
    assert len({key("a"), key("a", "int b;"), key("a", flags=("-O3",))}) == 3


def test_beside_a_gpu_the_builder_names_it_and_admits_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc is told the architecture; a module that asks for the GPU itself is left to the candidate."""
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


def test_a_shelf_is_filled_whole_or_not_at_all(tmp_path: Path) -> None:
    """What broke in the midst would be taken for a library."""
    whole = [("a" * 64, "a.so", b"1"), ("b" * 64, shelf.REFUSED, b"2")]
    shelf.fill(tmp_path / "whole", whole)
    assert shelf.read(tmp_path / "whole") == whole
    with pytest.raises(ValueError, match="is no library"):
        shelf.fill(tmp_path / "broken", [*whole, ("c" * 64, "c.txt", b"3")])
    assert shelf.read(tmp_path / "broken") == []


def test_taking_stops_at_the_bound(tmp_path: Path) -> None:
    """More than a builder may write is not taken, and nothing half."""
    for i in range(3):
        place = tmp_path / "scratch" / shelf.MADE / f"{i:064x}"
        place.mkdir(parents=True)
        (place / "a.so").write_bytes(bytes(400))
    target = tmp_path / "shelf"
    shelf.make(target)
    shelf.take(tmp_path / "scratch", target, os.getuid(), 1000)
    taken = list(target.rglob("*.so"))
    assert len(taken) == 2
    assert all(path.stat().st_size == 400 and path.stat().st_mode & 0o777 == 0o644 for path in taken)
    assert len(list(target.iterdir())) == 2


def test_a_stranger_s_files_are_not_taken(tmp_path: Path) -> None:
    """Whatever lies in a builder's directory, only what belongs to it is handed on."""
    place = tmp_path / "scratch" / shelf.MADE / ("a" * 64)
    place.mkdir(parents=True)
    (place / "a.so").write_bytes(b"secret")
    target = tmp_path / "shelf"
    shelf.make(target)
    shelf.take(tmp_path / "scratch", target, os.getuid() + 1, 1000)
    assert list(target.iterdir()) == []
