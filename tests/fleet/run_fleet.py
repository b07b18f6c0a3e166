"""A supervisor whose workers run the application `judges`."""

from __future__ import annotations

import os
import sys

from kqueue import logs
from kqueue.config import load
from workers import process
from workers.fleet import Supervisor
from workers.judge.gpu.devices import choose, devices
from workers.plan import plan

# The program that starts the workers' Python.
sys.executable = os.environ.get("JUDGES_PYTHON", sys.executable)
process._LAST_BACKOFF_S = 0.5  # tests kill many workers
config = load()
logs.configure(config)
gpus = choose(config.gpus, devices())
canary = os.environ.get("JUDGES_CANARY", "workers.judge.gpu.self_test")
patience_s = float(os.environ.get("JUDGES_PATIENCE_S", "600"))
supervisor = Supervisor(config, plan(config, gpus, 2), gpus, program="judges", self_test=canary, patience_s=patience_s)
supervisor.check_services()
supervisor.run()
sys.exit(0)
