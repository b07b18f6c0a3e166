"""Looks for the fleet's settings in its own environment and memory, and in those of its keepers.

With the database's URL a kernel writes its own verdict. The fork server was forked before any secret was read, its
environment names a fixed list of variables, and the environments of worker and judge belong to another user.
"""


def attack():
    prefixes = ("KQUEUE_DATABASE", "KQUEUE_REDIS", "KQUEUE_BROKER", "PGPASSWORD", "DATABASE_URL")
    found = [name for name in os.environ if name.startswith(prefixes)]
    for pid in keepers():
        try:
            environ = open(f"/proc/{pid}/environ", "rb").read()
        except OSError:
            continue
        found += [f"{name} of {pid}" for name in prefixes if name.encode() in environ]
    scheme = "postgresql" + "+psycopg:"
    for thing in gc.get_objects():
        if type(thing) is dict:
            found += [
                f"{key!r}" for key, value in list(thing.items()) if type(value) is str and value.startswith(scheme)
            ]
    if found:
        raise RuntimeError(f"ATTACK SUCCEEDED: {found}")
