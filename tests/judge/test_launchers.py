"""Triton's launchers, compiled in advance for types that candidates reported. Triton itself is a fake."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from triton.backends.nvidia import driver
from triton.runtime import build

from tests.waiting import until
from workers.judge.forkserver.launchers import Launchers

POINTERS = ["*fp32", "*bf16", "i32", "constexpr"]


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake Triton that compiles a launcher for each sequence of types. The launcher's source names the types."""

    def compile_module_from_src(*, src: str, name: str, **_: Any) -> None:
        if "fp64" in src:
            raise RuntimeError("the compiler failed")
        folder = Path(os.environ["TRITON_CACHE_DIR"], src.replace(" ", "").replace("*", "p"))
        folder.mkdir()
        (folder / f"{name}.so").write_text(src)

    def make_launcher(constants: dict[Any, Any], signature: dict[int, str], tensordesc_meta: Any) -> str:
        assert not constants
        assert tensordesc_meta is None
        return " ".join(signature.values())

    monkeypatch.setattr(driver, "make_launcher", make_launcher, raising=False)
    monkeypatch.setattr(driver, "libraries", [], raising=False)
    monkeypatch.setattr(driver, "library_dirs", list, raising=False)
    monkeypatch.setattr(driver, "include_dirs", [], raising=False)
    monkeypatch.setattr(build, "compile_module_from_src", compile_module_from_src, raising=False)


def tell(launchers: Launchers, note: Path, told: Any) -> None:
    """Report types like a candidate, and wait until the launchers are compiled."""
    note.unlink(missing_ok=True)
    note.write_text(told if isinstance(told, str) else json.dumps(told))
    launchers.learn(note, os.getuid())
    until(lambda: launchers.look() or not launchers.pids)


def test_what_a_candidate_has_launched_later_ones_find(triton: None, tmp_path: Path) -> None:
    launchers = Launchers({"driver/utils.so": b"utils"})
    tell(launchers, tmp_path / "note", [POINTERS, ["fp64"], ["i64", "u1"]])
    assert {name: content.decode() for name, content in launchers.files.items()} == {
        "driver/utils.so": "utils",
        "pi8pi8i32constexpr/__triton_launcher.so": "*i8 *i8 i32 constexpr",
        "i64u1/__triton_launcher.so": "i64 u1",
    }


def test_nothing_else_is_taken_from_a_candidate(triton: None, tmp_path: Path) -> None:
    launchers = Launchers({"driver/utils.so": b""})
    wrong: list[Any] = ["", "[" * 100_000, {"a": 1}, [["*fp32; }"]], [["int main"]], [[["i32"]]], [[1]], ["i32"]]
    for told in (*wrong, [["i32"] * 65], [["*" + "f" * 17]]):
        tell(launchers, tmp_path / "note", told)
        assert list(launchers.files) == ["driver/utils.so"]


def test_a_note_is_a_file_of_the_candidate_s_own(triton: None, tmp_path: Path) -> None:
    launchers = Launchers({"driver/utils.so": b""})
    real, link, twice, pipe = (tmp_path / name for name in ("real", "link", "twice", "pipe"))
    real.write_text(json.dumps([["i32"]]))
    link.symlink_to(real)
    os.mkfifo(pipe)
    for note, owner in ((link, os.getuid()), (pipe, os.getuid()), (tmp_path, os.getuid()), (real, os.getuid() + 1)):
        launchers.learn(note, owner)
        assert not launchers.pids
    twice.hardlink_to(real)
    launchers.learn(real, os.getuid())
    assert not launchers.pids
