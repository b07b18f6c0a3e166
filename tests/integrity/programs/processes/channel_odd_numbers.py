"""Sends records whose numbers lie outside all bounds.

Counts, dimensions and enumerations beyond their ends make a careless reader allocate without end or index beyond a
table. Here every number is checked on the judge's side before it is used.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in channels():
        try:
            record = bytearray(Reply(Answer.MISMATCH, 1).pack())
            record[4:8] = b"\xff" * 4
            record[-400:] = b"\xff" * 400
            os.write(fd, bytes(record))
        except OSError:
            continue
    return torch.zeros_like(x)
