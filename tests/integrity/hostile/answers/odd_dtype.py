"""Answers with a dtype that the protocol does not know: ``invalid_problem``."""


def forward(self, x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
