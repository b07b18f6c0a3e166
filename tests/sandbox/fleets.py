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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    process: subprocess.Popen[str]
    isolation: dict[str, Any]

    def do(self, what: str, *arguments: Any, sealed: bool = True, **bounds: int) -> dict[str, Any]:
        """Run a function of :mod:`tests.sandbox.attacks` in a fresh process. Return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"do": what, "arguments": arguments, "sealed": sealed, "bounds": bounds}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert "failed" not in answer, answer["failed"]
        return answer

    def require(self, *measures: str) -> None:
        for name in measures:
            if self.isolation[name] is not True:
                pytest.skip(f"{name}: {self.isolation[name]}")


def started(user: int, candidates: int) -> Iterator[Fleet]:
    place = Path(tempfile.mkdtemp(prefix="kqueue-sealer-"))
    place.chmod(0o711)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.sandbox.sealer", str(user), str(place), str(candidates)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first, "the stand-in did not start"
        yield Fleet("root" if user == 0 else "ordinary", process, json.loads(first))
    finally:
        process.stdin.close()
        process.wait(90)
        shutil.rmtree(place, ignore_errors=True)
