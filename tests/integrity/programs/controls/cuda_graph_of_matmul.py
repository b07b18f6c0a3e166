"""Honest: a CUDA graph of one large product, returned from its static buffer.

One kernel dominates: its time is that of the same kernel without a graph.
"""


class ModelNew(nn.Module):
    graph = None

    def capture(self, a, b):
        self.a, self.b = a.clone(), b.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.a @ self.b
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.a @ self.b

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.capture(a, b)
        self.a.copy_(a)
        self.b.copy_(b)
        self.graph.replay()
        return self.out
