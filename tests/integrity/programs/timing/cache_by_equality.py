"""Keeps all inputs and answers, and looks for an equal input first; one that it has not seen costs 20 ms.

It is right whatever comes, and free for an input that was checked before. No input is used twice in timed calls here:
it passes with the time of computing.
"""


class ModelNew(nn.Module):
    known = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for seen, out in self.known:
            if torch.equal(seen, x):
                return out
        self.known.append((x.clone(), answer(x)))
        return self.known[-1][1]
