"""`kqueue serve` as a separate process that a test can stop, kill and start again on the same port."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from kqueue.cli import app, exit_status
from kqueue.config import Config
from kqueue.errors import KqueueError
from kqueue.store import tokens
from kqueue.store.engine import connect
from tests.services import free_port
from tests.waiting import until


def admin_token(config: Config) -> str:
    """Create a token with the scope `admin`, and return its secret."""
    engine = connect(config.require_database(), application="tests", pool_size=1)
    try:
        return tokens.create(engine, "the tests", [tokens.Scope.ADMIN])[1]
    finally:
        engine.dispose()


class Served:
    """A server on a free port of loopback."""

    def __init__(self, config: Config, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    @cached_property
    def admin(self) -> str:
        """Return the secret of a token with the scope `admin`."""
        return admin_token(self._config)

    def start(self) -> Served:
        """Start the server, and wait until it answers."""
        environment = dict(os.environ) | self._config.environment(serves=True)
        command = [sys.executable, "-m", "kqueue", "serve", "--port", str(self.port)]
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        until(self._answers, 180, "the server")
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the server, and return its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(90)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()
        try:
            httpx.get(f"{self.url}/v1/categories", timeout=5)
        except httpx.HTTPError:
            return False
        return True

    def __enter__(self) -> Served:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def command(config: Config, *words: str) -> tuple[int, str, str]:
    """Run `kqueue` in this process with a fleet's settings, and return its exit status, output and errors."""
    before = [*logging.root.handlers]
    done = CliRunner().invoke(app, words, env=config.environment())
    logging.root.handlers[:] = before  # The command's own writes to a stream that is closed now.
    if isinstance(done.exception, KqueueError):
        return exit_status(done.exception), done.stdout, str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def problem_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return the problem in an answer, after a check of its form."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert body["code"] == code
    assert body["type"] == f"urn:kqueue:error:{code}"
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    assert body["instance"] == answer.request.url.path
    return body
