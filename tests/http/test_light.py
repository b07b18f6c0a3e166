"""The light client, in environments that hold the packages of its requirements alone."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.http.standin import Served

ROOT = Path(__file__).parents[2]
PRODUCER = Path(__file__).with_name("producer.py")
Run = Callable[..., subprocess.CompletedProcess[str]]
#: The words of a client that needs the database's packages.
REFUSED = "ConfigError: a fleet's database and queue need more packages: `pip install 'kqueue[database]'`"
#: Packages that the client is installed beside.
OTHERS = [
    "verl", "trl", "vllm", "sglang", "ray", "verifiers", "skyrl-gym", "nemo-gym", "openenv", "inspect-ai", "mlflow",
    "wandb", "shinka-evolve", "openevolve", "gepa", "optuna", "flashinfer-bench", "kernelfoundry[algo]",
    "apache-airflow", "prefect", "duckdb", "pandas", "datasets", "in-toto", "opentelemetry-sdk", "langchain",
]  # fmt: skip
BOUNDS = ("lowest-direct", "highest")


def uv(*command: str) -> str:
    """Run `uv pip`, and return what it prints."""
    program = [str(Path(sys.executable).with_name("uv")), "pip", *command, "--no-python-downloads", "--quiet"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def installed(*extras: str) -> dict[str, metadata.Distribution]:
    """Return what an installation with these extras brings, by name."""
    requirements = runpy.run_path(str(ROOT / "docker" / "requirements.py"))["requirements"]
    found, open_ = {"kqueue": metadata.distribution("kqueue")}, requirements(ROOT / "pyproject.toml", [*extras])
    while open_:
        one = Requirement(open_.pop())
        if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found[one.name] = metadata.distribution(one.name)
            open_ += found[one.name].requires or []
    return found


def linked(folder: Path, *extras: str) -> Path:
    """Return a folder with links to these packages alone."""
    for one in installed(*extras).values():
        for top in {file.parts[0] for file in one.files or () if ".." not in file.parts}:
            if not (folder / top).exists():
                (folder / top).symlink_to(one.locate_file(top))
    return folder


@pytest.fixture(scope="module", params=["present", *(pytest.param(one, marks=pytest.mark.nightly) for one in BOUNDS)])
def ways(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The paths of environments by extra: with the packages of this one, or the lowest or newest that are allowed."""
    paths = {extra: tmp_path_factory.mktemp("light") for extra in ("", "cli")}
    if request.param == "present":
        return {extra: f"{linked(path, *extra.split())}:{ROOT}" for extra, path in paths.items()}
    for extra, path in paths.items():
        uv("install", "--target", str(path), "--resolution", request.param, f"{ROOT}[{extra}]")
    return {extra: str(path) for extra, path in paths.items()}


@pytest.fixture
def light(ways: dict[str, str], served: Served, tmp_path: Path) -> Run:
    """A function that runs a program with the packages of an extra alone."""

    def run(extra: str, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": ways[extra]}
        environment |= {"KQUEUE_URL": served.url, "KQUEUE_TOKEN": served.admin}
        program = [sys.executable, "-S", *command]
        return subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_it_is_small() -> None:
    """The requirements bring at most 8 packages, and 12 MB with kqueue itself."""
    packages = installed()
    assert len(packages) <= 8, sorted(packages)
    own = [file for name in ("kqueue", "workers", "migrations") for file in (ROOT / name).rglob("*")]
    files = [*own, *(Path(str(one.locate_file(file))) for one in packages.values() for file in one.files or ())]
    size = sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".pyc")
    assert size <= 12e6, size


def test_a_producer_needs_no_more(light: Run, judging: None) -> None:
    """A program submits, waits and reads rewards with the required packages, and is told what a fleet needs."""
    done = light("", str(PRODUCER))
    assert (done.returncode, done.stdout) == (0, f"{REFUSED}, or set KQUEUE_URL alone"), done.stderr
    done = light("", "-m", "kqueue", "status")
    assert (done.returncode, done.stderr) == (
        3, "kqueue: commands need typer and more packages: `pip install 'kqueue[cli]'`\n",
    )  # fmt: skip


def test_commands_reach_a_fleet_by_its_url(light: Run, judging: None, tmp_path: Path) -> None:
    """Commands submit, wait and report with the packages of the extra `cli`, and name the extra that they lack."""
    (tmp_path / "problem.py").write_text("class Model: ...\n\ndef get_inputs(): ...\n\ndef get_init_inputs(): ...\n")
    (tmp_path / "kernel.py").write_text("class ModelNew: ...\n")
    files = ("--problem", str(tmp_path / "problem.py"), "--kernel", str(tmp_path / "kernel.py"), "--backend", "torch")
    done = light("cli", "-m", "kqueue", "submit", *files, "--lane", "cpu", "--batch", "b", "--wait", "--json")
    assert (done.returncode, '"category": "passed"' in done.stdout) == (0, True), done.stderr
    done = light("cli", "-m", "kqueue", "results", "--batch", "b")
    assert (done.returncode, "passed" in done.stdout) == (0, True), done.stderr
    done = light("cli", "-m", "kqueue", "serve")
    assert (done.returncode, "pip install 'kqueue[fleet]'" in done.stderr) == (3, True), done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("other", OTHERS)
def test_it_installs_beside_others(other: str, tmp_path: Path) -> None:
    """The client and its commands resolve together with another package, which does not fall back to an older one."""
    for name, needs in (("alone", [other]), ("together", [other, f"kqueue[cli] @ {ROOT.as_uri()}"])):
        (tmp_path / name).write_text("\n".join(needs))
    given = ("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_28", "--no-header", "--no-annotate")
    alone, together = (uv("compile", str(tmp_path / name), *given).splitlines() for name in ("alone", "together"))
    [found] = [line for line in alone if line.partition("==")[0] == other.partition("[")[0]]
    assert found in together
