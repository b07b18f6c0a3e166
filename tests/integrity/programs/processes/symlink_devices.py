"""Makes device nodes in its directory, and opens the disks and memory of the host.

A node is a file: who may make one with the disk's numbers may read the disk.
"""


def attack():
    for kind, major, minor in ((stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 259, 0)):
        try:
            os.mknod("node", 0o600 | kind, os.makedev(major, minor))
        except OSError:
            continue
        os.unlink("node")
        raise RuntimeError("ATTACK SUCCEEDED: a device node")
    for path in ("/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/nvme0n1", "/dev/kvm", "/dev/fuse"):
        try:
            os.close(os.open(path, os.O_RDWR))
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: opened {path}")
