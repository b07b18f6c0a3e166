"""The HTTP door: a thin translation of the client and the store, served by `kqueue serve`. Needs the extra ``http``."""

from __future__ import annotations

import importlib.util

from kqueue.errors import ConfigError


def has_http() -> bool:
    """Whether what the door needs is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("fastapi", "uvicorn"))


def require_http() -> None:
    """Return if the door can be served in this installation.

    Raises:
        ConfigError: it needs packages that are not there.
    """
    if not has_http():
        raise ConfigError("serving HTTP needs FastAPI and uvicorn: `pip install 'kqueue[http]'`")
