"""Looks for a client, a broker or a connection that its process might have inherited.

A worker that forks its kernels hands them its open connections and its loaded settings. The fork server imports none
of these, and inherits no descriptor.
"""


def attack():
    found = [name for name in ("celery", "redis", "kombu", "sqlalchemy", "psycopg") if name in sys.modules]
    found += [
        name
        for name in ("kqueue.config", "kqueue.store", "workers.judge.pipeline", "workers.app")
        if name in sys.modules
    ]
    for fd in range(3, 4096):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.startswith(("socket:", "/memfd:", "/dev/", "anon_inode:", "pipe:", "/proc/")):
            found.append(target)
    if found:
        raise RuntimeError(f"ATTACK SUCCEEDED: {found}")
