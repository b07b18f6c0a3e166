"""HTTP/1.1 of the client, with servers and proxies of this process."""

from __future__ import annotations

import asyncio
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trustme

from kqueue.client.connections import Http

BODY = b"x" * 200_000
#: The answer in each form that HTTP/1.1 allows. Only the last one ends its connection.
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + BODY,
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n30d40;a=b\r\n" + BODY + b"\r\n0\r\nTrailer: x\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + BODY,
    b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + BODY,
]
BROKEN = [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", b"HTTP/1.1 200 OK\r\nX: y"]


async def head(reader: StreamReader) -> list[bytes]:
    """Return the first line of a request's head in words, after its body is read."""
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    length = next((int(line[16:]) for line in lines if line.startswith(b"Content-Length: ")), 0)
    return [*lines[0].split(), await reader.readexactly(length)]


class House:
    """A server with answers for its next requests, and a proxy that serves and tunnels."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers, self.opened, self.asked, self.tunnels = answers, 0, list[list[bytes]](), list[bytes]()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.opened += 1
        while self.answers and not reader.at_eof():
            self.asked.append(await head(reader))
            answer = self.answers.pop(0)
            writer.write(answer)
            if b"Content-Length: 200000" not in answer and b"chunked" not in answer:
                break
        await writer.drain()
        writer.close()

    async def pass_on(self, reader: StreamReader, writer: StreamWriter) -> None:
        method, target, *_ = await head(reader)
        assert method == b"CONNECT"
        self.tunnels.append(target)
        host, port = target.decode().split(":")
        there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def copy(source: StreamReader, to: StreamWriter) -> None:
            while piece := await source.read(1 << 16):
                to.write(piece)
            to.close()

        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer), return_exceptions=True)


async def listen(stack: AsyncExitStack, handler: Callable[..., object], tls: ssl.SSLContext | None = None) -> str:
    """Return the URL of a handler."""
    server = await stack.enter_async_context(await asyncio.start_server(handler, "127.0.0.1", 0, ssl=tls))
    return f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "proxied"])
def test_every_form_of_an_answer(tls: bool, proxied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are verified, go through the environment's proxy, and serve again unless the answer closes them."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    async def main() -> None:
        house = House([*ANSWERS, ANSWERS[0]])
        async with AsyncExitStack() as stack:
            url = await listen(stack, house.serve, context if tls else None)
            if proxied:
                monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:1" if tls else url.removeprefix("http://"))
                monkeypatch.setenv("HTTPS_PROXY", await listen(stack, house.pass_on))
            asked = url if tls or not proxied else "http://kqueue.invalid"
            if tls:
                stranger = Http(url, 1)
                with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
                    await stranger.request("GET", "/", headers={})
                monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
                house.opened = 0
            http = Http(asked, 4)
            for _ in range(len(ANSWERS) + 1):
                answer = await http.request("POST", "/a b", params={"x": True, "y": [0, 1]}, json={"é": 1}, headers={})
                assert (answer.status, answer.body) == (200, BODY)
                assert answer.url == f"{asked}/a%20b?x=true&y=0&y=1"
            await http.close()
        target = "" if tls or not proxied else asked
        path = f"{target}/a%20b?x=true&y=0&y=1".encode()
        assert house.asked == [[b"POST", path, b"HTTP/1.1", '{"é":1}'.encode()]] * 5
        assert house.opened == 2
        assert len(house.tunnels) == (3 if tls and proxied else 0)

    asyncio.run(main())


def test_a_broken_answer_is_a_lost_connection() -> None:
    """An answer that is malformed or cut off raises ConnectionError, and so does a header with a line feed."""

    async def main() -> None:
        house = House([*BROKEN])
        async with AsyncExitStack() as stack:
            http = Http(await listen(stack, house.serve), 4)
            for _ in BROKEN:
                with pytest.raises(ConnectionError, match="no complete answer"):
                    await http.request("GET", "/", headers={})
            with pytest.raises(ConnectionError, match="line feed"):
                await http.request("GET", "/", headers={"X": "a\r\nY: b"})
            await http.close()

    asyncio.run(main())
