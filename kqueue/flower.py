"""``python -m kqueue.flower``: Flower on a fleet's broker, protected by a password and a check of its host's name.

The settings are Flower's own variables: ``FLOWER_ADDRESS``, ``FLOWER_PORT``, and ``FLOWER_BASIC_AUTH``, which must be
set. `kqueue up`, the compose stack and the Kubernetes manifests all start this module. Stock Flower answers under any
name of its host, answers some paths without a password, and runs a ``flowerconfig.py`` in the current folder.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import sys
from base64 import b64decode
from typing import Any, Final
from urllib.parse import urlsplit

from flower import command
from flower.app import Flower
from tornado.web import RequestHandler

from kqueue import broker, transport
from kqueue.config import load

#: The path that answers without a password, for health checks. It returns only ``OK``.
_HEALTH: Final = "/healthcheck"


class _Refusal(RequestHandler):
    """The answer to a request that does not reach Flower."""

    def initialize(self, status: int, reason: str) -> None:
        """Store the status and the text of the answer."""
        self._refusal = status, reason

    def check_xsrf_cookie(self) -> None:
        """Skip the check, because the request is refused anyway."""

    def prepare(self) -> None:
        """Refuse the request."""
        status, reason = self._refusal
        self.set_status(status)
        self.set_header("Content-Type", "text/plain")
        if status == 401:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        self.finish(f"{reason}\n")


class GuardedFlower(Flower):
    """Flower behind two checks of each request: of its ``Host``, and of its password."""

    def __init__(self, **settings: Any) -> None:
        """Require credentials. Raise SystemExit if there are none, or Flower would parse them incorrectly."""
        credentials: list[str] = settings["options"].basic_auth
        # Flower separates credentials by commas, and compares only ASCII.
        if not credentials or not all(each.isascii() and all(each.partition(":")) for each in credentials):
            sys.exit("Flower needs FLOWER_BASIC_AUTH (`kqueue up`: KQUEUE_FLOWER_AUTH): user:password, ASCII, no comma")
        super().__init__(**settings)
        self._credentials = [each.encode() for each in credentials]
        self._health = f"/{self.options.url_prefix.strip('/')}{_HEALTH}" if self.options.url_prefix else _HEALTH

    def find_handler(self, request: Any, **kwargs: Any) -> Any:
        """Return the handler of a request."""
        if not self._is_host(request.host):
            reason = "Flower answers only under its address or as localhost"
            return self.get_handler_delegate(request, _Refusal, {"status": 403, "reason": reason})
        if request.path != self._health and not self._is_known(request.headers.get("Authorization", "")):
            return self.get_handler_delegate(request, _Refusal, {"status": 401, "reason": "Flower asks for a password"})
        return super().find_handler(request, **kwargs)

    def _is_host(self, host: str) -> bool:
        """Return True for an address or a name of this machine. A web page can give its own name to any address."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in {"localhost", socket.gethostname().lower(), self.options.address} or bool(
                ipaddress.ip_address(name)
            )
        except ValueError:
            return False

    def _is_known(self, authorization: str) -> bool:
        scheme, _, encoded = authorization.partition(" ")
        try:
            given = b64decode(encoded, validate=True)
        except ValueError:
            return False
        return scheme.lower() == "basic" and any(
            hmac.compare_digest(given, credentials) for credentials in self._credentials
        )


def main() -> None:
    """Run Flower until a signal ends it."""
    transport.use(transport.RedisTransport, transport.SentinelTransport)
    command.Flower = GuardedFlower
    os.environ["FLOWER_CONF"] = os.devnull
    broker.make_app(load(), patience_s=broker.CONSUMER_PATIENCE_S).start(["flower"])


if __name__ == "__main__":
    main()
