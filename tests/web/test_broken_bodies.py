"""Forms whose bodies end early or violate their framing."""

from __future__ import annotations

import logging
import socket

import httpx
import pytest

from tests.http.standin import Served


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"5\r\ntoken"], ids=["not a size", "broken off"])
@pytest.mark.parametrize("path", [b"/login", b"/logout"])
def test_a_broken_chunk_logs_no_traceback(
    served: Served, path: bytes, chunk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken body is the client's fault: it is refused without an error in the log."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: %b\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection(("127.0.0.1", httpx.URL(served.url).port), timeout=60) as connection,
    ):
        connection.sendall(head % b"localhost" + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 4")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
