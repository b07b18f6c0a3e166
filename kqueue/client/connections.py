"""HTTP/1.1 on asyncio with the standard library alone, so that the client conflicts with no other package."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import cached_property
from http.client import HTTPException, parse_headers
from io import BytesIO
from json import dumps
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

_T = TypeVar("_T")
#: Prefix of a unix socket's URL, before the socket's path.
UNIX: Final = "unix://"
#: Seconds within which a connection must open, and after which a silent server is given up.
_CONNECT_S: Final = 10.0
_SILENCE_S: Final = 60.0
#: Characters of a path that are sent unchanged.
_SAFE: Final = "/%?:@!$&'()*+,;=~"
_PIECE: Final = 1 << 16

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Answer(NamedTuple):
    """An answer of a server. The names of ``headers`` are in lower case."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes


class Http:
    """Connections to the server at a checked URL, of which ``keep`` stay open. Environment variables name its proxy."""

    def __init__(self, url: str, keep: int) -> None:
        self._path = url.removeprefix(UNIX) if url.startswith(UNIX) else None
        self._url = urlsplit("http://localhost" if self._path else url)
        self._host = self._url.netloc.rpartition("@")[2]
        self._keep = keep
        self._idle: list[_Streams] = []

    async def request(
        self, method: str, path: str, *, params: Mapping[str, Any] = {}, json: Any = None, headers: Mapping[str, str]
    ) -> Answer:
        """Return the server's answer, whatever its status is. Raise OSError if there is none."""
        body = b"" if json is None else dumps(json, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in params.items()}
        query = urlencode(words, doseq=True)
        target = quote(f"{self._url.path}{path}", safe=_SAFE) + (f"?{query}" if query else "")
        url = f"{self._url.scheme}://{self._host}{target}"
        sent = {"Host": self._host, "Accept": "*/*", "User-Agent": "kqueue", **headers}
        sent |= {"Content-Length": str(len(body))} if body or method != "GET" else {}
        sent |= {"Content-Type": "application/json"} if body else {}
        if self._proxy is not None and self._url.scheme == "http":
            target, sent = url, {**sent, **_credentials(self._proxy)}
        while self._idle and (self._idle[-1][0].at_eof() or self._idle[-1][1].is_closing()):
            self._idle.pop()[1].transport.abort()
        streams = self._idle.pop() if self._idle else await self._open()
        lasts = False
        try:
            answer, lasts = await _exchange(streams, method, target, sent, body)
        finally:
            if lasts and len(self._idle) < self._keep:
                self._idle.append(streams)
            else:
                streams[1].transport.abort()
        return answer._replace(url=url)

    async def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop()[1].transport.abort()
        await asyncio.sleep(0)  # the event loop closes them

    @cached_property
    def _proxy(self) -> SplitResult | None:
        found = getproxies().get(self._url.scheme) or getproxies().get("all")
        direct = self._path is not None or proxy_bypass(self._host)
        return urlsplit(found if "://" in found else f"http://{found}") if found and not direct else None

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    async def _open(self) -> _Streams:
        async with asyncio.timeout(_CONNECT_S):
            if self._path is not None:
                return await asyncio.open_unix_connection(self._path)
            to, port = self._proxy or self._url, {"http": 80, "https": 443}
            if to.scheme not in port:
                raise ConnectionError(f"a proxy of the kind {to.scheme} cannot be used: unset it, or set NO_PROXY")
            tls = self._tls if to.scheme == "https" else None
            streams = await asyncio.open_connection(to.hostname, to.port or port[to.scheme], ssl=tls)
            if self._proxy is not None and self._url.scheme == "https":
                host = self._host if self._url.port else f"{self._host}:443"
                sent = {"Host": host, **_credentials(self._proxy)}
                try:
                    answer, _ = await _exchange(streams, "CONNECT", host, sent, b"")
                    if answer.status != 200:
                        raise ConnectionError(f"the proxy answers {answer.status}")
                    await streams[1].start_tls(self._tls, server_hostname=self._url.hostname)
                except BaseException:
                    streams[1].transport.abort()
                    raise
            return streams


def _credentials(proxy: SplitResult) -> dict[str, str]:
    """Return the header that names the user of a proxy."""
    user = unquote(f"{proxy.username or ''}:{proxy.password or ''}")
    return {"Proxy-Authorization": f"Basic {b64encode(user.encode()).decode()}"} if proxy.username else {}


async def _exchange(
    streams: _Streams, method: str, target: str, headers: Mapping[str, str], body: bytes
) -> tuple[Answer, bool]:
    """Send a request. Return the answer, and True if the connection can carry another request."""
    reader, writer = streams
    head = "\r\n".join([f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())])
    if len(head.splitlines()) != 1 + len(headers):
        raise ConnectionError("a header contains a line feed")
    data = head.encode("latin-1") + b"\r\n\r\n" + body
    # A server can answer, and stop reading, before it has read the whole request.
    with suppress(ConnectionError):
        for at in range(0, len(data), _PIECE):
            writer.write(data[at : at + _PIECE])
            await _soon(writer.drain())
    try:
        while True:
            first, _, rest = (await _soon(reader.readuntil(b"\r\n\r\n"))).partition(b"\r\n")
            version, status = first.split()[0], int(first.split()[1])
            if status >= 200:
                break
        given = {name.lower(): value for name, value in parse_headers(BytesIO(rest)).items()}
        content, whole = await _content(reader, given, empty=method == "CONNECT" or status in {204, 304})
    except (EOFError, IndexError, ValueError, HTTPException, asyncio.LimitOverrunError) as fault:
        raise ConnectionError(f"no complete answer: {str(fault) or type(fault).__name__}") from fault
    lasts = whole and version == b"HTTP/1.1" and given.get("connection", "").lower() != "close"
    return Answer(target, status, given, content), lasts


async def _content(reader: asyncio.StreamReader, headers: Mapping[str, str], *, empty: bool) -> tuple[bytes, bool]:
    """Return the body of an answer, and False if it lasts until the end of the connection."""
    content = bytearray()
    if empty:
        return b"", True
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await _soon(reader.readuntil(b"\r\n"))).partition(b";")[0], 16):
            content += (await _soon(reader.readexactly(size + 2)))[:-2]
        while await _soon(reader.readuntil(b"\r\n")) != b"\r\n":
            pass
        return bytes(content), True
    length = headers.get("content-length")
    while length is None or len(content) < int(length):
        piece = await _soon(reader.read(_PIECE if length is None else int(length) - len(content)))
        if not piece:
            break
        content += piece
    if length is not None and len(content) < int(length):
        raise EOFError("the connection was closed")
    return bytes(content), length is not None


async def _soon(work: Awaitable[_T]) -> _T:
    async with asyncio.timeout(_SILENCE_S):
        return await work
