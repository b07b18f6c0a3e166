"""Draws inputs of another dtype the second time: ``invalid_problem``."""


class Model(torch.nn.Module):
    calls = 0

    def forward(self, x, *others):
        return x * 2 + 1


def get_inputs():
    Model.calls += 1
    return [torch.ones(4, 8, dtype=torch.int64 if Model.calls > 1 else torch.float32)]
