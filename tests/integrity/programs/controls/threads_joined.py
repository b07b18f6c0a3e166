"""Honest: two threads, joined before forward() returns.

Each computes half of the rows.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)

    def work(rows):
        with torch.no_grad():
            out[rows] = F.gelu(x[rows], approximate="tanh")

    half = x.shape[0] // 2
    threads = [threading.Thread(target=work, args=(rows,)) for rows in (slice(0, half), slice(half, None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out
