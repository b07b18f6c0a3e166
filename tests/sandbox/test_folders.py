"""Folders in environment variables: entries of every kind, tried by a user who is not root."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kqueue import folders
from kqueue.doctor import Result
from kqueue.folders import clean_environment
from kqueue.local import servers
from workers import doctor
from workers.judge.host import toolchain
from workers.judge.pipeline import tools
from workers.judge.sandbox import mounts, reach, seal, view

#: Uid of a user without an entry in /etc/passwd, and of no other test.
USER = 12322
#: Entries that are skipped, with a part of the reason. ``{}`` is the test's folder.
UNUSABLE = {
    "in a closed folder": ("{}/closed/bin", "Permission denied"),
    "closed": ("{}/closed", "Permission denied"),
    "loop": ("{}/loop", "symbolic links"),
    "file": ("{}/file", "Not a directory"),
    "below a file": ("{}/file/bin", "Not a directory"),
    "socket": ("{}/fifo", "Not a directory"),
    "missing": ("{}/none", "No such file"),
    "newline": ("{}/no\nne", "No such file"),
    "bytes": ("{}/\udcff", "No such file"),
    "long": ("{}" + "/x" * 3000, "too long"),
    "empty": ("", "absolute"),
    "relative": ("good", "absolute"),
    "here": (".", "absolute"),
}


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # Not a folder of pytest, which only root can enter, and not in /tmp, where nothing is readable.
    place = Path(f"/opt/kq-{os.getpid()}")
    for name in ("closed/bin", "good", "new\nline", *(f"m/{number}" for number in range(71))):
        (place / name).mkdir(parents=True)
    (place / "closed").chmod(0o700)
    (place / "loop").symlink_to("pool")
    (place / "pool").symlink_to("loop")
    (place / "file").touch()
    os.mkfifo(place / "fifo")
    yield place
    shutil.rmtree(place)


def as_user(work: Callable[[], Any], environment: dict[str, str]) -> Any:
    """Return what ``work`` returns in a fork of another user with these variables."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for name in folders.VARIABLES:
                os.environ.pop(name, None)
            os.environ.update(environment)
            os.chdir("/")
            seal.become(USER)
            os.write(writer, json.dumps(work()).encode())
        except BaseException:  # noqa: BLE001
            os.write(writer, json.dumps(traceback.format_exc()[-3000:]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        found = json.load(said)
    os.waitpid(child, 0)
    return found


def searched() -> dict[str, Any]:
    """Call all that searches these folders."""
    clean = clean_environment(os.environ)
    paths, _ = reach.find("")
    view.needed()
    mounts.find(paths.readable)
    tools._is_in_toolkit("nvcc")
    toolchain.program("nvcc")
    assert [*toolchain._toolkit(os.environ), *toolchain._compilers(os.environ)]
    told: Result = doctor._folders()
    kept = {name: clean[name].split(":") for name in folders.VARIABLES if name in clean}
    assert servers.clean_environment()["PATH"].split(":") == kept["PATH"][1:]
    return {"kept": kept, "readable": paths.readable, "told": told.detail}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_entry_that_cannot_be_used_is_skipped(root: Path, kind: str) -> None:
    """In each variable it is left out, all else works as without it, and `kqueue doctor` names it with the reason."""
    entry, why = (text.format(root) for text in UNUSABLE[kind])
    lists = dict.fromkeys(("PATH", "LD_LIBRARY_PATH"), f"{entry}:{root}/good:{entry}")
    found = as_user(searched, lists | {"CUDA_HOME": entry, "CUDA_PATH": f"{root}/good"})
    assert isinstance(found, dict), found
    assert found["kept"].pop("PATH")[-1] == f"{root}/good"
    assert found["kept"] == {"LD_LIBRARY_PATH": [f"{root}/good"], "CUDA_PATH": [f"{root}/good"]}
    assert f"{root}/good" in found["readable"]
    assert entry not in found["readable"]
    assert "\n" not in found["told"]
    assert (why in found["told"]) is (kind != "empty"), found["told"]


@pytest.mark.parametrize("name", ["PATH", "LD_LIBRARY_PATH"])
def test_any_number_and_name_of_folders_can_be_used(root: Path, name: str) -> None:
    """Thousands of folders, and one with a line feed in its name, are all in reach."""
    entries = [f"{root}/new\nline", *(f"{root}/m/{one}/../{other}" for one in range(71) for other in range(71))]
    found = as_user(searched, {"PATH": "/usr/bin:/bin"} | {name: ":".join(entries)})
    assert isinstance(found, dict), found
    assert set(entries) <= {*found["kept"][name]}
    assert {os.path.realpath(entry) for entry in entries} <= {*found["readable"]}


def test_the_report_has_one_short_line(root: Path) -> None:
    """However many entries are skipped, the first are named, and the rest are counted."""
    found = as_user(searched, {"PATH": ":".join(["/usr/bin", *(f"/none/{number}" for number in range(5000))])})
    assert "and 4995 more" in found["told"]
    assert len(found["told"]) < 1000
