"""HTTP on a unix socket: access without a token, and the socket's file."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from kqueue import Client, ConfigError, RemoteClient
from kqueue.config import Config
from kqueue.http import server as servers
from tests.http.serving import problem_of
from tests.http.standin import Served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the socket's path, in a folder that the server creates."""
    return tmp_path / "run" / "http.sock"


@pytest.fixture
def served(serve: Callable[..., Served], config: Config, worker_id: UUID, path: Path) -> Served:
    """A server on TCP and on the socket, with one live CPU worker."""
    return serve(config, path)


def over(path: Path) -> httpx.Client:
    """Return a client of the socket at ``path``, without a token. The caller closes it."""
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60)


@pytest.fixture
def http(served: Served, path: Path) -> Iterator[httpx.Client]:
    """A client on the socket, without a token."""
    with over(path) as client:
        yield client


def test_the_owner_needs_no_token(http: httpx.Client, fields: Callable[..., dict[str, Any]]) -> None:
    """The server's own user has all scopes there, whatever the request's host name."""
    assert http.get("/v1/fleet").status_code == 200
    assert http.post("/v1/evaluations", json=fields(), headers={"Host": "elsewhere.example"}).status_code == 201
    assert http.post("/cleanup", params={"wait_s": 0}).status_code == 200
    assert "devices" in http.get("/health").json()


def test_a_token_counts_there_too(http: httpx.Client, token: Callable[..., str], fields: Any) -> None:
    """A token restricts the client to its scope, and a wrong token is refused."""
    reader = {"Authorization": f"Bearer {token('read')}"}
    assert http.get("/v1/fleet", headers=reader).status_code == 200
    problem_of(http.post("/v1/evaluations", json=fields(), headers=reader), 403, "forbidden")
    problem_of(http.get("/v1/fleet", headers={"Authorization": "Bearer kq_wrong"}), 401, "unauthenticated")


def test_tcp_is_never_taken_for_the_socket(served: Served) -> None:
    """The kind of connection decides, not the request's headers."""
    with served.stranger() as stranger:
        for headers in ({}, {"kqueue.peer_uid": "0"}, {"X-Kqueue-Peer-Uid": "0"}, {"Host": "localhost"}):
            problem_of(stranger.get("/v1/fleet", headers=headers), 401, "unauthenticated")


def test_another_user_is_a_stranger(serve, config: Config, worker_id: UUID, path: Path, token) -> None:
    """A peer other than the server's user and root needs a token."""
    serve(config, path, server={"peer_uid": lambda _: os.geteuid() + 1})
    with over(path) as http:
        problem_of(http.get("/v1/fleet"), 401, "unauthenticated")
        assert http.get("/v1/fleet", headers={"Authorization": f"Bearer {token('read')}"}).status_code == 200


def test_the_kernel_tells_the_peer(path: Path) -> None:
    """The uid is the connecting process's one."""
    with servers.listen_at(path) as listening:
        listening.listen()
        with socket.socket(socket.AF_UNIX) as near:
            near.connect(str(path))
            with listening.accept()[0] as far:
                assert servers.peer_uid(far) == os.geteuid()


def test_the_file_is_its_owner_s(path: Path) -> None:
    """The folder is 0700 and the socket 0600 from their creation on, whatever the umask."""
    before = os.umask(0)
    try:
        with servers.listen_at(path):
            assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    finally:
        os.umask(before)


def test_a_file_that_was_left_behind(path: Path) -> None:
    """A dead server's socket is replaced, but not a live server's or a file of another kind."""
    servers.listen_at(path).close()
    with servers.listen_at(path) as listening:
        listening.listen()
        with pytest.raises(ConfigError, match="another server listens there"):
            servers.listen_at(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match="KQUEUE_HTTP_SOCKET"):
        servers.listen_at(path)
    with pytest.raises(ConfigError, match="KQUEUE_HTTP_SOCKET"):
        servers.listen_at(path.parent / ("x" * 200))


def test_the_clients_take_its_url(served: Served, config: Config, path: Path, judging: None, fields: Any) -> None:
    """`unix:///path` is a server's URL, and its keys are shared with the owner's direct clients."""
    with RemoteClient(f"unix://{path}") as kq, Client(config) as direct:
        verdict = kq.evaluate(**fields(idempotency_key="k"), timeout=60)
        assert verdict.passed
        assert direct.submit(**fields(idempotency_key="k")).evaluation_id == verdict.evaluation_id
    for wrong in ("unix:relative", "unix://relative", "unix://"):
        with pytest.raises(ConfigError, match="KQUEUE_URL"):
            RemoteClient(wrong)
