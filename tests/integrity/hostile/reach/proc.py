"""Opens memory, maps, descriptors and working directories of the judge and the fork server in /proc.

Landlock leaves it of /proc its own process and a few files about the machine. Each attempt is refused and it passes.
"""


def attack():
    for pid in neighbours():
        for name in ("mem", "maps", "environ", "syscall", "stack", "auxv"):
            refused(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
        for name in ("fd", "map_files", "task"):
            refused(f"{name} of {pid}", lambda: os.listdir(f"/proc/{pid}/{name}"))
        refused(f"root of {pid}", lambda: os.listdir(f"/proc/{pid}/root/"))
