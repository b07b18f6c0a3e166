"""The compose files as Compose reads them, without starting a service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kqueue.contract import Deadlines
from kqueue.limits import hard_limit_s
from tests.compose.program import CPU, GPU, ROOT, SECRETS, Compose
from workers.judge.host import uids


@pytest.fixture(scope="module", params=[GPU, CPU], ids=["gpu", "cpu"])
def merged(compose: Compose, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the merged files with every profile, which Compose accepts without a warning."""
    done = compose(request.param, "--profile", "*", "config", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_missing_secret_is_an_error(compose: Compose) -> None:
    """Without one of its secrets, or with an empty one, no stack starts, and the message has the remedy."""
    text = (ROOT / GPU[0]).read_text()
    assert [name for name in SECRETS if f"${{{name}:?is not set - run `make env`}}" not in text] == []
    for value in (None, ""):
        done = compose(CPU, "config", "-q", environment={SECRETS[0]: value})
        assert done.returncode != 0
        assert SECRETS[0] in done.stderr
        assert "make env" in done.stderr


def test_files_hold_no_secret() -> None:
    """Every password in the files is a reference to the environment."""
    for file in (*CPU, "docker/Dockerfile", ".env.example"):
        for line in (ROOT / file).read_text().splitlines():
            literal = re.sub(r"\$\{[^}]*\}", "", line.partition("#")[0])
            assert not re.search(r"(PASSWORD|AUTH|requirepass|>)\s*[:= ]\s*[\"']?\w", literal), f"{file}: {line}"
            assert not re.search(r"://\w*:[^/\s@]+@", literal), f"{file}: {line}"


def test_only_the_windows_are_published_and_on_loopback(merged: dict[str, Any]) -> None:
    """Only the windows are published, on loopback only."""
    services = merged["services"]
    published = {(name, port["host_ip"]) for name, service in services.items() for port in service.get("ports", [])}
    assert published == {(name, "127.0.0.1") for name in ("flower", "http", "prometheus", "grafana")}
    assert not any(service.get("network_mode") for service in services.values())


def test_services_and_workers_have_no_way_out(merged: dict[str, Any]) -> None:
    """Services and workers can reach only the fleet's networks."""
    assert merged["networks"]["services"]["internal"] is True
    on = {name: set(service["networks"]) for name, service in merged["services"].items()}
    assert on.pop("flower") == on.pop("http") == {"services", "window"}
    assert on.pop("prometheus") == on.pop("grafana") == {"window"}
    assert all(networks == {"services"} for networks in on.values())


def test_no_service_holds_the_host(merged: dict[str, Any]) -> None:
    """No service is privileged, has Docker's socket or the host's namespaces, or can gain privileges."""
    for name, service in merged["services"].items():
        assert not service.get("privileged"), name
        assert not {"pid", "ipc", "userns_mode", "devices"} & set(service), name
        assert "no-new-privileges:true" in service["security_opt"], name
        for volume in service.get("volumes", []):
            assert volume["type"] == "volume" or volume.get("read_only"), name
            assert "docker.sock" not in volume["source"], name


def test_only_workers_have_capabilities(merged: dict[str, Any]) -> None:
    """kqueue's services drop every capability, except those with which the worker gives candidates their uids."""
    services = merged["services"]
    for name in ("worker", "migrate", "prune", "tokens", "flower", "http", "client"):
        assert services[name]["cap_drop"] == ["ALL"], name
        assert services[name]["read_only"] is True, name
        assert bool(services[name].get("cap_add")) is (name == "worker"), name
    assert set(services["worker"]["cap_add"]) == {"CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"}


def test_what_a_worker_may_write_to(merged: dict[str, Any]) -> None:
    """The worker can write to few places, executes files only in the scratch directory, and has a folder for locks."""
    worker = merged["services"]["worker"]
    options = dict(mount.split(":", 1) for mount in worker["tmpfs"])
    assert set(options) & set(uids.PARENTS)
    assert "exec" in options.pop(worker["environment"]["KQUEUE_SCRATCH"]).split(",")
    assert not any("exec" in text.split(",") for text in options.values())


def test_a_stop_waits_for_the_longest_evaluation(merged: dict[str, Any]) -> None:
    """With the default deadlines Celery's hard limit comes before Docker's."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", merged["services"]["worker"]["stop_grace_period"])
    assert found
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    assert 3600 * hours + 60 * minutes + seconds > hard_limit_s(Deadlines().total_s) + 10


def test_each_service_knows_its_own_secrets_only(merged: dict[str, Any], secret_values: dict[str, str]) -> None:
    """Each service gets only its passwords, and only jobs get the owner's."""
    wanted = {
        "redis": {"REDIS_PASSWORD"},
        "postgres": {"POSTGRES_PASSWORD"},
        "migrate": {name for name in SECRETS if name.startswith("POSTGRES_")},
        "prune": {"POSTGRES_PASSWORD", "REDIS_WORKER_PASSWORD"},
        "worker": {"POSTGRES_WORKER_PASSWORD", "REDIS_WORKER_PASSWORD"},
        "client": {"POSTGRES_PRODUCER_PASSWORD", "REDIS_PRODUCER_PASSWORD"},
        "flower": {"REDIS_FLOWER_PASSWORD", "FLOWER_AUTH"},
        "http": {"POSTGRES_GATEWAY_PASSWORD", "REDIS_PRODUCER_PASSWORD"},
        "tokens": {"POSTGRES_PASSWORD"},
        "prometheus": set(),
        "grafana": {"GRAFANA_PASSWORD"},
    }
    services = merged["services"]
    assert set(services) == set(wanted)
    for service, definition in services.items():
        given = json.dumps(definition)
        assert {name for name, value in secret_values.items() if value in given} == wanted[service], service


def test_make_env_makes_what_lacks(compose: Compose, tmp_path: Path) -> None:
    """It creates every secret once, readable by the owner only, and a second run only adds new ones."""
    (tmp_path / ".env.example").write_text((ROOT / ".env.example").read_text())
    command = [sys.executable, str(ROOT / "scripts" / "env.py"), str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    file = tmp_path / ".env"
    made = dict(re.findall(r"^([A-Z_]+)=(.+)$", file.read_text(), re.MULTILINE))
    assert set(made) == set(SECRETS)
    assert len(set(made.values())) == len(SECRETS)
    assert not any(value in first.stdout for value in made.values())
    assert file.stat().st_mode & 0o777 == 0o600
    done = compose(CPU, "--env-file", str(file), "config", "-q", environment=dict.fromkeys(SECRETS))
    assert done.returncode == 0, done.stderr

    kept = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("REDIS_FLOWER_PASSWORD"))
    file.write_text(kept + "\nMINE=1\n")
    subprocess.run(command, capture_output=True, check=True)
    again = dict(re.findall(r"^([A-Z_]+)=(.+)$", file.read_text(), re.MULTILINE))
    assert again.pop("MINE") == "1"
    assert again.pop("REDIS_FLOWER_PASSWORD") != made.pop("REDIS_FLOWER_PASSWORD")
    assert again == made


def test_example_names_every_setting() -> None:
    """.env.example has each variable that the files read, and no other."""
    read: set[str] = set()
    for file in CPU:
        read |= set(re.findall(r"(?:\$\{|\{ environment: )(\w+)", (ROOT / file).read_text()))
    shown = set(re.findall(r"^#?([A-Z][A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert shown - {"COMPOSE_FILE"} == read
