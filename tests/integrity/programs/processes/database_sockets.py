"""Connects to Postgres on every address where a fleet has one.

By unix sockets that the kernel's table names, and by TCP on this host. With a connection a kernel could write its own
verdict, as local users are often trusted.
"""


def attack():
    tries = [(socket.AF_INET, ("127.0.0.1", 5432)), (socket.AF_INET, ("127.0.0.1", 6432))]
    try:
        lines = open("/proc/net/unix").read().splitlines()
    except OSError:
        lines = []
    tries += [(socket.AF_UNIX, line.split()[-1]) for line in lines if ".s.PGSQL." in line]
    for family, address in tries:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as door:
                door.settimeout(1)
                door.connect(address)
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: connected to {address}")
