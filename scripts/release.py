"""`make release`: build a release from the last commit into `dist/release`, and check it as its users will use it.

It makes the wheel, the sdist, the context of the images, the notes, the bill of materials and the checksums. Then, for
each Python on this machine, an empty environment gets the wheel with the extra `fleet`, judges a kernel and runs a
fleet. The first of them also takes over the database of the last release, and must refuse the one of a later version.
`--draft` permits a version without a date in CHANGELOG.md. The last lines name the skipped checks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import bootstrap

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "dist" / "release"
MINORS = (11, 12, 13, 14)
#: Files of the images' context besides those that their .dockerignore permits: compose, Kubernetes, Slurm.
CONTEXT = [".dockerignore", ".env.example", "LICENSE", "README.md", "deploy", "docker", "docker-compose.cpu.yml"]
CONTEXT += ["docker-compose.yml", "kqueue", "migrations", "pyproject.toml", "scripts/env.py", "workers"]
#: Extras of an environment without torch.
WITHOUT_TORCH = "embedded,http,plots,server"
REFUSAL = "it was made by a newer version, so upgrade kqueue here"
UP_S = 300
SET_REVISION = """
import sys, psycopg
from pathlib import Path
from kqueue.local.servers import Postgres
from kqueue.store import schema
with Postgres(Path(sys.argv[1])) as server:
    schema.upgrade(server.url)
    with psycopg.connect(server.url.replace("+psycopg", "")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = coalesce(%s, version_num)", sys.argv[2:] or [None])
"""


class Failure(Exception):
    """A check that failed."""


def run(*command: str | Path, **options: Any) -> str:
    """Run a command, and return its output. Raise a Failure with the output if its status is not 0."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if done.returncode != 0:
        raise Failure(f"this failed with {done.returncode}: {' '.join(map(str, command))}\n{done.stdout[-4000:]}")
    return done.stdout


def tell(line: str) -> None:
    print(f"release: {line}", flush=True)


def archive(commit: str, folder: Path) -> Path:
    """Extract the files of a commit into a new folder, and return the folder."""
    folder.mkdir()
    run("git", "archive", "-o", f"{folder}.tar", commit, cwd=ROOT)
    run("tar", "-xf", f"{folder}.tar", "-C", folder)
    return folder


def version_of(folder: Path) -> str:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]


def before() -> str | None:
    """Return the tag of the version before, or None before the first release."""
    command = ["git", "describe", "--tags", "--match", "v[0-9]*", "--abbrev=0", "HEAD^"]
    tag = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return tag.stdout.strip() if tag.returncode == 0 else None


def build(tree: Path, out: Path, work: Path) -> list[Path]:
    """Build the sdist, and the wheel from it. Check their descriptions. Return both."""
    run(sys.executable, "-m", "venv", work / "tools")
    python = work / "tools" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "build", "twine")
    moment = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    run(python, "-m", "build", "--outdir", out, tree, env={**os.environ, "SOURCE_DATE_EPOCH": moment})
    made = sorted(path for path in out.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    run(python, "-m", "twine", "check", "--strict", *made)
    return made


def interpreter(minor: int) -> str | None:
    """Return a Python 3.``minor`` of this machine, from PATH or from pyenv, whose shims on PATH can refuse to run."""
    name = f"python3.{minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for path in filter(None, [shutil.which(name), *map(str, sorted(pyenv.glob(f"3.{minor}.*/bin/{name}")))]):
        if subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return path
    return None


class Environment:
    """An empty environment with one of the wheels."""

    def __init__(self, folder: Path, python: str, minor: int, examples: Path) -> None:
        run(python, "-m", "venv", folder)
        self.python = folder / "bin" / "python"
        self._kqueue = folder / "bin" / "kqueue"
        self._examples = examples
        # Nothing of this process's own settings, and no module of the tree, reaches a program in the environment.
        self._variables = {name: one for name, one in os.environ.items() if not name.startswith(("KQUEUE_", "PYTHON"))}
        self._folder = folder
        local = bootstrap.cpu_wheels(bootstrap.pip_setting("find-links"), f"3.{minor}")
        source = [f"torch=={local[-1]}"] if local else ["torch", "--index-url", bootstrap.CPU_INDEX]
        try:
            self.pip(*source, "--retries", "0", "--timeout", "20")
            self.has_torch = True
        except Failure:
            self.has_torch = False

    def pip(self, *words: str | Path) -> None:
        run(self.python, "-m", "pip", "install", "-q", *words, env=self._variables)

    def kqueue(self, *words: str | Path, home: Path | None = None) -> str:
        """Run the installed command in the environment's folder."""
        variables = self._variables | ({"KQUEUE_HOME": str(home)} if home else {})
        return run(self._kqueue, *words, cwd=self._folder, env=variables)

    def judge(self) -> None:
        """Judge a kernel without a fleet."""
        shown = self.kqueue("judge", "--device", "cpu", self._problem, self._examples / "kernels/good/torch/softmax.py")
        if "CORRECT: right on" not in shown:
            raise Failure(f"kqueue judge printed:\n{shown}")

    @property
    def _problem(self) -> Path:
        return self._examples / "problems" / "softmax.py"

    @contextmanager
    def up(self, home: Path) -> Iterator[None]:
        """Run a fleet during the block."""
        command = [self._kqueue, "up", "--gpus", "none", "--cpu-slots", "1", "--http-port", "0", "--flower-port", "0"]
        log = home.with_name(f"{home.name}.log")
        with log.open("a") as file:
            variables = self._variables | {"KQUEUE_HOME": str(home)}
            fleet = subprocess.Popen(command, cwd=self._folder, env=variables, stdout=file, stderr=file)
        try:
            deadline = time.monotonic() + UP_S
            while not (home / "fleet.json").exists():
                if fleet.poll() is not None or time.monotonic() > deadline:
                    raise Failure(f"kqueue up: {fleet.poll()}\n{log.read_text()[-4000:]}")
                time.sleep(0.2)
            yield
        finally:
            fleet.send_signal(signal.SIGINT)
            status = fleet.wait(120)
        if status != 0:
            raise Failure(f"kqueue up ended with {status}:\n{log.read_text()[-4000:]}")

    def submit(self, home: Path, batch: str) -> dict[str, str]:
        """Judge kernels with the fleet. Return the categories of all evaluations so far by their ids."""
        kernels = [self._examples / "kernels" / name for name in ("good/torch/softmax.py", "bad/segfault.py")]
        words = ["submit", "--fresh", "--lane", "cpu", "--backend", "torch", "--batch", batch]
        self.kqueue(*words, "--problem", self._problem, *kernels, home=home)
        with suppress(Failure):  # one of the kernels crashes
            self.kqueue("watch", batch, home=home)
        rows = map(json.loads, self.kqueue("results", "--json", home=home).splitlines())
        found = {row["evaluation_id"]: row["category"] for row in rows}
        if sorted(found.values()) != sorted(["passed", "crashed"] * (len(found) // 2)) or not found:
            raise Failure(f"the fleet judged: {found}")
        return found

    def refuses(self, home: Path) -> None:
        """Check that a fleet does not start on the database of a later version, and names the remedy."""
        try:
            with self.up(home):
                pass
        except Failure as failure:
            if REFUSAL in str(failure):
                return
            raise
        raise Failure("kqueue up started on the database of a later version")


def upgrade(one: Environment, old: Path, new: Path, home: Path) -> None:
    """Judge with the version before, then with this one on the same database."""
    one.pip("--no-deps", "--force-reinstall", old)
    with one.up(home):
        earlier = one.submit(home, "before")
    one.pip("--no-deps", "--force-reinstall", new)
    with one.up(home):
        now = one.submit(home, "after")
    if not earlier.items() <= now.items() or len(now) != 2 * len(earlier):
        raise Failure(f"the upgrade lost verdicts: {earlier}, then {now}")


def main() -> int:
    """Run the program. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", action="store_true", help="permit a version without a date")
    draft = parser.parse_args().draft
    work = Path(tempfile.mkdtemp(prefix="kqueue-release-"))
    work.chmod(0o755)  # for sealed processes of other users
    try:
        for line in make(work, draft=draft):
            tell(f"skipped: {line}")
    except (Failure, bootstrap.Failure) as failure:
        print(f"release: {failure}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tell(f"ready in {OUT}")
    return 0


def make(work: Path, *, draft: bool) -> list[str]:
    """Build and check the release. Return the skipped checks."""
    skipped: list[str] = []
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    tree = archive("HEAD", work / "tree")
    version = version_of(tree)
    name = f"kqueue-{version}"
    notes = run(sys.executable, ROOT / "scripts" / "notes.py", version, *([] if draft else ["--dated"]))
    (OUT / "NOTES.md").write_text(notes)
    run(sys.executable, ROOT / "scripts" / "schemas.py", "--check", "--current")
    for schema in (tree / "docs" / "schemas").iterdir():
        shutil.copy(schema, OUT / f"{name}-{schema.name}")
    tell(f"building {name}")
    wheel = next(path for path in build(tree, OUT, work) if path.suffix == ".whl")
    run("git", "archive", "-o", OUT / f"{name}-images.tar.gz", f"--prefix={name}/", "HEAD", *CONTEXT, cwd=ROOT)
    first = True
    for minor in MINORS:
        python = interpreter(minor)
        if python is None:
            skipped.append(f"Python 3.{minor}, which this machine has not")
            continue
        tell(f"checking it with {python}")
        one = Environment(work / f"python3.{minor}", python, minor, tree / "examples")
        one.pip(f"{wheel}[{'fleet' if one.has_torch else WITHOUT_TORCH}]")
        if one.kqueue("--version").strip() != f"kqueue {version}":
            raise Failure(f"it is another version: {one.kqueue('--version')}")
        if not one.has_torch:
            run(one.python, "-c", SET_REVISION, work / f"postgres3.{minor}", cwd=work)
            skipped.append(f"judge and up with Python 3.{minor}, for which no build of torch for the CPU was found")
            continue
        one.judge()
        with one.up(work / f"home3.{minor}"):
            one.submit(work / f"home3.{minor}", "new")
        if first:
            first = False
            bill = OUT / f"{name}.cdx.json"
            words = ["environment", "--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "-o", bill]
            run(sys.executable, "-m", "cyclonedx_py", *words, one.python)
            home = work / f"home3.{minor}"
            if tag := before():
                tell(f"upgrading from {tag}")
                run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", work, archive(tag, work / "before"))
                home = work / "upgraded"
                upgrade(one, next(work.glob("kqueue-*.whl")), wheel, home)
            else:
                skipped.append("the upgrade from the version before, because no release has a tag")
            run(one.python, "-c", SET_REVISION, home / "postgres", "9999", cwd=home)
            one.refuses(home)
    if first:
        raise Failure("no Python here can judge: install torch's build for the CPU")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(OUT.iterdir())]
    (OUT / "SHA256SUMS").write_text("".join(sums))
    return skipped


if __name__ == "__main__":
    sys.exit(main())
