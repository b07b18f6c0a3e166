"""Hosts on one machine: network namespaces joined by a hub on which Redis and Postgres are reached over TCP.

The hub is a namespace too, so that no port is open outside it. Needs root and `ip`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self
from uuid import uuid4

#: Forwards connections from a TCP address to a unix socket. Arguments: address, port and socket, repeated.
_PROXY: Final = """
import asyncio, ctypes, signal, sys

ctypes.CDLL(None).prctl(1, signal.SIGKILL)

async def pump(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def serve(address, port, path):
    async def join(reader, writer):
        try:
            there = await asyncio.open_unix_connection(path)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))
    await asyncio.start_server(join, address, int(port))

async def main():
    words = sys.argv[1:]
    for place in range(0, len(words), 3):
        await serve(*words[place:place + 3])
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


class NoNetwork(Exception):
    """Raised if this machine cannot create network namespaces. The message has the reason."""


class Network:
    """A hub with Redis at one address and Postgres at another, and hosts that reach both."""

    REDIS: Final = "10.213.0.1"
    POSTGRES: Final = "10.213.0.2"

    def __init__(self, redis_socket: Path, postgres_socket: Path, hosts: int) -> None:
        """Take the servers' unix sockets and the number of hosts. `with` creates the namespaces."""
        self._sockets = (redis_socket, postgres_socket)
        self._prefix = f"kq{uuid4().hex[:5]}"
        self._hub = f"{self._prefix}h"
        self._hosts = hosts
        self._exit = ExitStack()

    @property
    def redis_url(self) -> str:
        """Return the URL of Redis for hosts."""
        return f"redis://{self.REDIS}:6379/0"

    @property
    def postgres_url(self) -> str:
        """Return the URL of Postgres for hosts."""
        return f"postgresql+psycopg://postgres@{self.POSTGRES}:5432/kqueue"

    def __enter__(self) -> Self:
        try:
            with ExitStack() as made:
                self._make(made)
                self._exit = made.pop_all()
        except FileNotFoundError as error:
            raise NoNetwork("the program `ip` is missing") from error
        except subprocess.CalledProcessError as error:
            raise NoNetwork(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def on(self, host: int) -> list[str]:
        """Return the command prefix that runs a program on a host with its own host name."""
        name = f"host-{host}"
        there = ["ip", "netns", "exec", self._host(host), "unshare", "--uts", "sh", "-c"]
        return [*there, f'hostname {name} && exec "$@"', "sh"]

    def cut(self, host: int, service: str) -> None:
        """Drop a service's packets to a host, including packets of open connections."""
        self._rule("add", host, service)

    def heal(self, host: int, service: str) -> None:
        """Undo :meth:`cut`."""
        self._rule("del", host, service)

    def _rule(self, verb: str, host: int, service: str) -> None:
        _run("ip", "-n", self._hub, "rule", verb, "from", service, "to", f"{self._address(host)}/32", "blackhole")

    def _make(self, made: ExitStack) -> None:
        for name in (self._hub, *(self._host(host) for host in range(self._hosts))):
            _run("ip", "netns", "add", name)
            made.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for service in (self.REDIS, self.POSTGRES):
            _run("ip", "-n", self._hub, "address", "add", f"{service}/32", "dev", "lo")
        for host in range(self._hosts):
            hub, there = f"{self._prefix}u{host}", f"{self._prefix}d{host}"
            name, peer = self._host(host), f"10.213.{host + 1}.1"
            _run("ip", "link", "add", hub, "netns", self._hub, "type", "veth", "peer", "name", there, "netns", name)
            _run("ip", "-n", self._hub, "address", "add", f"{peer}/24", "dev", hub)
            _run("ip", "-n", self._hub, "link", "set", hub, "up")
            _run("ip", "-n", name, "address", "add", f"{self._address(host)}/24", "dev", there)
            _run("ip", "-n", name, "link", "set", there, "up")
            _run("ip", "-n", name, "route", "add", "default", "via", peer)
        redis_socket, postgres_socket = map(str, self._sockets)
        command = ["ip", "netns", "exec", self._hub, sys.executable, "-c", _PROXY]
        command += [self.REDIS, "6379", redis_socket, self.POSTGRES, "5432", postgres_socket]
        proxy = subprocess.Popen(command, stdout=subprocess.PIPE, env={"PATH": os.environ["PATH"]})
        made.callback(proxy.wait)
        made.callback(proxy.kill)
        assert proxy.stdout is not None
        assert proxy.stdout.readline() == b"ready\n"
        made.callback(proxy.stdout.close)

    def _host(self, host: int) -> str:
        return f"{self._prefix}{host}"

    @staticmethod
    def _address(host: int) -> str:
        return f"10.213.{host + 1}.2"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
