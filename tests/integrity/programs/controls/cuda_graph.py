"""Honest: a CUDA graph of the chain, with its inputs copied in at every call.

Static buffers, captured at the first call, replayed, and cloned out: what a stale replay looks like, but is not.
"""


class ModelNew(nn.Module):
    graph = None

    def capture(self, x):
        self.x = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            chain(self.x)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = chain(self.x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.capture(x)
        self.x.copy_(x)
        self.graph.replay()
        return self.out.clone()
