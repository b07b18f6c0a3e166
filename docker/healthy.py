"""Exits with 0 if slots of this container are registered and their heartbeats come, else with 1."""

from __future__ import annotations

import socket
import sys

from kqueue.config import load
from kqueue.errors import KqueueError
from kqueue.store import workers
from kqueue.store.engine import connect

try:
    config = load()
    engine = connect(config.require_database(), application="kqueue health", pool_size=1)
    # Heartbeats come four times a lease: the rows of a life before this one do not count for long.
    live = workers.live(engine, within_s=config.lease_s / 2)
except KqueueError as error:
    sys.exit(str(error))
here = [worker.name for worker in live if worker.host == socket.gethostname()]
print(*sorted(here))  # noqa: T201 what `docker inspect` shows
sys.exit(None if here else "no slot of this container is alive")
