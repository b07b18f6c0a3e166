"""`kqueue db`, `kqueue doctor`, and every command where a service is missing or of another version."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine, text

from kqueue.doctor import redact
from tests.cli.command import Cli

COMMANDS = [
    ("submit", "-p", "relu.py", "mine.py", "-b", "torch"),
    ("status",),
    ("show", "abcd"),
    ("db", "check"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]))
def test_an_unreachable_database_ends_with_3(cli: Cli, command: tuple[str, ...]) -> None:
    """One line names the setting to look at and never the password."""
    done = cli(*command, KQUEUE_DATABASE_URL="postgresql://someone:secret@127.0.0.1:1/kqueue")
    assert done.returncode == 3
    assert "KQUEUE_DATABASE_URL" in done.stderr
    assert "secret" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not-a-url", "KQUEUE_DATABASE_URL is not a URL"),
        ("mysql://u:secret@h/d", "kqueue needs postgresql"),
        ("", "no fleet found: set KQUEUE_DATABASE_URL, or start one on this machine with `kqueue up`"),
    ],
)
def test_a_wrong_address_ends_with_3(cli: Cli, url: str, message: str) -> None:
    """An address that cannot be one, or none at all, is told apart from a server that is away."""
    done = cli("results", KQUEUE_DATABASE_URL=url)
    assert done.returncode == 3
    assert message in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize("url", ["amqp://u:secret@h", "redis://:sec/ret@h:1/0"])
def test_a_wrong_address_of_redis_ends_with_3(cli: Cli, worker: UUID, url: str) -> None:
    """Nothing is submitted to a broker that cannot be one, and no part of a password is repeated."""
    done = cli("submit", "-p", "relu.py", "mine.py", "-b", "torch", KQUEUE_REDIS_URL=url)
    assert done.returncode == 3
    assert "KQUEUE_REDIS_URL is not" in done.stderr
    assert "sec" not in done.stderr


def test_a_bad_setting_is_named(cli: Cli) -> None:
    """A setting that cannot work ends with 3 and its name."""
    done = cli("results", KQUEUE_LEASE_S="soon")
    assert done.returncode == 3
    assert "KQUEUE_LEASE_S" in done.stderr


def test_a_schema_is_made_checked_and_told_from_another(cli: Cli, server: Any) -> None:
    """`db upgrade` makes the schema once; before that and with a newer one each command says what to do."""
    url = server.empty_database(f"test_{uuid4().hex}")
    known = Cli(cli.directory, {**cli.environment, "KQUEUE_DATABASE_URL": url})
    assert known("db", "current").stdout.startswith("database empty, kqueue ")
    missing = known("results")
    assert missing.returncode == 3
    assert "run `kqueue db upgrade`" in missing.stderr
    made = known("db", "upgrade")
    assert made.returncode == 0
    assert made.stdout.startswith("schema empty -> ")
    assert " -> " not in known("db", "upgrade").stdout
    assert known("db", "check").returncode == 0
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'from_the_future'"))
    engine.dispose()
    newer = known("submit", "-p", "relu.py", "mine.py", "-b", "torch")
    assert newer.returncode == 3
    assert "upgrade kqueue here" in newer.stderr
    server.drop(url)


def checks(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {(record["group"], record["name"]): record for record in records}


def test_doctor_looks_at_services_and_worker(cli: Cli, worker: UUID, tmp_path: Path) -> None:
    """Services with versions, torch, compilers and every feature of the sandbox have a line; what is broken fails."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    done = cli("doctor", "--json", KQUEUE_SCRATCH=str(closed / "scratch"))
    found = checks(done)
    services = ("postgres", "schema", "workers", "redis", "redis eviction")
    assert [found["services", name]["state"] for name in services] == ["ok"] * 5
    assert "1 on lane cpu" in found["services", "workers"]["detail"]
    assert found["services", "redis persistence"]["state"] in {"ok", "warn"}
    expected = {
        "gpu": {"driver", "torch", "triton", "cupy"},
        "compilers": {"c++", "python headers", "ninja", "nvcc"},
        "sandbox": {"user", "no_new_privs", "files", "seccomp", "user_namespace", "cgroup_kill", "isolation"}
        | {"scratch"},
    }
    for group, names in expected.items():
        assert names <= {name for where, name in found if where == group}
    records = found.values()
    assert all(record["fix"] or record["state"] in {"ok", "info"} or ": " in record["detail"] for record in records)
    # A fleet of root's gives its candidates other uids, to which a closed directory is closed.
    scratch = found["sandbox", "scratch"]
    assert scratch["state"] == ("fail" if os.geteuid() == 0 else "ok"), scratch
    assert done.returncode == any(record["state"] == "fail" for record in records)


def without_torch(directory: Path) -> dict[str, str]:
    """An environment in which torch is not installed, as far as Python can tell."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    return {"PYTHONPATH": str(directory)}


def test_a_client_without_torch_is_no_failure(cli: Cli, tmp_path: Path) -> None:
    """A host without torch is a client: told so, and nothing is broken."""
    done = cli("doctor", "--json", **without_torch(tmp_path / "site"))
    found = checks(done)
    assert found["gpu", "torch"]["state"] == "info"
    assert "not a worker" in found["gpu", "torch"]["detail"]
    assert found["services", "workers"]["state"] == "warn"
    assert done.returncode == 0, done.stdout


def test_doctor_says_what_is_broken(cli: Cli, tmp_path: Path) -> None:
    """Services out of reach are failures with what to look at; passwords stay hidden."""
    done = cli(
        "doctor",
        KQUEUE_DATABASE_URL="postgresql://someone:secret@127.0.0.1:1/kqueue",
        KQUEUE_REDIS_URL="redis://:secret@127.0.0.1:1/0",
        **without_torch(tmp_path / "site"),
    )
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  fail")] == [
        ["fail", "postgres"],
        ["fail", "redis"],
    ]
    assert "check KQUEUE_DATABASE_URL" in done.stdout
    assert "check KQUEUE_REDIS_URL" in done.stdout
    assert "127.0.0.1:1/kqueue" in done.stdout
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://user:pass@host/db", "postgresql+psycopg://***@host/db"),
        ("redis://:p@ss/w?rd#x@host:6379/0", "redis://***@host:6379/0"),
        ("redis://host/0", "redis://host/0"),
        (
            "postgresql://host/db?sslmode=require&password=x&user=u",
            "postgresql://host/db?sslmode=require&password=***&user=u",
        ),
        ("redis+socket:///run/valkey.sock", "redis+socket:///run/valkey.sock"),
        ("secret", "(not a URL)"),
    ],
)
def test_addresses_are_shown_without_secrets(url: str, shown: str) -> None:
    """Whatever a password is made of, nothing of it is shown."""
    assert redact(url) == shown
