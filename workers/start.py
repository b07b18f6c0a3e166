"""``python -m workers.start``: the program of a slot's worker process.

The order matters. The process starts with an environment without secrets, imports torch once, and forks the slot's
fork server and judge supervisor. So neither holds a secret, and both share the memory of the imports. Only then does
the process read the fleet's settings from a descriptor and become the Celery worker.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from typing import Final, NoReturn

from kqueue import logs
from workers.judge import api
from workers.judge.forkserver import handle as launch
from workers.judge.forkserver.orphans import kill_leftovers
from workers.judge.host.status_page import StatusPage
from workers.slot import PAGE_VARIABLE, READY_VARIABLE, SETTINGS_VARIABLE, Slot

#: Variables with descriptors that this process does not pass on.
_OWN: Final = (READY_VARIABLE, SETTINGS_VARIABLE)


def main() -> NoReturn:
    """Fork the slot's fork server and judge supervisor, then become its worker with the arguments of ``celery``."""
    # Garbage collection takes a tenth of the imports' time and finds nothing. Forks and workers.app enable it again.
    gc.disable()
    slot = Slot.from_environment()
    page = int(os.environ.pop(PAGE_VARIABLE))
    own = {name: os.environ.pop(name) for name in _OWN}
    kill_leftovers(slot.uid)
    from workers.judge.candidate import harness  # imports torch, which become_worker() does not need

    harness.preload()
    forkserver = launch.fork(slot)
    os.environ.update(own)
    status_page = StatusPage(page)
    os.close(page)
    api.started = api.Judges(forkserver, status_page, without=list(map(int, own.values())))
    become_worker("workers.app")


def become_worker(application: str) -> NoReturn:
    """Read the fleet's settings and run the Celery worker of the module ``application``."""
    with os.fdopen(int(os.environ.pop(SETTINGS_VARIABLE)), "rb") as stream:
        os.environ.update(json.load(stream))
    logs.configure_early(slot=Slot.from_environment().name)  # Celery sets logging up only after its first signal
    # Not celery.__main__, which imports all other commands, Flower among them.
    from celery.bin.base import CLIContext
    from celery.bin.worker import worker

    app = importlib.import_module(application).app
    worker.main(sys.argv[2:], "celery", obj=CLIContext(app=app, no_color=True, workdir=None, quiet=True))
    sys.exit(0)


if __name__ == "__main__":
    main()
