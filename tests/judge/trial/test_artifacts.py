"""A source is compiled once; what the store holds harms nobody, and nobody but the judge reaches it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kqueue
from kqueue.categories import Category
from kqueue.config import load
from kqueue.contract import Backend, Deadlines, Limits, Outcome, Phase
from kqueue.errors import ConfigError
from tests.judge.extension import OTHER, PROBLEM, QUICK, TELL, judge, kernel, told
from tests.judge.rig import Rig
from workers.judge.host import toolchain
from workers.judge.host.artifacts import Entry, Header, Library, Refusal, Store
from workers.judge.keeper import builds
from workers.judge.place import Place
from workers.judge.trial.build import Asked

pytestmark = pytest.mark.slow("compiles C++")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder for a store."""
    with tempfile.TemporaryDirectory(prefix="kqueue-builds-") as place:
        yield Path(place) / "builds"


@pytest.fixture(scope="module")
def rig(judge_environment: None, folder: Path) -> Iterator[Rig]:
    """A place on the CPU that keeps builds."""
    with Rig(builds=folder) as rig:
        assert rig.forkserver.builds is not None
        yield rig


@pytest.fixture(autouse=True)
def _empty_store(folder: Path) -> None:
    """Each test begins with an empty store."""
    for path in folder.glob("*"):
        path.unlink()


def where(outcome: Outcome) -> str:
    """Where the kernel's libraries come from."""
    return outcome.evidence.build.where


def named(name: object) -> str:
    """A key."""
    return hashlib.sha256(str(name).encode()).hexdigest()


def entry(key: object = "k", content: bytes = b"library", size: int | None = None) -> Entry:
    """An entry with one library."""
    library = Library(key="a" * 64, name="a.so", size=len(content) if size is None else size)
    return Entry(Header(key=named(key), libraries=(library,), seconds=1, peak_bytes=2), (content,))


# One source, one build -----------------------------------------------------------------------------------


def test_the_same_source_is_compiled_once(rig: Rig, folder: Path) -> None:
    """The second evaluation forks no builder and runs no compiler, and says so."""
    first, second = judge(rig, kernel(after=TELL)), judge(rig, kernel(after=TELL))
    assert first.category is second.category is Category.PASSED, second
    assert (where(first), where(second)) == ("builder", "store")
    assert second.evidence.build.model_dump() | {"seconds": 0} == {
        "where": "store",
        "libraries": 1,
        "seconds": 0,
        "peak_bytes": first.evidence.build.peak_bytes,
        "earlier_seconds": first.evidence.build.seconds,
        "key": first.evidence.build.key,
    }
    assert told(second, "candidate")[0].startswith("0 compiled")
    assert [path.name for path in folder.iterdir()] == [first.evidence.build.key]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_another_source_never_gets_it(rig: Rig) -> None:
    """Not even one whose sources for the compiler are the same: the kernel's own source counts."""
    assert judge(rig, kernel(number=3)).category is Category.WRONG_VALUES
    assert judge(rig, kernel()).category is Category.PASSED
    again = judge(rig, kernel(after="# another"))
    assert (again.category, where(again)) == (Category.PASSED, "builder")


def test_a_builder_that_plants_another_library_harms_its_own_source_alone(rig: Rig) -> None:
    """What it hands on is kept for it, and for nobody who compiles the same."""
    swap = 'if WHO == "builder": (made() / "numbers.so").write_bytes(other_library(7).read_bytes())'
    for place in ("builder", "store"):
        outcome = judge(rig, kernel(top=OTHER, after=swap))
        assert (outcome.category, where(outcome)) == (Category.WRONG_VALUES, place)
    assert judge(rig, kernel()).category is Category.PASSED


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "another's", "a link"])
def test_a_damaged_entry_is_dropped_and_built_anew(rig: Rig, folder: Path, damage: str) -> None:
    """The hash is looked at each time, and an entry stands for its own key alone."""
    first = judge(rig, kernel())
    path = folder / first.evidence.build.key
    data = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        wrong = judge(rig, kernel(number=7))
        other = folder / wrong.evidence.build.key
        other.rename(path) if damage == "another's" else path.symlink_to(other)
    again, then = judge(rig, kernel()), judge(rig, kernel())
    assert (again.category, where(again)) == (Category.PASSED, "builder")
    assert (then.category, where(then)) == (Category.PASSED, "store")


def test_a_build_that_stopped_early_is_kept_as_far_as_it_came(rig: Rig) -> None:
    """The candidate compiles the rest each time, with all of the time for compilers."""
    source = kernel(after="if WHO == 'builder': raise RuntimeError('not here')\n" + TELL)
    first, second = judge(rig, source), judge(rig, source)
    assert first.category is second.category is Category.PASSED, second
    assert (where(first), where(second)) == ("builder", "store")
    assert first.evidence.build.skipped == second.evidence.build.skipped
    assert "not here" in (second.evidence.build.skipped or "")


# Refusals ------------------------------------------------------------------------------------------------

REFUSED = "print(WHO, flush=True); SOURCE += 'no c++ at all;'; build(SOURCE)"


def test_a_known_refusal_is_told_again(rig: Rig) -> None:
    """Category, message and log are the first one's; nothing is compiled."""
    first, second = judge(rig, kernel(top=REFUSED)), judge(rig, kernel(top=REFUSED))
    assert second.category is Category.COMPILE_ERROR
    assert (second.phase, second.message, second.facts) == (first.phase, first.message, first.facts)
    assert "builder" in second.log.splitlines()
    assert "builder" in first.log.splitlines()
    assert first.evidence.build is None
    assert (second.evidence.build.where, second.evidence.build.libraries) == ("store", 0)


def test_a_refusal_that_a_source_expects_is_kept_too(rig: Rig) -> None:
    """One that goes on without the library is judged, and the compiler is not asked again."""
    top = """
try:
    build(SOURCE + "no c++ at all;", "other")
except Exception:
    pass
"""
    first, second = (judge(rig, kernel(top=top, after=TELL)) for _ in range(2))
    assert first.category is second.category is Category.PASSED, second
    assert (where(first), where(second)) == ("builder", "store")
    assert first.evidence.build.libraries == second.evidence.build.libraries == 1
    assert told(second, "candidate")[0].startswith("0 compiled")


COMPILER = """
Path("compiler").write_text('''#!/bin/sh
case "$*" in *-dump*|*--version*|*-v) exec c++ "$@";; esac
{does}
''')
Path("compiler").chmod(0o700)
os.environ["CXX"] = str(Path("compiler").absolute())
"""


@pytest.mark.parametrize(
    "does",
    [
        "echo 'a.cpp:1:2: error: no'; echo 'c++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1",
        "echo 'a.cpp:1:2: fatal error: error writing to /tmp/a.s: No space left on device' >&2; exit 1",
        "echo 'a.cpp:1:2: error: virtual memory exhausted: Cannot allocate memory' >&2; exit 1",
        "echo 'c++: error: fork: Resource temporarily unavailable' >&2; exit 1",
        "exit 1",
    ],
)
def test_a_refusal_for_want_of_means_is_not_kept(rig: Rig, folder: Path, does: str) -> None:
    """Compilers that are killed or find no room may say otherwise next time; so may those that do not say why."""
    outcome = judge(rig, kernel(top=COMPILER.format(does=does)))
    assert outcome.category is Category.COMPILE_ERROR
    assert list(folder.iterdir()) == []


def test_a_compiler_s_timeout_is_not_kept(rig: Rig, folder: Path) -> None:
    """It may have been the host's."""
    settings = QUICK.model_copy(update={"deadlines": Deadlines(compile_s=1)})
    outcome = judge(rig, kernel(top=COMPILER.format(does="sleep 100")), settings)
    assert (outcome.category, outcome.phase) == (Category.COMPILE_TIMEOUT, Phase.COMPILE)
    assert list(folder.iterdir()) == []


def test_a_builder_that_ran_into_a_limit_is_not_kept(rig: Rig, folder: Path) -> None:
    """Neither the libraries that it had made before."""
    greedy = "if WHO == 'builder':\n    everything = bytearray(b'x') * (1 << 30); time.sleep(10)"
    settings = QUICK.model_copy(update={"limits": Limits(host_memory_bytes=700 << 20)})
    outcome = judge(rig, kernel(after=greedy), settings)
    assert outcome.evidence.build.skipped is not None
    assert list(folder.iterdir()) == []


# Attacks -------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("readable", [False, True])
def test_no_sealed_process_reaches_the_store(
    rig: Rig, folder: Path, readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the builder nor the candidate reads, writes, lists or times an entry whose name it knows.

    A uid of their own keeps it closed where it lies among what Landlock lets them read.
    """
    if readable:
        if rig.place.uid is None:
            pytest.skip("without a uid of their own such a folder is no store")
        with tempfile.TemporaryDirectory(dir=sys.prefix) as place:
            folder = Path(place, "builds")
            Path(place).chmod(0o755)
            inside = replace(rig.place, build_store=str(folder))
            store = builds.open_store(inside, rig.forkserver.isolation, os.environ)
            monkeypatch.setattr(rig.forkserver, "builds", store)
            _attack(rig, folder, readable=True)
    else:
        _attack(rig, folder, readable=False)


def _attack(rig: Rig, folder: Path, *, readable: bool) -> None:
    key = judge(rig, kernel()).evidence.build.key
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    outcome = judge(rig, kernel(after=REACH.format(store=str(folder), key=key)))
    assert outcome.category is Category.PASSED, outcome
    # In the process's own /tmp it is a folder of that process's.
    hidden = str(folder).startswith("/tmp/") and not readable
    own = {"mkdir worked"} if hidden else {"mkdir worked", "parent worked"}
    for who in ("builder", "candidate"):
        lines = told(outcome, who)
        assert lines[-1] == "tried"
        assert set(lines[:-1]) <= (own if rig.forkserver.isolation["mounts"] is True else set()), lines
    after = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 1


def test_a_builder_that_writes_after_its_end_changes_nothing(rig: Rig, folder: Path) -> None:
    """What it leaves behind to write later makes the evaluation a violation, and nothing is kept."""
    late = """
if WHO == "builder" and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        (made() / "numbers.so").write_bytes(b"late")
    os._exit(0)
"""
    assert judge(rig, kernel(after=late)).category is Category.SANDBOX_VIOLATION
    assert list(folder.iterdir()) == []


MANY = """
if WHO == "builder":
    for i in range(1000):
        place = Path("made", f"{i:064x}")
        place.mkdir()
        (place / "a.so").write_bytes(b"a")
"""


def test_a_thousand_libraries_are_not_kept(rig: Rig, folder: Path) -> None:
    """An entry holds what the candidate would get, and no more."""
    outcome = judge(rig, kernel(after=MANY))
    assert outcome.category is Category.PASSED, outcome
    [path] = folder.iterdir()
    assert len(Entry.unpack(path.read_bytes(), path.name).contents) <= 64


PLANT = """
if WHO == "builder":
    for i, plant in enumerate([
        lambda at: (at.mkdir(), (at / "passwd.so").symlink_to("/etc/passwd")),
        lambda at: (at.mkdir(), (at / "a.so").write_bytes(b"a"), os.link(at / "a.so", "elsewhere")),
        lambda at: (at.mkdir(), os.mkfifo(at / "pipe.so")),
        lambda at: at.symlink_to("/etc"),
        lambda at: (at.mkdir(), os.truncate(os.open(at / "huge.so", os.O_CREAT | os.O_RDWR), 1 << 30)),
    ]):
        plant(Path("made", f"{i:064x}"))
"""


def test_links_pipes_and_giants_are_not_kept(rig: Rig, folder: Path) -> None:
    """The honest library beside them is."""
    outcome = judge(rig, kernel(after=PLANT))
    assert outcome.category is Category.PASSED, outcome
    [path] = folder.iterdir()
    assert [found.name for found in Entry.unpack(path.read_bytes(), path.name).header.libraries] == ["numbers.so"]


def test_a_full_disk_is_a_store_without_room(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation goes on, and nothing is left: builds make room for what needs it more."""
    with tempfile.TemporaryDirectory() as place:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "kqueue-test", place]
        if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr}")
        try:
            Store(place, 1 << 20, "").put(entry("earlier"))
            Path(place, "filler").write_bytes(bytes(56 << 10))
            assert sorted(path.name for path in Path(place).iterdir()) == [named("earlier"), "filler"]
            full = replace(rig.place, build_store=place)
            store = builds.open_store(full, rig.forkserver.isolation, os.environ)
            monkeypatch.setattr(rig.forkserver, "builds", store)
            outcomes = [judge(rig, kernel()) for _ in range(2)]
            assert [(each.category, where(each)) for each in outcomes] == [(Category.PASSED, "builder")] * 2
            assert [path.name for path in Path(place).iterdir()] == ["filler"]
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)


# The store alone -----------------------------------------------------------------------------------------


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    """The store stays below its bound; what was asked for lately stays."""
    store = Store(str(tmp_path / "builds"), 100 << 10, "")
    for i in range(8):
        store.put(entry(i, bytes(11 << 10)))
        os.utime(tmp_path / "builds" / named(i), (i, i))
    assert store.get(named(0)) is not None
    store.put(entry(8, bytes(11 << 10)))
    left = {path.name for path in (tmp_path / "builds").iterdir()}
    assert {named(0), named(8)} < left
    assert named(1) not in left
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "builds").iterdir()) <= 100 << 10


def test_a_giant_would_push_out_all_others(tmp_path: Path) -> None:
    """So it is not kept."""
    store = Store(str(tmp_path / "builds"), 100 << 10, "")
    store.put(entry("small"))
    store.put(entry("giant", bytes(20 << 10)))
    assert store.get(named("giant")) is None
    assert store.get(named("small")) is not None


def _churn(location: str, number: int) -> None:
    store = Store(location, 1 << 20, "")
    for i in range(200):
        name = f"{(i * 7 + number) % 40}"
        found = store.get(named(name))
        assert found is None or found.contents == (name.encode() * 1000,)
        store.put(entry(name, name.encode() * 1000))


def test_many_processes_share_a_store(tmp_path: Path) -> None:
    """Each entry is whole or not there, whoever writes and prunes meanwhile; no part is left."""
    location = str(tmp_path / "builds")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_churn, args=(location, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert not list(Path(location).glob("part-*"))


def test_what_a_killed_judge_left_is_removed(tmp_path: Path) -> None:
    """When it is old, as another may be writing now."""
    store = Store(str(tmp_path / "builds"), 1 << 20, "")
    store.put(entry("first"))
    for name, age in (("part-1-old", 7200), ("part-1-new", 0)):
        path = tmp_path / "builds" / name
        path.write_bytes(b"part")
        os.utime(path, (time.time() - age,) * 2)
    store.put(entry("second"))
    assert sorted(path.name for path in (tmp_path / "builds").iterdir()) == sorted(
        [named("first"), "part-1-new", named("second")]
    )


def test_a_folder_that_others_may_enter_is_no_store(tmp_path: Path) -> None:
    """Somebody could have put something there."""
    place = tmp_path / "builds"
    store = Store(str(place), 1 << 20, "")
    store.put(entry("first"))
    place.chmod(0o755)
    assert store.get(named("first")) is None
    place.chmod(0o700)
    assert store.get(named("first")) is not None


def test_a_location_of_fsspec_s_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps, drops what is damaged, and is pruned too."""
    fsspec: Any = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr("workers.judge.host.artifacts._LOOK_EVERY", 1)
    store = Store("memory://kqueue/builds", 100 << 10, "")
    store.preload()
    store.put(entry("first"))
    assert store.get(named("first")) == entry("first")
    assert store.get(named("second")) is None
    memory.pipe_file(f"/kqueue/builds/{named('first')}", memory.cat_file(f"/kqueue/builds/{named('first')}")[:-1])
    assert store.get(named("first")) is None
    assert not memory.exists(f"/kqueue/builds/{named('first')}")
    for i in range(20):
        store.put(entry(i, bytes(11 << 10)))
    assert sum(found["size"] for found in memory.ls("/kqueue/builds", detail=True)) <= 100 << 10
    with pytest.raises(ConfigError, match="KQUEUE_BUILD_STORE"):
        Store("nosuch://builds", 1, "").preload()


def test_a_location_that_cannot_be_reached_is_an_empty_store(tmp_path: Path) -> None:
    """No evaluation fails for it."""
    file = tmp_path / "file"
    file.write_text("")
    for location in (str(file / "builds"), "nosuch://builds"):
        store = Store(location, 1 << 20, "")
        store.put(entry("first"))
        assert store.get(named("first")) is None


def test_an_entry_that_does_not_add_up_is_refused() -> None:
    """Sizes and key must fit, and a refusal has no library."""
    for each in (entry(size=5), entry(size=9)):
        with pytest.raises(ValueError, match="another one's, or not whole"):
            Entry.unpack(each.pack(), named("k"))
    with pytest.raises(ValueError, match="another one's"):
        Entry.unpack(entry("other").pack(), named("k"))
    refusal = Entry(Header(key="k", seconds=1, peak_bytes=2, refusal=Refusal(message="no", exception="E")))
    assert Entry.unpack(refusal.pack(), "k") == refusal


def test_a_store_needs_a_seal_that_keeps_it_closed(tmp_path: Path) -> None:
    """Without a uid of the candidates' own, Landlock must cover its folder."""
    place = Place(
        name="p", number=0, device="cpu", siblings=1, scratch=tmp_path, lock=tmp_path / "lock", uid=None,
        build_store=str(tmp_path / "builds"), build_store_bytes=1,
    )  # fmt: skip
    for own_uid, files, location, opens in (
        (True, "no Landlock", place.build_store, True),
        ("not root", True, place.build_store, True),
        ("not root", "no Landlock", place.build_store, False),
        ("not root", True, "/usr/share/builds", False),
        ("not root", "no Landlock", "memory://builds", False),
        (True, True, "", False),
    ):
        isolation = {"own_uid": own_uid, "files": files}
        store = builds.open_store(replace(place, build_store=location), isolation, os.environ)
        assert (store is not None) is opens, (own_uid, files, location)


def test_the_key_is_all_that_a_build_depends_on(tmp_path: Path) -> None:
    """Source, architecture, compilers, headers and their variables; not the GPU's name or the slot."""
    environment = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "a", "TMPDIR": "/a"}
    same = environment | {"CUDA_VISIBLE_DEVICES": "b", "TMPDIR": "/b"}
    assert toolchain.fingerprint(environment) == toolchain.fingerprint(same)
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho c++ 99\n")
    compiler.chmod(0o755)
    headers = tmp_path / "headers"
    headers.mkdir()
    others = [
        environment,
        environment | {"PATH": f"{tmp_path}:{environment['PATH']}"},
        environment | {"CXX": str(compiler)},
        environment | {"TORCH_CUDA_ARCH_LIST": "9.0"},
        environment | {"CPATH": str(headers)},
    ]
    found = [toolchain.fingerprint(each) for each in others]
    (headers / "new.h").write_text("int a;")
    found.append(toolchain.fingerprint(others[-1]))
    assert len(set(found)) == len(found)
    stores = [Store("/nowhere", 1, found[0]), Store("/nowhere", 1, found[1])]
    keys = {store.key(source, arch) for store in stores for source in "ab" for arch in ("", "9.0")}
    assert len(keys) == 8
    asked = [Asked(source, on_gpu=False, lines=lines) for source in "ab" for lines in (False, True)]
    assert len({one.key(store) for store in stores for one in asked}) == 8


def test_a_local_judge_keeps_builds_where_the_settings_say(tmp_path: Path) -> None:
    """By default beside its scratch directories, for all judges of the user; or nowhere."""
    tmp_path.chmod(0o755)
    for number, expected in ((1 << 30, ["builder", "store"]), (0, ["builder", "builder"])):
        scratch = tmp_path / f"scratch-{number}"
        config = load(scratch=scratch, build_store_bytes=number)
        found: list[str] = []
        for _ in range(2):
            with kqueue.LocalJudge("cpu", config=config) as local:
                outcome = local(problem=PROBLEM, kernel=kernel(), backend=Backend.CPP, settings=QUICK)
            assert outcome.category is Category.PASSED, outcome
            found.append(where(outcome))
        assert found == expected
        assert (scratch / "builds").exists() == bool(number)


def test_settings_name_a_place() -> None:
    """A path that depends on the working directory, or a folder by URL, is refused."""
    for wrong in ("builds", "file:///builds", "local://builds"):
        with pytest.raises(ConfigError, match="KQUEUE_BUILD_STORE"):
            load(build_store=wrong)
    assert load(build_store="s3://bucket/builds").build_location == "s3://bucket/builds"
