"""The sender of callbacks (:mod:`kqueue.store.callbacks`), a task of `kqueue serve`.

A URL comes from a producer, and the server can reach hosts that the producer cannot. So the sender resolves its host
itself, connects to a public address only, follows no redirect, and reads no body.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import ssl
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

import httpx
from pydantic import TypeAdapter
from sqlalchemy import Engine

from kqueue.config import networks
from kqueue.errors import KqueueError
from kqueue.http.gateway import Gateway
from kqueue.store import callbacks, evaluations, reports
from kqueue.store.engine import FLEET, Viewer, act_as, acting
from kqueue.text import one_line

_log = logging.getLogger(__name__)
# httpx logs each URL, which can contain secrets.
logging.getLogger("httpx").setLevel(logging.WARNING)

#: Maximum seconds of one attempt, the resolution of the host included.
_ATTEMPT_S: Final = 10.0
#: Seconds between two searches for due callbacks.
_EVERY_S: Final = 1.0
#: Maximum number of a message's characters in a body, and of a body's bytes.
_MESSAGE: Final = 4000
_BODY: Final = 1 << 18
#: IPv6 addresses of hosts. NAT64's addresses, which stand for IPv4 addresses, are outside.
_HOSTS: Final = IPv6Network("2000::/3")


def secret_of(secret: str, owner: str) -> str:
    """Return the secret that signs an owner's callbacks, in hex. It does not reveal the fleet's secret."""
    return hmac.digest(secret.encode(), f"kqueue callbacks of {owner}".encode(), "sha256").hex()


def is_allowed(address: str, more: Collection[IPv4Network | IPv6Network]) -> bool:
    """Return True if callbacks can be sent to an address: a public one, or one in the networks ``more``."""
    ip = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or ip
    if any(ip in network for network in more):
        return True
    if isinstance(ip, IPv6Address) and (ip not in _HOSTS or ip.sixtofour or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast


def content(engine: Engine, due: callbacks.Due) -> bytes | None:
    """Return the body of a callback as its owner sees it. None if retention has removed the evaluations."""
    event, found = ("batch" if due.evaluation_id is None else "evaluation"), None
    with acting(Viewer(due.owner, held=True)):
        if due.evaluation_id is not None:
            for verdict in evaluations.verdicts(engine, [due.evaluation_id]).values():
                found = verdict.summary() | {"message": verdict.message[:_MESSAGE], "passed": verdict.passed}
        elif due.batch is not None and (state := reports.batch_state(engine, due.batch)) is not None:
            found = TypeAdapter(reports.Batch).dump_python(state, mode="json", exclude={"callbacks"})
    body = json.dumps({"id": str(due.id), "attempt": due.attempts, "event": event, event: found})
    return None if found is None else body.encode()


class _Transport(httpx.AsyncHTTPTransport):
    """A transport that resolves each host once, and connects to an allowed address of it only."""

    def __init__(self, more: Collection[IPv4Network | IPv6Network]) -> None:
        # A connection that is kept for one host of an address could serve another one.
        limits = httpx.Limits(max_keepalive_connections=0)
        super().__init__(verify=ssl.create_default_context(), limits=limits, trust_env=False)
        self._more = more
        # The server's other threads must not wait for a slow name server, and neither must the other attempts.
        self._threads = ThreadPoolExecutor(callbacks.CLAIMED, thread_name_prefix="resolve")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request to the checked address. The certificate must be the name's."""
        name = request.url.raw_host.decode()
        look = (socket.getaddrinfo, name, request.url.port or 0, 0, socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._threads, *look)
        allowed = (str(address[0]) for *_, address in found if is_allowed(str(address[0]), self._more))
        if (address := next(allowed, None)) is None:
            raise httpx.ConnectError(f"{name} has no public address: KQUEUE_CALLBACK_NETWORKS allows more")
        request.extensions["sni_hostname"] = name
        request.url = request.url.copy_with(host=address)
        return await super().handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections, without waiting for names that are being resolved."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await super().aclose()


async def send_callbacks(gateway: Gateway) -> None:
    """Send the callbacks of a fleet until the task is cancelled, if the settings have a secret to sign them.

    Any number of servers can do so.
    """
    if (secret := gateway.config.callback_secret) is None:
        return
    act_as(FLEET)
    # The environment's proxies would connect to any address.
    transport = _Transport(networks(gateway.config.callback_networks))
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=_ATTEMPT_S) as http:
        while True:
            # If the database fails, a claim ends by itself, and its callback is sent again.
            [claimed] = await asyncio.gather(gateway.read(callbacks.claim), return_exceptions=True)
            due = [] if isinstance(claimed, BaseException) else claimed
            attempts = (_attempt(gateway, http, secret.get_secret_value(), one) for one in due)
            for error in (claimed, *await asyncio.gather(*attempts, return_exceptions=True)):
                if isinstance(error, Exception) and not isinstance(error, KqueueError):
                    _log.error("a callback was not sent", exc_info=error)
            if not due:
                await asyncio.sleep(_EVERY_S)


async def _attempt(gateway: Gateway, http: httpx.AsyncClient, secret: str, due: callbacks.Due) -> None:
    body = await gateway.read(content, due)
    error = None if body is None else await _post(http, due, body, secret_of(secret, due.owner))
    await gateway.read(callbacks.settle, due, error)
    if error is not None:
        _log.info("callback %s, attempt %d: %s", due.id, due.attempts, error)


async def _post(http: httpx.AsyncClient, due: callbacks.Due, body: bytes, secret: str) -> str | None:
    """Post a body. Return the reason if the receiver did not accept it."""
    if len(body) > _BODY:
        return f"the body has {len(body)} bytes, more than {_BODY}"
    stamp = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "kqueue",
        "KQueue-Timestamp": stamp,
        "KQueue-Signature": "sha256=" + hmac.digest(secret.encode(), f"{stamp}.".encode() + body, "sha256").hex(),
    }
    try:
        async with asyncio.timeout(_ATTEMPT_S), http.stream("POST", due.url, content=body, headers=headers) as answer:
            return None if answer.is_success else f"the receiver answered with {answer.status_code}"
    except TimeoutError:
        return f"the receiver did not answer within {_ATTEMPT_S:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        return one_line(f"{type(error).__name__}: {error}")[:200]
