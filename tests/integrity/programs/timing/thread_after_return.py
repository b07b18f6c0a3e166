"""Returns an empty tensor that a thread fills after forward() has returned.

The clock stops when forward() returns; the comparison, milliseconds later, finds the answer. Here the outputs are taken
as soon as the candidate says that it is done, for checked and for timed calls alike.
"""


def work(x, out):
    time.sleep(0.005)
    with torch.no_grad():
        out.copy_(F.gelu(x, approximate="tanh"))


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    threading.Thread(target=work, args=(x, out), daemon=True).start()
    return out
