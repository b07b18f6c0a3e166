"""The fleet's tools for agents, served by `kqueue mcp`: the HTTP API, translated to the Model Context Protocol.

Every tool only sends requests to the API below ``/v1``, with the caller's token. Therefore the API alone enforces
scopes, limits and priorities. The package needs the extra ``mcp``.
"""

from __future__ import annotations

import importlib.util

from kqueue.errors import ConfigError
from kqueue.http import has_http


def require_mcp() -> None:
    """Raise ConfigError if a package of the tools' server is missing."""
    if not has_http() or any(importlib.util.find_spec(name) is None for name in ("mcp", "httpx")):
        raise ConfigError("serving tools to agents needs the MCP SDK: `pip install 'kqueue[mcp]'`")
