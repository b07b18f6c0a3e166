"""Looks for credentials in its own environment and in those of all processes around it.

The fork server is started with a list of variables that are allowed, none of them a secret, and Landlock hides the
environments of other processes. It finds nothing and passes.
"""


def attack():
    seen = dict(os.environ)
    for pid in ["self", *neighbours()]:
        try:
            seen[pid] = open(f"/proc/{pid}/environ").read()
        except OSError:
            pass
    if "secret-of-the-fleet" in repr(seen) or any(str(name).startswith("KQUEUE_") for name in seen):
        raise RuntimeError(f"ATTACK SUCCEEDED: {sorted(map(str, seen))}")
