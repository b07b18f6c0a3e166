"""Writes a file without end into its directory.

A full disk is everybody's trouble: logs, database, other slots. Here a file has a largest size, and beyond it the
write fails in the kernel that made it.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    with open("hog", "wb") as file:
        for _ in range(1 << 12):
            file.write(b"\x01" * (1 << 20))
    return x
