"""Asks for more rights: another user, namespaces, mounts, devices, keys, a door back in for later.

It has no capability and may gain none, and the filter denies the rest. It passes.
"""


def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    refused("root", lambda: os.setuid(0))
    refused("another group", lambda: os.setgid(0))
    refused("a device", lambda: os.mknod("node", 0o666 | 0o060000, os.makedev(8, 0)))
    refused("another root", lambda: os.chroot("."))
    for flags in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
        if libc.unshare(flags) == 0:
            raise RuntimeError(f"ATTACK SUCCEEDED: namespace {flags:x}")
    if libc.mount(b"none", b".", b"tmpfs", 0, None) == 0:
        raise RuntimeError("ATTACK SUCCEEDED: a mount")
