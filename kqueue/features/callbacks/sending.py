"""The sender of callbacks (:mod:`kqueue.store.callbacks`), a task of `kqueue serve`, and the route of their secrets.

A callback is due when its evaluation has a verdict, or no evaluation of its batch is open. Servers claim due callbacks,
send them, and record the result.

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
from typing import Final, NamedTuple
from uuid import UUID

import httpx
from fastapi import APIRouter
from pydantic import BaseModel, TypeAdapter
from sqlalchemy import Engine, text

from kqueue.config import networks
from kqueue.errors import KqueueError
from kqueue.http import failures
from kqueue.http.auth import WholeSubmitter
from kqueue.http.failures import HttpError
from kqueue.http.gateway import CurrentGateway, Gateway
from kqueue.store import evaluations, reports
from kqueue.store.engine import FLEET, Viewer, act_as, acting, transaction
from kqueue.text import one_line

router: Final = APIRouter(prefix="/v1", tags=["v1"])
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
#: Maximum number of attempts to send a callback.
ATTEMPTS: Final = 8
#: Seconds before the second attempt. Each further delay is three times as long: 1.5 hours in all.
RETRY_S: Final = 5.0
#: Seconds for which a claimed callback belongs to its server. Another one then sends it again.
_CLAIM_S: Final = 60.0
#: Maximum number of callbacks of one owner in a claim, so that an owner whose URL hangs does not delay other owners,
#: and of all owners.
_OF_AN_OWNER: Final = 8
CLAIMED: Final = 64
#: Statement that makes callbacks due. A batch that is submitted in parts can have no open evaluation between two of
#: them, so its last submission must be some seconds ago.
_DUE: Final = text("""
    UPDATE callbacks AS c SET next_at = now() WHERE c.next_at IS NULL AND c.attempts = 0 AND CASE WHEN c.batch IS NULL
        THEN EXISTS (SELECT FROM evaluations AS e WHERE e.id = c.evaluation_id AND e.state = 'done')
        ELSE EXISTS (SELECT FROM batches AS b WHERE b.name = c.batch AND b.owner = c.owner
                     AND b.last_at NOT BETWEEN now() - interval '5 s' AND now())
             AND NOT EXISTS (SELECT FROM evaluations AS e
                             WHERE e.batch = c.batch AND e.owner = c.owner AND e.state <> 'done') END
""")
#: Statement that claims callbacks. The last attempt counts even if its server never records the result.
_CLAIM: Final = text("""
    UPDATE callbacks AS c SET attempts = c.attempts + 1,
        next_at = CASE WHEN c.attempts + 1 < :attempts THEN now() + make_interval(secs => :claim_s) END
    FROM (SELECT due.id FROM (SELECT DISTINCT owner FROM callbacks WHERE next_at <= now()) AS o, LATERAL (
        SELECT id, next_at FROM callbacks WHERE owner = o.owner AND next_at <= now()
        ORDER BY next_at LIMIT :most FOR UPDATE SKIP LOCKED
    ) AS due ORDER BY due.next_at LIMIT :claimed) AS due
    WHERE c.id = due.id
    RETURNING c.id, c.owner, c.evaluation_id, c.batch, c.url, c.attempts
""")
#: Statement that records an attempt, unless another server has claimed the callback or its batch was submitted again.
_SETTLE: Final = text("""
    UPDATE callbacks SET error = given.error, delivered_at = CASE WHEN given.error IS NULL THEN now() END,
        next_at = CASE WHEN attempts < :most THEN now() + make_interval(secs => given.delay_s) END
    FROM (SELECT CAST(:error AS text), CAST(:delay_s AS float8)) AS given (error, delay_s)
    WHERE id = :id AND attempts = :attempts
""")


class Due(NamedTuple):
    """A claimed callback. ``attempts`` includes the attempt that is to be made."""

    id: UUID
    owner: str
    evaluation_id: UUID | None
    batch: str | None
    url: str
    attempts: int


class CallbackSecret(BaseModel):
    """The secret that signs the callbacks of an owner, for HMAC-SHA256."""

    secret: str


@router.get("/callbacks/secret", responses=failures.documented(404))
async def callback_secret(caller: WholeSubmitter, gateway: CurrentGateway) -> CallbackSecret:
    """Return the secret that signs the callbacks of the caller's owner."""
    if (secret := gateway.config.callback_secret) is None:
        words = "this server sends no callbacks: start it with KQUEUE_CALLBACK_SECRET"
        raise HttpError(404, words, code="no_callbacks")
    return CallbackSecret(secret=secret_of(secret.get_secret_value(), caller.owner))


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


def content(engine: Engine, due: Due) -> bytes | None:
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


def claim(engine: Engine) -> list[Due]:
    """Claim the callbacks that are due now, a few of each owner."""
    limits = {"claim_s": _CLAIM_S, "most": _OF_AN_OWNER, "claimed": CLAIMED, "attempts": ATTEMPTS}
    with transaction(engine) as connection:
        connection.execute(_DUE)
        return [Due._make(row) for row in connection.execute(_CLAIM, limits)]


def settle(engine: Engine, due: Due, error: str | None) -> None:
    """Record that a callback was delivered, or the reason why it was not."""
    delay_s = None if error is None else RETRY_S * 3 ** (due.attempts - 1)
    values = {"id": due.id, "attempts": due.attempts, "error": error, "most": ATTEMPTS, "delay_s": delay_s}
    with transaction(engine) as connection:
        connection.execute(_SETTLE, values)


class _Transport(httpx.AsyncHTTPTransport):
    """A transport that resolves each host once, and connects to an allowed address of it only."""

    def __init__(self, more: Collection[IPv4Network | IPv6Network]) -> None:
        # A connection that is kept for one host of an address could serve another one.
        limits = httpx.Limits(max_keepalive_connections=0)
        super().__init__(verify=ssl.create_default_context(), limits=limits, trust_env=False)
        self._more = more
        # The server's other threads must not wait for a slow name server, and neither must the other attempts.
        self._threads = ThreadPoolExecutor(CLAIMED, thread_name_prefix="resolve")

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


async def send(gateway: Gateway) -> None:
    """Send a fleet's callbacks until the task is cancelled, if the settings have a secret. Several servers can."""
    if (secret := gateway.config.callback_secret) is None:
        return
    act_as(FLEET)
    # The environment's proxies would connect to any address.
    transport = _Transport(networks(gateway.config.callback_networks))
    async with httpx.AsyncClient(transport=transport, trust_env=False, timeout=_ATTEMPT_S) as http:
        while True:
            # If the database fails, a claim ends by itself, and its callback is sent again.
            [claimed] = await asyncio.gather(gateway.read(claim), return_exceptions=True)
            due = [] if isinstance(claimed, BaseException) else claimed
            attempts = (_attempt(gateway, http, secret.get_secret_value(), one) for one in due)
            for error in (claimed, *await asyncio.gather(*attempts, return_exceptions=True)):
                if isinstance(error, Exception) and not isinstance(error, KqueueError):
                    _log.error("a callback was not sent", exc_info=error)
            if not due:
                await asyncio.sleep(_EVERY_S)


async def _attempt(gateway: Gateway, http: httpx.AsyncClient, secret: str, due: Due) -> None:
    body = await gateway.read(content, due)
    error = None if body is None else await _post(http, due, body, secret_of(secret, due.owner))
    await gateway.read(settle, due, error)
    if error is not None:
        _log.info("callback %s, attempt %d: %s", due.id, due.attempts, error)


async def _post(http: httpx.AsyncClient, due: Due, body: bytes, secret: str) -> str | None:
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
