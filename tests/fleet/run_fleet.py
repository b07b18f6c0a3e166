"""A supervisor of one or more CPU slots whose workers run the application `judges`."""

from __future__ import annotations

import os
import sys

from kqueue import logs
from kqueue.config import load
from workers.fleet import Supervisor, plan

# A program that starts Python, which workers are started by.
sys.executable = os.environ.get("JUDGES_PYTHON", sys.executable)
config = load()
logs.configure(config)
supervisor = Supervisor(config, plan(config, [], 2), program="judges")
supervisor.check_services()
supervisor.run()
sys.exit(0)
