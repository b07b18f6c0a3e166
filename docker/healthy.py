"""Exit with 0 if slots of this container are registered and send heartbeats, else with 1."""

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
    # There are four heartbeats per lease. Rows of an earlier container soon count as dead.
    live = workers.live(engine, within_s=config.lease_s / 2)
except KqueueError as error:
    sys.exit(str(error))
here = [worker.name for worker in live if worker.host == socket.gethostname()]
print(*sorted(here))  # noqa: T201 shown by `docker inspect`
sys.exit(None if here else "no slot of this container is alive")
