"""The sender of callbacks (:mod:`kqueue.store.callbacks`), a task of `kqueue serve`.

A URL comes from a producer, and the server can reach hosts that the producer cannot. So the sender resolves its host
itself, connects to a public address only, follows no redirect, and reads no body.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import socket
import ssl
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final

import httpx
from pydantic import TypeAdapter
from sqlalchemy import Engine

from kqueue.errors import KqueueError
from kqueue.http.gateway import Gateway
from kqueue.store import callbacks, evaluations, reports
from kqueue.store.engine import FLEET, Viewer, acting
from kqueue.text import one_line

_log = logging.getLogger(__name__)

#: Maximum seconds of one attempt, the resolution of the host included.
_ATTEMPT_S: Final = 10.0
#: Seconds between two searches for due callbacks.
_EVERY_S: Final = 1.0
#: Maximum number of a message's characters in a body.
_MESSAGE: Final = 4000
#: IPv6 networks whose addresses stand for IPv4 addresses: NAT64, 6to4 and Teredo.
_TUNNELS: Final = tuple(map(IPv6Network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")))
#: Threads that resolve names. The server's other threads must not wait for a slow name server.
_RESOLVERS: Final = 4


def secret_of(secret: str, owner: str) -> str:
    """Return the secret that signs an owner's callbacks, in hex. It does not reveal the fleet's secret."""
    return hmac.new(secret.encode(), f"kqueue callbacks of {owner}".encode(), hashlib.sha256).hexdigest()


def is_allowed(address: str, networks: str) -> bool:
    """Return True if callbacks can be sent to an address: a public one, or one of the networks of the setting."""
    ip: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if any(ip in network for network in _networks(networks)):
        return True
    return ip.is_global and not ip.is_multicast and not any(ip in network for network in _TUNNELS)


@cache
def _networks(setting: str) -> Collection[Any]:
    return [ip_network(part.strip()) for part in setting.split(",") if part.strip()]


def content(engine: Engine, due: callbacks.Due) -> dict[str, Any] | None:
    """Return the body of a callback as its owner sees it. None if retention has removed the evaluations."""
    head = {"id": str(due.id), "attempt": due.attempts}
    with acting(Viewer(due.owner, held=True)):
        if due.evaluation_id is not None:
            verdict = evaluations.verdicts(engine, [due.evaluation_id]).get(due.evaluation_id)
            if verdict is None:
                return None
            summary = verdict.summary() | {"message": verdict.message[:_MESSAGE], "passed": verdict.passed}
            return {**head, "event": "evaluation", "evaluation": summary}
        state = None if due.batch is None else reports.batch_state(engine, due.batch)
    fields = (
        None if state is None else TypeAdapter(reports.Batch).dump_python(state, mode="json", exclude={"callbacks"})
    )
    return None if fields is None else {**head, "event": "batch", "batch": fields}


class Sender:
    """The task that sends callbacks. Any number of servers can send a fleet's callbacks."""

    def __init__(self, gateway: Gateway, *, secret: str, networks: str) -> None:
        """Create a sender for the settings ``callback_secret`` and ``callback_networks``."""
        self._gateway = gateway
        self._secret = secret
        self._allowed = networks
        self._pool = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")
        # The environment's proxies would connect to any address. A connection that is kept for one host of an address
        # could serve another one.
        limits = httpx.Limits(max_keepalive_connections=0)
        how: dict[str, Any] = {"trust_env": False, "follow_redirects": False, "verify": ssl.create_default_context()}
        self._http = httpx.AsyncClient(timeout=_ATTEMPT_S, limits=limits, **how)

    async def run(self) -> None:
        """Send callbacks until the task is cancelled. The next start of any server continues."""
        try:
            while True:
                due = list[callbacks.Due]()
                with suppress(KqueueError), acting(FLEET):
                    due = await self._gateway.read(callbacks.claim)
                for result in await asyncio.gather(*map(self._attempt, due), return_exceptions=True):
                    if isinstance(result, Exception):
                        _log.error("a callback was not sent", exc_info=result)
                if not due:
                    await asyncio.sleep(_EVERY_S)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            await self._http.aclose()

    async def _attempt(self, due: callbacks.Due) -> None:
        # If the database fails, the claim ends by itself, and the callback is sent again.
        with suppress(KqueueError), acting(FLEET):
            fields = await self._gateway.read(content, due)
            error = None if fields is None else await self._send(due, json.dumps(fields).encode())
            await self._gateway.read(callbacks.settle, due, error)
            if error is not None:
                _log.info("callback %s, attempt %d: %s", due.id, due.attempts, error)

    async def _send(self, due: callbacks.Due, body: bytes) -> str | None:
        """Post a body. Return the reason if the receiver did not accept it."""
        try:
            async with asyncio.timeout(_ATTEMPT_S):
                url = httpx.URL(due.url)
                address = await self._resolve(url)
                if address is None:
                    return f"{url.host} has no public address: KQUEUE_CALLBACK_NETWORKS allows more"
                stamp = str(int(time.time()))
                secret = secret_of(self._secret, due.owner).encode()
                signature = hmac.new(secret, f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()
                given = {
                    "Host": url.netloc.decode(),
                    "Content-Type": "application/json",
                    "User-Agent": "kqueue",
                    "KQueue-Timestamp": stamp,
                    "KQueue-Signature": f"sha256={signature}",
                }
                # The name is not resolved a second time, so its server cannot give another address. The certificate
                # must be the name's.
                to, name = url.copy_with(host=address), {"sni_hostname": url.host}
                async with self._http.stream("POST", to, content=body, headers=given, extensions=name) as answer:
                    return None if answer.is_success else f"the receiver answered with {answer.status_code}"
        except TimeoutError:
            return f"the receiver did not answer within {_ATTEMPT_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return one_line(f"{type(error).__name__}: {error}")[:200]

    async def _resolve(self, url: httpx.URL) -> str | None:
        """Return the first allowed address of a URL's host, or None. OSError if it has no address."""
        look = (socket.getaddrinfo, url.host, url.port or 0, 0, socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._pool, *look)
        addresses = (str(address[0]) for *_, address in found)
        return next((address for address in addresses if is_allowed(address, self._allowed)), None)
