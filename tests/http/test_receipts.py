"""Receipts from a server: its key and a rotation, owners, and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from kqueue import receipts
from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.evidence import Evidence
from kqueue.features.receipts.checks import verify
from kqueue.http.app import create_app
from tests.cli.command import Cli
from tests.http.standin import Served, submit
from tests.samples import measurement, passed, stated

SAMPLES = {"samples_ms": (0.4, 0.5, 0.6), "count": 3}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return the file of a new key."""
    receipts.create_key(path := tmp_path / "receipts.pem")
    return path


@pytest.fixture
def signing(serve: Callable[..., Served], config: Config, worker_id: UUID, key: Path) -> Served:
    """Return a server with that key."""
    return serve(config.model_copy(update={"receipt_key": key}))


@pytest.fixture
def judged(signing: Served, judge: Callable[..., None]) -> UUID:
    """Return a timed evaluation of a duel."""
    with signing.client() as http:
        identity = submit(http, 0, batch="duel-7")
    times = dict.fromkeys(("runtime", "baseline"), measurement(0.5).model_copy(update=SAMPLES))
    judge(identity, passed(**times, log="hi", evidence=Evidence(durations_s={"check": 0.1})))
    return identity


def known(served: Served) -> tuple[str, ...]:
    """Return the public keys that a stranger gets."""
    with served.stranger() as http:
        return tuple(one["public_key"] for one in http.get("/v1/keys").raise_for_status().json()["keys"])


def failing(content: bytes, keys: tuple[str, ...]) -> set[str]:
    """Return the statements that do not hold."""
    return {check.name for check in verify(content, keys)[0] if check.holds is not True}


def test_a_receipt_records_the_evaluation(signing: Served, judged: UUID, fields: Callable[..., Any]) -> None:
    """All its statements hold by the published key. Sources and log are included on request only."""
    path = f"/v1/evaluations/{judged}/receipt"
    with signing.client() as http:
        short, whole = http.get(path), http.get(path, params={"sources": True})
        assert http.get(f"/v1/evaluations/{submit(http, 1)}/receipt").json()["code"] == "not_finished"
        shown = http.get(f"/v1/evaluations/{judged}").json()
    assert failing(short.content, known(signing)) == {"sources"}
    assert failing(whole.content, known(signing)) == set()
    receipt, public = stated(whole.content), stated(short.content)
    assert (receipt["problem"], receipt["kernel"]) == (fields(0)["problem"], fields(0)["kernel"])
    assert receipt["purpose"] == "duel"
    assert (receipt["owner"], receipt["settings"], receipt["verdict"]) == ("local", shown["settings"], shown["verdict"])
    assert {public[name] for name in ("problem", "kernel")} == {None}
    assert (public["verdict"]["log"], receipt["verdict"]["log"]) == ("", "hi")


def test_another_owner_gets_no_receipt(signing: Served, judged: UUID, token: Callable[..., str]) -> None:
    """The evaluation of another owner is answered as an unknown one, and a stranger is refused."""
    with signing.client(token("problems", owner="bob")) as bob, signing.stranger() as stranger:
        theirs, unknown = (bob.get(f"/v1/evaluations/{one}/receipt") for one in (judged, uuid4()))
        assert (theirs.status_code, theirs.json()["code"]) == (404, "unknown_evaluation")
        assert theirs.json().keys() == unknown.json().keys()
        assert stranger.get(f"/v1/evaluations/{judged}/receipt").status_code == 401


def test_receipts_survive_a_rotation(signing: Served, judged: UUID, key: Path, tmp_path: Path) -> None:
    """A key in front of the old one signs at once, and both are listed. Without the old one its receipts fail."""
    path = f"/v1/evaluations/{judged}/receipt?sources=true"
    receipts.create_key(new := tmp_path / "new.pem")
    with signing.client() as http:
        before = http.get(path).content
        key.write_bytes(new.read_bytes() + key.read_bytes())
        after = http.get(path).content
    assert len(known(signing)) == 2
    assert [stated(one)["public_key"] for one in (after, before)] == [*known(signing)]
    assert failing(before, known(signing)) == failing(after, known(signing)) == set()
    key.write_bytes(new.read_bytes())
    assert (failing(before, known(signing)), failing(after, known(signing))) == ({"key"}, set())


def test_a_server_without_a_key(served: Served, judge: Callable[..., None], config: Config, tmp_path: Path) -> None:
    """It lists no keys and refuses receipts, and a file with other content prevents its start."""
    with served.client() as http:
        judge(identity := submit(http, 0))
        answer = http.get(f"/v1/evaluations/{identity}/receipt")
    assert (answer.status_code, answer.json()["code"], known(served)) == (409, "no_receipt_key", ())
    (tmp_path / "bad.pem").write_text("no key")
    with pytest.raises(ConfigError, match="KQUEUE_RECEIPT_KEY"):
        create_app(config.model_copy(update={"receipt_key": tmp_path / "bad.pem"}))


def test_the_command_asks_the_server(signing: Served, judged: UUID, config: Config, tmp_path: Path) -> None:
    """`kqueue receipt` writes the server's file, takes an id's first digits, and needs a server."""
    cli = Cli(tmp_path, config.environment() | {"KQUEUE_URL": signing.url, "KQUEUE_TOKEN": signing.admin})
    assert cli("receipt", str(judged)[:8], "--sources", "-o", "receipt.json").returncode == 0
    # The server of this process logs there too.
    [printed] = [line for line in cli("receipt", str(judged)).stdout.splitlines() if line.startswith("{")]
    assert failing(f"{printed}\n".encode(), known(signing)) == {"sources"}
    assert cli("verify", "receipt.json", KQUEUE_URL=signing.url).returncode == 0
    verified = cli("verify", "receipt.json", "--key", signing.url)
    assert (verified.returncode, "unknown" in verified.stdout) == (0, False), verified.stdout + verified.stderr
    for file in (".", "no/receipt.json", "/dev/full"):
        done = cli("receipt", str(judged), "-o", file)
        assert (done.returncode, f"kqueue: {file} cannot be written" in done.stderr) == (3, True), done.stderr
    alone = cli("receipt", str(judged), KQUEUE_URL="", KQUEUE_TOKEN="")
    assert (alone.returncode, "only `kqueue serve` signs receipts" in alone.stderr) == (3, True), alone.stderr
    assert cli("receipt", str(uuid4())).returncode == 5
