"""The store of builds without a judge: entries are whole or absent, and the store stays within its bounds."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kqueue.config import load
from kqueue.errors import ConfigError
from workers.judge.forkserver import builds
from workers.judge.host import toolchain
from workers.judge.host.artifacts import Entry, Header, Library, Store
from workers.judge.pipeline.build import Asked
from workers.judge.slot_config import SlotConfig


def named(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def entry(key: object = "k", content: bytes = b"library", size: int | None = None) -> Entry:
    library = Library(key="a" * 64, name="a.so", size=len(content) if size is None else size)
    return Entry(Header(key=named(key), libraries=(library,), seconds=1, peak_bytes=2), (content,))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "another's", "a link"])
def test_a_damaged_entry_is_dropped(tmp_path: Path, damage: str) -> None:
    store, path, other = Store(str(tmp_path), 1 << 20, ""), tmp_path / named("k"), tmp_path / named("other")
    tmp_path.chmod(0o700)
    store.put(entry("k", bytes(1000)))
    store.put(entry("other"))
    data = path.read_bytes()
    assert store.get(named("k")) is not None
    path.unlink()
    if damage == "another's":
        other.rename(path)
    elif damage == "a link":
        path.symlink_to(other)
    else:
        path.write_bytes({"flipped": data[:-1] + b"x", "cut": data[: len(data) // 2], "empty": b""}[damage])
    assert store.get(named("k")) is None
    store.put(entry("k"))
    assert store.get(named("k")) == entry("k")


def test_a_full_disk_is_a_store_without_room() -> None:
    with tempfile.TemporaryDirectory() as slot:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "kqueue-test", slot]
        if (done := subprocess.run(command, capture_output=True, text=True, check=False)).returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr}")
        try:
            store = Store(slot, 1 << 20, "")
            store.put(entry("earlier"))
            Path(slot, "filler").write_bytes(bytes(56 << 10))
            assert sorted(path.name for path in Path(slot).iterdir()) == [named("earlier"), "filler"]
            store.put(entry("later"))
            assert [path.name for path in Path(slot).iterdir()] == ["filler"]
        finally:
            subprocess.run(["umount", "--lazy", slot], check=True)


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
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


def _churn(location: str, number: int) -> None:
    store = Store(location, 1 << 20, "")
    for i in range(100):
        name = f"{(i * 7 + number) % 40}"
        found = store.get(named(name))
        assert found is None or found.contents == (name.encode() * 1000,)
        store.put(entry(name, name.encode() * 1000))


def test_many_processes_share_a_store(tmp_path: Path) -> None:
    location = str(tmp_path / "builds")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_churn, args=(location, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert not list(Path(location).glob("part-*"))


def test_what_a_killed_judge_left_is_removed(tmp_path: Path) -> None:
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
    slot = tmp_path / "builds"
    store = Store(str(slot), 1 << 20, "")
    store.put(entry("first"))
    slot.chmod(0o755)
    assert store.get(named("first")) is None
    slot.chmod(0o700)
    assert store.get(named("first")) is not None


def test_a_location_of_fsspec_s_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
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
    file = tmp_path / "file"
    file.write_text("")
    for location in (str(file / "builds"), "nosuch://builds"):
        store = Store(location, 1 << 20, "")
        store.put(entry("first"))
        assert store.get(named("first")) is None


def test_a_store_needs_a_seal_that_keeps_it_closed(tmp_path: Path) -> None:
    slot = SlotConfig(
        name="p", number=0, device="cpu", siblings=1, scratch=tmp_path, lock=tmp_path / "lock", uid=None,
        build_store=str(tmp_path / "builds"), build_store_bytes=1,
    )  # fmt: skip
    for own_uid, files, location, opens in (
        (True, "no Landlock", slot.build_store, True),
        ("not root", True, slot.build_store, True),
        ("not root", "no Landlock", slot.build_store, False),
        ("not root", True, "/usr/share/builds", False),
        ("not root", "no Landlock", "memory://builds", False),
        (True, True, "", False),
    ):
        store = builds.open_store(replace(slot, build_store=location), {"own_uid": own_uid, "files": files}, os.environ)
        assert (store is not None) is opens, (own_uid, files, location)


@pytest.mark.slow("asks compilers for their versions")
def test_the_key_is_all_that_a_build_depends_on(tmp_path: Path) -> None:
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
    stores = [Store("/nowhere", 1, found[0]), Store("/nowhere", 1, found[0]).of("another owner's")]
    assert stores[0].of("").key("a", "") == stores[0].key("a", "")
    stores.append(Store("/nowhere", 1, found[1]))
    assert len({store.key(source, arch) for store in stores for source in "ab" for arch in ("", "9.0")}) == 12
    asked = [Asked(source, on_gpu=False, lines=lines) for source in "ab" for lines in (False, True)]
    assert len({one.key(store) for store in stores for one in asked}) == 12


def test_settings_name_a_place() -> None:
    scratch = Path("/scratch")
    assert load(scratch=scratch).build_location == "/scratch/builds"
    assert load(scratch=scratch, build_store_bytes=0).build_location == ""
    for wrong in ("builds", "file:///builds", "local://builds"):
        with pytest.raises(ConfigError, match="KQUEUE_BUILD_STORE"):
            load(build_store=wrong)
    assert load(build_store="s3://bucket/builds").build_location == "s3://bucket/builds"


def test_a_missing_file_of_the_builder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_BUILDER", ("judge/candidate/moved.py",))
    with pytest.raises(FileNotFoundError, match=r"moved\.py"):
        toolchain.fingerprint(dict(os.environ))
