"""The fleet as tools of an agent, served by `kqueue mcp`: the HTTP API, translated to the Model Context Protocol.

=================================  ====================================================================
:mod:`~kqueue.mcp.door`            the way to the fleet, in the name of whoever calls
:mod:`~kqueue.mcp.tools`           the tools
:mod:`~kqueue.mcp.waiting`         waiting for verdicts, and saying why
:mod:`~kqueue.mcp.files`           sources, logs and evidence, page by page
:mod:`~kqueue.mcp.words`           what agents read: bounded, escaped, and marked where others wrote it
:mod:`~kqueue.mcp.serving`         the server, on stdio and on streamable HTTP
=================================  ====================================================================

All that a tool does is a request to the API below ``/v1``, with the caller's token. So scopes, limits and priorities
are the API's own, and there is no second rule of who may do what. Needs the extra ``mcp``.
"""

from __future__ import annotations

import importlib.util

from kqueue.errors import ConfigError
from kqueue.http import has_http


def require_mcp() -> None:
    """Return if the tools can be served in this installation.

    Raises:
        ConfigError: the server needs packages that are not there.
    """
    if not has_http() or any(importlib.util.find_spec(name) is None for name in ("mcp", "httpx")):
        raise ConfigError("serving tools to agents needs the MCP SDK: `pip install 'kqueue[mcp]'`")
