"""Programs that replace fork servers and seal processes on request."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest


def greet(listener: socket.socket, word: bytes) -> None:
    """Start a thread that sends a word to each client that connects."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                with link:
                    link.sendall(word)

    listener.listen()
    threading.Thread(target=serve, daemon=True).start()


@dataclass
class Fleet:
    name: str
    #: The connection to the program, for lines of JSON in both directions.
    link: TextIO
    isolation: dict[str, Any]

    def do(self, what: str, *arguments: Any, sealed: bool = True, **bounds: int) -> dict[str, Any]:
        """Run a function of :mod:`tests.sandbox.attacks` in a fresh process. Return its answer."""
        self.link.write(json.dumps({"do": what, "arguments": arguments, "sealed": sealed, "bounds": bounds}) + "\n")
        self.link.flush()
        answer = json.loads(self.link.readline())
        assert "failed" not in answer, answer["failed"]
        return answer

    def require(self, *measures: str) -> None:
        for name in measures:
            if self.isolation[name] is not True:
                pytest.skip(f"{name}: {self.isolation[name]}")


@contextlib.contextmanager
def started(users: Mapping[str, tuple[int, int]]) -> Iterator[dict[str, Fleet]]:
    """Start a fleet for each name of ``users``, which gives the uids of the fleet and of its candidates."""
    arguments: list[str] = []
    with contextlib.ExitStack() as stack:
        links: dict[str, TextIO] = {}
        theirs: list[socket.socket] = []
        for name, (user, candidates) in users.items():
            place = tempfile.mkdtemp(prefix="kqueue-sealer-")
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            Path(place).chmod(0o711)
            ours, other = socket.socketpair()
            links[name] = ours.makefile("rw")
            ours.close()
            theirs.append(other)
            arguments += [str(user), place, str(candidates), str(other.fileno())]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.sandbox.sealer", *arguments],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            pass_fds=[other.fileno() for other in theirs],
        )
        stack.callback(process.wait, 90)
        for other in theirs:
            other.close()
        for link in links.values():
            stack.callback(link.close)
        reports = {name: link.readline() for name, link in links.items()}
        assert all(reports.values()), "a stand-in did not start"
        yield {name: Fleet(name, link, json.loads(reports[name])) for name, link in links.items()}
