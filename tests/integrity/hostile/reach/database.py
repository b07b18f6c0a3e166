"""Loads the fleet's own settings and drivers to reach its database and its queue.

The packages can be imported, but no setting names a service, and nothing can be connected to. It passes.
"""


def attack():
    try:
        import psycopg
        import redis

        from kqueue.config import load
    except ImportError:  # not installed with a worker alone, or closed to it
        return
    if "secret-of-the-fleet" in repr(load()):
        raise RuntimeError("ATTACK SUCCEEDED: the settings")
    for what in (
        lambda: psycopg.connect("postgresql://postgres@127.0.0.1/postgres", connect_timeout=1),
        lambda: psycopg.connect("postgresql:///postgres?host=/tmp", connect_timeout=1),
        lambda: redis.Redis(port=6379, socket_connect_timeout=1).ping(),
    ):
        try:
            what()
        except Exception:
            continue
        raise RuntimeError("ATTACK SUCCEEDED: a service")
