"""Cuts the memory that it shares with the judge, so that the judge would die when it touches it.

The sizes are sealed. It passes.
"""


def attack():
    for number in range(3, 256):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "memfd:" in target:
            for size in (0, 100):
                try:
                    os.ftruncate(number, size)
                except OSError:
                    continue
                raise RuntimeError(f"ATTACK SUCCEEDED: {target}")


def forward(self, x):
    attack()
    return x * 2 + 1
