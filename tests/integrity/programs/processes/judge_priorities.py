"""Takes real-time priority for itself and the processors from its keepers.

A spinning thread with SCHED_FIFO starves everything else on its core, clocks of other slots included; a lower limit on
the judge makes every measurement late. Where it is refused the kernel answers rightly and passes; success would be an import error.
"""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F


def keepers():
    """The fork server, the worker above it, and the worker's other children: the judge among them."""
    server = os.getppid()
    pids = [server]
    try:
        worker = int(open(f"/proc/{server}/stat").read().rpartition(")")[2].split()[1])
        pids.append(worker)
        for task in os.listdir(f"/proc/{worker}/task"):
            pids += map(int, open(f"/proc/{worker}/task/{task}/children").read().split())
    except OSError:
        pass
    return [pid for pid in dict.fromkeys(pids) if pid > 1]


def attack():
    tries = [
        lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
        lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
    ]
    for pid in keepers():
        tries.append(lambda pid=pid: os.sched_setaffinity(pid, os.sched_getaffinity(pid)))
        tries.append(lambda pid=pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
    for number, attempt in enumerate(tries):
        try:
            attempt()
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: try {number}")


attack()


class ModelNew(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate="tanh")
