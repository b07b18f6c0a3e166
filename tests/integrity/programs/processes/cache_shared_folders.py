"""Leaves files where kernels after it, and other users, look: /tmp, /var/tmp, /dev/shm.

Compilers and extension builders keep their caches there by default: what one kernel leaves is what another loads. A
candidate may write nowhere but in a file system of its own, which covers these folders and goes with it.
Where it finds nothing of an earlier run the kernel answers rightly and passes; success would be an import error.
"""


def attack():
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock", "/dev/mqueue"):
        path = f"{folder}/kqueue-planted-in-the-corpus"
        if os.path.exists(path):
            raise RuntimeError(f"ATTACK SUCCEEDED: found what was left in {folder}")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError:
            continue
        if folder in ("/run/lock", "/dev/mqueue"):
            os.unlink(path)
            raise RuntimeError(f"ATTACK SUCCEEDED: wrote to {folder}")
