"""The fleet's tools for agents, served by `kqueue mcp`: the HTTP API, translated to the Model Context Protocol.

=================================  ====================================================================
:mod:`~kqueue.mcp.connection`      the connection to the fleet, with the caller's credential
:mod:`~kqueue.mcp.tools`           the tools
:mod:`~kqueue.mcp.tuning`          the tool `tune`
:mod:`~kqueue.mcp.schemas`         the arguments, answers and errors of tools
:mod:`~kqueue.mcp.evaluations`     submissions, waits for verdicts with progress, and repetitions
:mod:`~kqueue.mcp.autopsy`         autopsies
:mod:`~kqueue.mcp.files`           sources, logs and evidence in pages
:mod:`~kqueue.mcp.rendering`       text for agents: bounded, escaped, and marked where it is untrusted
:mod:`~kqueue.mcp.serving`         the server, on stdio and on streamable HTTP
=================================  ====================================================================

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
