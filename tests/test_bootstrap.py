"""The script of `make`: its choices and its error messages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import types
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return the script as a module in an empty tree without `.venv`, and without the caller's settings."""
    script = tmp_path / "scripts" / "bootstrap.py"
    script.parent.mkdir()
    for file in (SCRIPT, SCRIPT.parents[1] / "pyproject.toml"):
        shutil.copy(file, tmp_path / file.relative_to(SCRIPT.parents[1]))
    spec = importlib.util.spec_from_file_location("bootstrap", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("KQUEUE_TORCH", "KQUEUE_WHEELHOUSE", "UV_FIND_LINKS", "UV_DEFAULT_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    return module


def test_old_python_is_refused(bootstrap: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Below 3.11 the script prints the required Python and the option to choose one."""
    assert bootstrap.main((3, 10, 13, "final", 0)) == 1
    assert "BOOTSTRAP_PYTHON" in capsys.readouterr().err


def test_local_cpu_builds_are_found(bootstrap: types.ModuleType, tmp_path: Path) -> None:
    """Only builds for this interpreter within the accepted versions count, and the newest is last."""
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for text in ("2.9.1+cpu", "2.13.0+cpu", "2.11.0+cpu", "2.16.0+cpu"):
        (tmp_path / f"torch-{text}-{here}-{here}-manylinux_2_28_x86_64.whl").touch()
    (tmp_path / "torch-2.14.0+cpu-cp27-cp27-manylinux_2_28_x86_64.whl").touch()
    (tmp_path / f"torch-2.14.0-{here}-{here}-manylinux_2_28_x86_64.whl").touch()
    assert bootstrap.cpu_wheels([str(tmp_path)]) == ["2.11.0+cpu", "2.13.0+cpu"]
    assert bootstrap.cpu_wheels([str(tmp_path / "missing")]) == []
    assert bootstrap.cpu_wheels([str(tmp_path)], "3.99") == []


def test_uv_gets_what_pip_is_configured_to(bootstrap: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv gets pip's folders, index and certificate, which it does not read itself, unless it has its settings."""
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


@pytest.mark.nightly
def test_the_torch_of_a_virtual_environment_is_kept(
    bootstrap: types.ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`.venv` has the packages of the virtual environment whose interpreter runs the script, if it has torch."""
    if not bootstrap.is_venv():
        pytest.skip("these tests run outside of a virtual environment")
    asked: list[tuple[str, ...]] = []
    installer = types.SimpleNamespace(install=lambda *what: asked.append(what))  # no test depends on a registry
    bootstrap.environment(lambda _house: installer)
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
    bootstrap: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment counts as complete only after the whole installation."""
    venv.create(tmp_path / ".venv", with_pip=False)
    bootstrap.KEY.touch()
    monkeypatch.setenv("KQUEUE_TORCH", "skip")

    def install(*what: str) -> None:
        raise bootstrap.Failure("the registry is away")

    for _ in range(2):
        with pytest.raises(bootstrap.Failure, match="the registry is away"):
            bootstrap.environment(lambda _house: types.SimpleNamespace(install=install))
    assert not bootstrap.KEY.read_text()


@pytest.mark.parametrize(("made_by_make", "version"), [(False, sys.version_info[:2]), (True, (3, 1))])
def test_an_environment_in_use_is_not_replaced(
    bootstrap: types.ModuleType, tmp_path: Path, made_by_make: bool, version: tuple[int, int]
) -> None:
    """A `.venv` of the user or of another Python stays, and the refusal names the torch in it."""
    python = tmp_path / ".venv" / "bin" / "python"
    torch = tmp_path / ".venv" / "lib" / "python3.1" / "site-packages" / "torch-2.13.0.dist-info"
    for folder in (python.parent, torch):
        folder.mkdir(parents=True)
    python.touch()
    settings = f"include-system-site-packages = false\nversion = {version[0]}.{version[1]}.1\n"
    (tmp_path / ".venv" / "pyvenv.cfg").write_text(settings)
    if made_by_make:
        bootstrap.KEY.touch()
    with pytest.raises(bootstrap.Failure, match=r"would be replaced, with torch-2\.13\.0 in it"):
        bootstrap.make_venv(system_packages=False)
    assert torch.exists()
