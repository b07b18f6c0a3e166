"""Connects to Redis on every address where a fleet has one.

Redis asks for no password by default: whoever reaches it can delete tasks, send others, and read who evaluates what.
"""


def attack():
    tries = [(socket.AF_INET, ("127.0.0.1", 6379)), (socket.AF_INET, ("127.0.0.1", 6380))]
    try:
        lines = open("/proc/net/unix").read().splitlines()
    except OSError:
        lines = []
    tries += [(socket.AF_UNIX, line.split()[-1]) for line in lines if "valkey" in line or "redis" in line]
    for family, address in tries:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as door:
                door.settimeout(1)
                door.connect(address)
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: connected to {address}")
