"""The HTTP server of `kqueue serve`: a thin layer over the client and the store. It needs the extra ``http``.

It imports the store and the asynchronous client, and no module of the page. Start with :mod:`~kqueue.http.app`,
:mod:`~kqueue.http.gateway` for its access to the fleet, and :mod:`~kqueue.http.v1` for the native routes.
"""

from __future__ import annotations

import importlib.util
import ipaddress
from typing import Final

from kqueue.config import Config
from kqueue.errors import ConfigError

#: Modules that the server and its page import.
_NEEDS: Final = ("cryptography", "fastapi", "jinja2", "prometheus_client", "pygments", "uvicorn")
#: Header that restricts a request to an agent's session: to submissions with the same name, and to its limits.
#: Without a name it restricts the request to the work of the caller's owner. It never gives more than the credential.
SESSION: Final = "Kqueue-Session"
#: Warning that `kqueue up` and `kqueue serve` print if :func:`trusts_local_users`.
OPEN_WARNING: Final = (
    "warning: KQUEUE_HTTP_TOKENS is trust-local-users: every user of this machine can submit code that the fleet runs"
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
    """Raise ConfigError if the server trusts local users on an address that other machines reach."""
    if trusts_local_users(config) and not is_loopback(config.http_address):
        raise ConfigError(
            f"KQUEUE_HTTP_TOKENS: trust-local-users is for loopback, and other machines reach {config.http_address}: "
            "remove one of the two settings"
        )


def has_http() -> bool:
    """Return True if the server's packages are installed."""
    return all(importlib.util.find_spec(name) is not None for name in _NEEDS)


def require_http() -> None:
    """Raise ConfigError if a package of the server is missing."""
    if not has_http():
        raise ConfigError(
            "serving HTTP needs FastAPI, Jinja2, uvicorn, cryptography and more packages: `pip install 'kqueue[http]'`"
        )
