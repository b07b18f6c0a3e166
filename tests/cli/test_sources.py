"""Files of every kind, given to every command that reads sources."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from uuid import UUID

import pytest

from tests.cli.command import KERNEL, PROBLEM, Cli

#: Commands that read a file, which stands for ``{}``.
COMMANDS = {
    "judge": "judge problem.py {}",
    "judge's problem": "judge {} kernel.py",
    "submit": "submit -p problem.py {}",
    "submit's problem": "submit -p {} kernel.py",
    "submit's settings": "submit -p problem.py kernel.py --settings {}",
    "duel": "duel problem.py kernel.py {} -b torch",
    "duel's problem": "duel {} kernel.py kernel.py -b torch",
    "effect": "effect {} --problem problem.py --model llama -b torch",
    "effect's recipe": "effect kernel.py --problem problem.py --model {} -b torch",
    "tune": "tune {} --problem problem.py --grid A=1,2",
    "tune's problem": "tune kernel.py --problem {} --grid A=1,2",
    "tournament": "tournament problem.py {}",
    "tournament's problem": "tournament {} kernel.py",
    "autopsy": "autopsy {} -p problem.py --device cpu -b torch",
    "autopsy's problem": "autopsy kernel.py -p {} --device cpu -b torch",
    "sanitize": "sanitize {} -p problem.py --device cpu -b torch",
    "profile": "profile {} -p problem.py --device cpu -b torch",
    "search": "search --problem {} --recorded kernels",
    "search's kernel": "search --problem problem.py --kernel {} --recorded kernels",
    "rejudge": "rejudge {} --out out",
    "import": "problems import {}",
}
#: Files that are no source. Each is refused, whatever the command expects.
BAD = ("pipe", "socket", "/dev/zero", "loop", "closed/kernel.py", "bytes.py", "huge.py", "missing.py")


@pytest.fixture(autouse=True)
def good(cli: Cli) -> None:
    """Write good files beside the bad one."""
    cli.write("problem.py", PROBLEM)
    cli.write("kernel.py", KERNEL)
    cli.write("kernels/one.py", KERNEL)


def make(root: Path, name: str) -> None:
    """Make a bad file."""
    path = root / name
    match name:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
        case "loop":
            path.symlink_to(name)
        case "closed/kernel.py":
            path.parent.touch()  # root may enter every folder, but not a file
        case "bytes.py":
            path.write_bytes(b"\xff\xfe" * 10)
        case "huge.py":
            path.touch()
            os.truncate(path, 1 << 33)
        case _:
            pass


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_at_once(cli: Cli, worker: UUID, name: str) -> None:
    """Each command names the file, ends with an error, and neither waits nor prints a traceback."""
    make(cli.directory, name)
    wrong = dict[str, str]()
    for which, line in COMMANDS.items():
        begun = time.monotonic()
        done = cli(*line.format(name).split())
        said = done.stdout + done.stderr
        named = done.returncode in (1, 2, 3) and name.rpartition("/")[2] in said and "Traceback" not in said
        if not named or time.monotonic() - begun > 20:
            wrong[which] = f"{done.returncode}: {said}"
    assert wrong == {}


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("kernel.cu", "compile it there by torch.utils.cpp_extension.load_inline"),
        ("kernel.PTX", "give the source from which it was compiled"),
        ("kernel.cubin", "give the source from which it was compiled"),
        ("kernel.mojo", "there is no backend for Mojo"),
        ("kernels.tar.gz", "unpack it"),
        ("folder", "no .py file in this folder: a kernel is one"),
    ],
)
def test_what_is_no_python_is_refused_with_advice(cli: Cli, name: str, advice: str) -> None:
    """Sources of other languages, binaries, archives and folders of them are told what a kernel is."""
    cli.write(f"{name}/kernel.cu" if name == "folder" else name, "int x;")
    done = cli("judge", "problem.py", name)
    assert (done.returncode, advice in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    "command", ["submit -p problem.py kernel.py --batch", "status --batch", "results --batch", "show"]
)
def test_arguments_are_text(cli: Cli, command: str) -> None:
    """Bytes that are not UTF-8 are refused in every argument of every command."""
    done = cli.process(*command.split(), "caf\udce9")
    assert (done.returncode, "must be UTF-8" in done.stderr, "Traceback" in done.stderr) == (2, True, False), (
        done.stderr
    )


@pytest.mark.parametrize(
    "command",
    ["judge problem.py {}", "submit -p problem.py {}", "tournament problem.py {}", "submit -p problem.py {}/*.py"],
)
def test_too_many_kernels_are_refused(cli: Cli, command: str) -> None:
    """More kernels than a command may hold in memory are refused before one is read."""
    many = cli.directory / "many"
    many.mkdir()
    for number in range(10_001):
        os.link(cli.directory / "kernel.py", many / f"{number}.py")
    done = cli(*command.format("many").split())
    assert (done.returncode, "10001 kernels: give at most 10000" in done.stderr) == (2, True), done.stderr


def test_links_to_folders_above_are_not_followed(cli: Cli) -> None:
    """A glob ends, although folders contain each other, and matches no hidden folder that it does not name."""
    for name in ("a", "b", "c", "d"):
        (cli.directory / "kernels" / name).symlink_to("..")
    (cli.directory / "kernels" / ".hidden").mkdir()
    cli.write("kernels/.hidden/two.py", "")
    cli.write("kernels/other.txt", "")
    begun = time.monotonic()
    for pattern, named in {
        "**/one.py": "kernels/one.py",
        f"{cli.directory}/**/two.py": "no file matches",
        "kernels/.hidden/*.py": "kernels/.hidden/two.py: the file is empty",
    }.items():
        done = cli("judge", "missing.py" if named == "kernels/one.py" else "problem.py", pattern)
        assert named in done.stderr or named == "kernels/one.py", done.stderr
    assert time.monotonic() - begun < 20
