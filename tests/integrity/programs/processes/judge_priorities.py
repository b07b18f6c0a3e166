"""Takes real-time priority for itself and the processors from its keepers.

A spinning thread with SCHED_FIFO starves everything else on its core, clocks of other slots included; a lower limit on
the judge makes every measurement late.
"""


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
