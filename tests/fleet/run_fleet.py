"""A supervisor whose workers run the application `judges`. They are forks, which need not import their modules."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import kombu.pools
from kombu import transport

from kqueue import logs
from kqueue.config import load
from kqueue.local.process import _Fork, _show
from workers import process, start
from workers.fleet import Supervisor
from workers.judge.gpu.devices import choose, devices
from workers.plan import plan

# Workers import these too.
for module in ("celery.apps.worker", "celery.bin.worker", "celery.concurrency.prefork", "celery.worker.consumer"):
    import_module(module)
for module in ("workers.backend", "workers.delivery", "workers.judge.api", "workers.messages"):
    import_module(module)


class Worker(_Fork):
    """A worker, with the part of `subprocess.Popen`'s interface that a supervisor uses."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        preexec_fn: Callable[[], None],
        **_: Any,
    ) -> None:
        def become() -> NoReturn:
            try:
                # The supervisor's connections must not be used, collected or closed here.
                gc.freeze()
                pools = (kombu.pools.connections, kombu.pools.producers, util._afterfork_registry)
                for known in (*pools, transport._transport_cache):
                    known.clear()
                signal.set_wakeup_fd(-1)
                for number in signal.valid_signals():
                    if callable(signal.getsignal(number)):
                        signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for descriptor in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *pass_fds}:
                    with suppress(OSError):
                        os.close(descriptor)
                os.setsid()
                os.chdir(cwd)
                os.environ.clear()
                os.environ.update(env)
                _show(command)
                sys.argv = ["judges", *command[4:]]
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                preexec_fn()
                start.become_worker("judges")
            except SystemExit as end:
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:  # noqa: BLE001
                sys.excepthook(*sys.exc_info())
            os._exit(1)

        super().__init__(become)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


if "JUDGES_PYTHON" in os.environ:  # the program that starts the workers' Python
    process.PYTHON = (os.environ["JUDGES_PYTHON"], *process.PYTHON[1:])
else:
    process.subprocess = SimpleNamespace(Popen=Worker, DEVNULL=None)
process._LAST_BACKOFF_S = 0.5  # tests kill many workers
config = load()
logs.configure(config)
gpus = choose(config.gpus, devices())
self_test = os.environ.get("JUDGES_SELF_TEST", "workers.judge.gpu.self_test")
patience_s = float(os.environ.get("JUDGES_PATIENCE_S", "600"))
supervisor = Supervisor(
    config, plan(config, gpus, 2), gpus, program="judges", self_test=self_test, patience_s=patience_s
)
supervisor.check_services()
supervisor.run()
sys.exit(0)
