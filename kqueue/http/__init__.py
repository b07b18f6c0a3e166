"""HTTP for a fleet, served by `kqueue serve`: a thin translation of the client and the store.

Needs the extra ``http``.
"""

from __future__ import annotations

import importlib.util
import ipaddress
from typing import Final

from kqueue.config import Config
from kqueue.errors import ConfigError

#: What is imported for the server and its page.
_NEEDS: Final = ("fastapi", "jinja2", "prometheus_client", "pygments", "uvicorn")
#: What `kqueue up` and `kqueue serve` print if :func:`trusts_local_users`.
OPEN_WARNING: Final = (
    "warning: KQUEUE_HTTP_TOKENS is trust-local-users: every user of this machine may submit code that the fleet runs"
)


def is_loopback(host: str) -> bool:
    """Return True if an address or name can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trusts_local_users(config: Config) -> bool:
    """Return True if HTTP requests from this machine need no token."""
    return config.http_tokens == "trust-local-users"


def check_access(config: Config) -> None:
    """Return if no request from another machine would be let in without a token.

    Raises:
        ConfigError: the server trusts local users on an address that others reach.
    """
    if trusts_local_users(config) and not is_loopback(config.http_address):
        raise ConfigError(
            f"KQUEUE_HTTP_TOKENS: trust-local-users is for loopback, and others reach {config.http_address}: "
            "leave one of the two settings out"
        )


def has_http() -> bool:
    """Return True if what the server needs is installed."""
    return all(importlib.util.find_spec(name) is not None for name in _NEEDS)


def require_http() -> None:
    """Return if HTTP can be served in this installation.

    Raises:
        ConfigError: the server needs packages that are not there.
    """
    if not has_http():
        raise ConfigError(
            "serving HTTP needs FastAPI, Jinja2, prometheus-client, Pygments and uvicorn: `pip install 'kqueue[http]'`"
        )
