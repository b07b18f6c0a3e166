"""`kqueue db`, `kqueue doctor`, and every command with a service that is missing or has another version."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, text

from kqueue import doctor
from kqueue.categories import Category
from kqueue.config import Config, load
from kqueue.contract import Outcome, Phase
from kqueue.doctor import redact
from kqueue.store import gpus
from tests.cli.command import Cli, judge
from workers.judge.host import uids

#: Kernels for the deep check that need no compiler on a CPU.
JUDGED = ("torch", "wrong kernel", "endless kernel", "seed", "operations", "triton kernel")
SUBMIT = ("submit", "-p", "relu.py", "mine.py", "-b", "torch")


def test_an_unreachable_database_ends_with_3(cli: Cli) -> None:
    """One line names the setting, and never the password."""
    for command in (SUBMIT, ("status",), ("show", "abcd"), ("db", "check")):
        done = cli(*command, KQUEUE_DATABASE_URL="postgresql://someone:secret@127.0.0.1:1/kqueue")
        assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
        assert "KQUEUE_DATABASE_URL" in done.stderr
        assert "secret" not in done.stderr


def test_a_setting_that_cannot_work_ends_with_3(cli: Cli, worker: UUID) -> None:
    """Invalid settings exit with 3 and a message that names the setting without a password."""
    for command, name, value, message in (
        (("results",), "DATABASE_URL", "not-a-url", "KQUEUE_DATABASE_URL is not a URL"),
        (("results",), "DATABASE_URL", "mysql://u:secret@h/d", "kqueue needs postgresql"),
        (("results",), "DATABASE_URL", "", "no fleet found: set KQUEUE_DATABASE_URL, or start one on this machine"),
        (SUBMIT, "REDIS_URL", "amqp://u:secret@h", "KQUEUE_REDIS_URL is not"),
        (SUBMIT, "REDIS_URL", "redis://:sec/ret@h:1/0", "KQUEUE_REDIS_URL is not"),
        (SUBMIT, "REDIS_URL", "redis://u:1#sec@h:1/0", "KQUEUE_REDIS_URL is not"),
        (SUBMIT, "REDIS_URL", "sentinel://u:1#sec@h:1/0?master_name=m", "KQUEUE_REDIS_URL is not"),
        (SUBMIT, "REDIS_URL", "sentinel://:sec@a:1;sentinel://:ret@b:1/0?master_name=m", "all addresses share one"),
        (SUBMIT, "REDIS_URL", "sentinel://:secret@a:1/0", "?master_name=NAME"),
        (SUBMIT, "REDIS_URL", "sentinel://:secret@a:1/0?master_name=m&db=1", "db has no meaning"),
        (("results",), "DATABASE_URL", "postgresql://u:secret@a:1,b:x/db", "KQUEUE_DATABASE_URL is not a URL"),
        (
            ("results",),
            "DATABASE_URL",
            "postgresql://u:secret@/db?host=a,b&port=1",
            "several hosts have one each or none",
        ),
        (("results",), "LEASE_S", "soon", "KQUEUE_LEASE_S"),
    ):
        done = cli(*command, **{f"KQUEUE_{name}": value})
        assert (done.returncode, message in done.stderr, "sec" in done.stderr) == (3, True, False), done.stderr


def test_a_schema_is_made_checked_and_told_from_another(cli: Cli, server: Any) -> None:
    """`db upgrade` creates the schema once. Without it, or with a newer one, each command names the fix."""
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
    newer = known(*SUBMIT)
    assert newer.returncode == 3
    assert "upgrade kqueue here" in newer.stderr
    server.drop(url)


def checks(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    records = [json.loads(line) for line in done.stdout.splitlines()]
    return {(record["group"], record["name"]): record for record in records}


def test_doctor_looks_at_services_and_worker(cli: Cli, worker: UUID, tmp_path: Path) -> None:
    """Services with versions, torch, compilers and every sandbox feature have a line, and defects fail the check."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    # A fleet kills every process of its uid.
    used = uids.hold(load().candidate_uid)
    done = cli("doctor", "--json", KQUEUE_SCRATCH=str(closed / "scratch"))
    used.release()
    found = checks(done)
    if os.geteuid() == 0:
        assert f" as {used.uid}" not in found["sandbox", "candidate uid"]["detail"]
        assert found["sandbox", "user_namespace"]["fix"] == ""
    services = ("postgres", "schema", "workers", "redis", "redis eviction")
    assert [found["services", name]["state"] for name in services] == ["ok"] * 5
    assert "1 on lane cpu" in found["services", "workers"]["detail"]
    assert found["services", "redis persistence"]["state"] in {"ok", "warn"}
    for group, names in {
        "gpu": "driver,torch,triton,cupy",
        "compilers": "c++,python headers,ninja,nvcc",
        "sandbox": "user,no_new_privs,files,seccomp,user_namespace,cgroup_kill,isolation,scratch",
    }.items():
        assert set(names.split(",")) <= {name for where, name in found if where == group}
    records = found.values()
    assert all(record["fix"] or record["state"] in {"ok", "info"} or ": " in record["detail"] for record in records)
    # A root fleet gives its candidates other uids, which cannot enter a closed directory.
    scratch = found["sandbox", "scratch"]
    assert scratch["state"] == ("fail" if os.geteuid() == 0 else "ok"), scratch
    assert done.returncode == any(record["state"] == "fail" for record in records)


@pytest.fixture
def at_fault(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Record a lost worker, a GPU with errors, and one queued evaluation."""
    lost = Outcome(category=Category.WORKER_LOST, message="gone with keepthissecret", phase=Phase.CHECK)
    cli(*SUBMIT, "--lane", "cpu", "--set", "max_attempts=1")
    assert judge(engine, worker, lambda _: lost) == 1
    cli(*SUBMIT, "--lane", "cpu")
    gpus.register(engine, host="host", index=0, uuid="GPU-1", name="NVIDIA H200")
    at = datetime.now(UTC)
    seen = [{"xid": 79, "at": at.isoformat()}, {"xid": 31, "at": (at - timedelta(days=3)).isoformat()}]
    gpus.see(engine, {"GPU-1": {"xids": seen}})


@pytest.mark.usefixtures("at_fault")
def test_a_deep_look_tells_of_faults(config: Config) -> None:
    """Faults of the fleet are counted, recent driver errors are named, and services are timed."""
    found = {check.name: check for check in doctor._services(config, deep=True)}
    assert (found["faults"].state, "1 worker_lost" in found["faults"].detail) == ("warn", True)
    assert "Xid 79" in found["xids"].detail
    assert "Xid 31" not in found["xids"].detail
    assert found["queue"].detail.startswith("1 on lane cpu. The first has waited for ")
    assert {"postgres answers", "redis answers", "clocks"} <= set(found)


@pytest.mark.nightly
@pytest.mark.usefixtures("at_fault")
@pytest.mark.timeout(900)
def test_a_deep_look_judges_kernels(cli: Cli, tmp_path: Path) -> None:
    """Judging a kernel detects a broken compiler, and no secret is shown."""
    broken = tmp_path / "bin"
    for name in ("g++", "c++"):
        cli.write(f"bin/{name}", "#!/bin/sh\nexit 1\n").chmod(0o755)
    settings = {"KQUEUE_TOKEN": "keepthissecret", "KQUEUE_SCRATCH": str(tmp_path / "scratch")}
    settings |= {"KQUEUE_BUILD_STORE_BYTES": "0", "CXX": "c++", "PATH": f"{broken}{os.pathsep}{os.environ['PATH']}"}
    done = cli("doctor", "--deep", "--json", **settings)
    found = checks(done)
    assert "keepthissecret" not in done.stdout + done.stderr
    assert "gone with ***" in found["services", "faults"]["detail"]
    if ("judge", "cpu") in found:  # there is no GPU
        kernels = {name: found["judge", f"cpu: {name}"] for name in JUDGED}
        assert {name: record["state"] for name, record in kernels.items()} == dict.fromkeys(JUDGED, "ok")
        failed = found["judge", "cpu: c++ kernel"]
        assert failed["state"] == "fail"
        assert failed["detail"].startswith("compile_error in ")
        assert "returned non-zero exit status 1" in failed["fix"]
        assert done.returncode == 1


def test_a_client_without_torch(cli: Cli, tmp_path: Path) -> None:
    """A host without torch passes as a client. Unreachable services fail, and no secret is shown."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    hidden = {"PYTHONPATH": str(tmp_path)}
    done = cli("doctor", "--json", **hidden)
    found = checks(done)
    assert found["gpu", "torch"]["state"] == "info"
    assert "not a worker" in found["gpu", "torch"]["detail"]
    assert found["services", "workers"]["state"] == "warn"
    assert done.returncode == 0, done.stdout
    done = cli(
        "doctor",
        KQUEUE_DATABASE_URL="postgresql://someone:secret@127.0.0.1:1/kqueue",
        KQUEUE_REDIS_URL="redis://:secret@127.0.0.1:1/0",
        **hidden,
    )
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  fail")] == [
        ["fail", "postgres"],
        ["fail", "redis"],
    ]
    assert all(word in done.stdout for word in ("check KQUEUE_DATABASE_URL", "Check KQUEUE_REDIS_URL", "1:1/kqueue"))
    assert "secret" not in done.stdout + done.stderr


def test_no_secret_is_told_wherever_it_comes_up(monkeypatch: Any) -> None:
    """Passwords are hidden in every form of a setting. Short ones, possibly common words, are hidden in URLs only."""
    for variable, value, secret in (
        ("KQUEUE_DATABASE_URL", "postgresql+psycopg://u:p[wordlong@127.0.0.1:1/db", "p[wordlong"),
        ("KQUEUE_DATABASE_URL", "postgresql://u:wh?at/is@127.0.0.1:1/db", "wh?at/is"),
        ("KQUEUE_DATABASE_URL", "postgresql://127.0.0.1:1/db?user=u&password=given-there", "given-there"),
        ("KQUEUE_REDIS_URL", "redis://:p%40sswordlong@127.0.0.1:1/0", "p@sswordlong"),
        ("KQUEUE_REDIS_URL", "sentinel://:p@a;sentinel://u:p;sswordlong@b/0?master_name=m", "p;sswordlong"),
        ("KQUEUE_REDIS_URL", "sentinel://:p@a;sentinel://b?sentinel_password=of-sentinels", "of-sentinels"),
        ("KQUEUE_FLOWER_AUTH", "admin:of-the-window", "of-the-window"),
        ("KQUEUE_TOKEN", "kq_of-somebody", "kq_of-somebody"),
        ("KQUEUE_DATABASE_URL", "postgresql://u:kqueue@127.0.0.1:1/db", "***"),
    ):
        monkeypatch.setenv(variable, value)
        told = f"failed with {secret}, and kqueue up"
        assert doctor._without_secrets(told, load()) == "failed with ***, and kqueue up"


def test_addresses_are_shown_without_secrets() -> None:
    """No part of a password is shown, for any characters in it."""
    for url, shown in (
        ("redis://:p@ss/w?rd#x@host:6379/0", "redis://***@host:6379/0"),
        ("redis://host/0", "redis://host/0"),
        ("postgresql://host/db?ssl=require&password=x&user=u", "postgresql://host/db?ssl=require&password=***&user=u"),
        ("redis+socket:///run/valkey.sock", "redis+socket:///run/valkey.sock"),
        ("sentinel://u:p;w@a:1;sentinel://b/0?master_name=m", "sentinel://***@a:1;sentinel://b/0?master_name=m"),
        ("sentinel://a;sentinel://:p@b?sentinel_password=x", "sentinel://a;sentinel://***@b?sentinel_password=***"),
        ("secret", "(not a URL)"),
    ):
        assert redact(url) == shown
