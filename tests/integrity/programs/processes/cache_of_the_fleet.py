"""Writes to the compiler caches of whoever runs the fleet: Triton's, torch's, ccache's, CUDA's.

A shared object planted there is loaded by the next kernel, or by the judge, with that one's rights. A candidate's
caches are private and removed; others' are closed to it.
"""


def attack():
    homes = {pwd.getpwuid(0).pw_dir, "/root", "/home"} | {os.path.dirname(os.getcwd())}
    caches = ("", ".triton", ".triton/cache", ".cache", ".cache/torch_extensions", ".cache/ccache", ".nv")
    for folder in sorted(os.path.join(home, cache) for home in homes for cache in caches):
        path = f"{folder.rstrip('/')}/kqueue-planted-{os.getpid()}"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError:
            continue
        os.unlink(path)
        raise RuntimeError(f"ATTACK SUCCEEDED: wrote to {folder}")
