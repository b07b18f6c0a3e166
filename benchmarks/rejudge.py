"""Judge published claims on a fleet on this machine: `python benchmarks/rejudge.py SET --out DIR [--slots N]`.

It starts a fleet with this number of slots for each GPU, or for the CPU without one, and runs `kqueue rejudge` on the
set. After `--seconds` it interrupts the command, which then writes the report of the verdicts so far. The fleet's
database is in `--out`, so that a further run with the same folder judges the remaining kernels. Further arguments are
passed on, such as `--profile`. The status is the command's, and 3 if there are kernels without a verdict.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kqueue.config import load
from kqueue.local.fleet import LocalFleet


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", metavar="SET", type=Path, help="the set of claims")
    parser.add_argument("--out", type=Path, required=True, help="folder of the verdicts and the report")
    parser.add_argument("--slots", type=int, default=6, help="slots for each GPU, or for the CPU without a GPU")
    parser.add_argument("--cpu", action="store_true", help="judge on the CPU")
    parser.add_argument("--seconds", type=float, help="time after which the command is interrupted")
    options, more = parser.parse_known_args()
    slots = {"gpus": "none", "cpu_slots": options.slots} if options.cpu else {"slots_per_gpu": options.slots}
    with tempfile.TemporaryDirectory(prefix="kqueue-claims-") as folder:
        root = Path(folder)
        root.chmod(0o711)  # candidates with other uids must reach their scratch directories
        home = options.out.absolute() / "fleet"
        config = load(home=home, scratch=root / "scratch", reuse=False, probe_share=0, **slots)
        with LocalFleet(config, durable=False):
            # Commands find the fleet by its home.
            environment = os.environ | {"KQUEUE_HOME": str(home)}
            command = [sys.executable, "-m", "kqueue", "rejudge", str(options.claims), "--out", str(options.out), *more]
            process = subprocess.Popen(command, env=environment)
            try:
                return process.wait(options.seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                process.wait()
                return 3


if __name__ == "__main__":
    sys.exit(main())
