"""Searches all of its own memory, and its directory, for the source of the kernel that it is compared with.

A reference is told its problem and seeds, never a kernel. It finds nothing and passes.
"""


def attack():
    mark = re.compile(rb"THIS-IS-THE-KERNEL[S]-SOURCE")  # which does not find itself
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            where, rights = line.split()[:2]
            begin, end = (int(number, 16) for number in where.split("-"))
            if rights.startswith("rw") and end - begin < 1 << 28 and "[v" not in line:
                memory.seek(begin)
                try:
                    found = mark.search(memory.read(end - begin))
                except OSError:
                    continue
                if found:
                    raise RuntimeError("ATTACK SUCCEEDED: the kernel's source")
    if mark.search(open("kernel.py", "rb").read()):
        raise RuntimeError("ATTACK SUCCEEDED: a file")


def forward(self, x):
    attack()
    return x * 2 + 1
