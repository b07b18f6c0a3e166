"""`kqueue sweep` and `kqueue wait`: care for evaluations whose producer has exited."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

from sqlalchemy import Engine

from kqueue import broker
from kqueue.categories import Category
from kqueue.config import Config
from tests.cli.command import Cli, Judgement
from tests.samples import ended, passed
from tests.store.steps import change


def submitted(cli: Cli, *kernels: str, **environment: str) -> list[str]:
    """Submit kernels as the batch `night` and return their ids in order."""
    for name in kernels:
        cli.write(f"{name}.py", f"class ModelNew: name = '{name}'\n")
    files = [f"{name}.py" for name in kernels]
    done = cli("submit", "-p", "relu.py", "-b", "torch", "--batch", "night", "--json", *files, **environment)
    assert done.returncode == 0
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


class TestSweep:
    def test_what_redis_lost_is_sent(self, cli: Cli, config: Config, engine: Engine, worker: UUID) -> None:
        """Every queued evaluation is sent again after Redis was emptied."""
        ids = submitted(cli, "a", "b", "c")
        # A new evaluation's message is left to its producer for some seconds.
        change(engine, "UPDATE evaluations SET submitted_at = now() - interval '1 min'")
        with broker.make_app(config) as app:
            with app.connection_for_read() as connection:
                connection.default_channel.client.flushall()
            done = cli("sweep", "--json")
            assert done.returncode == 0
            record = json.loads(done.stdout)
            assert (record["swept"], record["missing"], record["published"], record["lost"]) == (True, 3, 3, [])
            assert {str(identity) for identity in broker.waiting(app, "cpu")} == set(ids)

    def test_without_redis_the_rest_is_done(self, cli: Cli, engine: Engine, worker: UUID) -> None:
        """The command's status is the one for an unavailable service."""
        [identity] = submitted(cli, "a")
        change(engine, "UPDATE evaluations SET expires_at = now() - interval '1 s'")
        done = cli("sweep", KQUEUE_REDIS_URL="redis+socket:///nowhere.sock")
        assert done.returncode == 3
        assert all(words in done.stdout for words in ("evaluations expired: 1", "redis: Redis cannot be used"))
        assert json.loads(cli("show", identity, "--json").stdout)["verdict"]["category"] == "expired"


class TestWait:
    def test_a_batch_is_found_by_its_name(self, cli: Cli, worker: UUID, judging: Callable[[Judgement], None]) -> None:
        """The batch's name is enough, and verdicts are in the order of submission."""
        ids = submitted(cli, "a", "b", "c")
        judging(lambda kernel: passed() if kernel != "b" else ended(Category.CRASHED))
        done = cli("wait", "--batch", "night", "--json")
        assert done.returncode == 1
        records: list[Any] = [json.loads(line) for line in done.stdout.splitlines()]
        assert [record["id"] for record in records] == ids
        assert [record["verdict"]["category"] for record in records] == ["passed", "crashed", "passed"]
        assert [record["kernel_label"] for record in records] == ["a", "b", "c"]
        assert cli("wait", ids[0][:8], ids[2]).returncode == 0

    def test_no_verdict(self, cli: Cli, worker: UUID) -> None:
        """A timeout exits with 4, and an unknown batch with 5."""
        submitted(cli, "a")
        done = cli("wait", "--batch", "night", "--timeout", "0.1")
        assert (done.returncode, "1 of 1 without a verdict" in done.stderr) == (4, True)
        done = cli("wait", "--batch", "nigth")
        assert (done.returncode, "the batch nigth" in done.stderr) == (5, True)
        assert cli("wait").returncode == 2
