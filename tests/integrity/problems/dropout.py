"""Dropout, whose mask comes from the seed that is set before each call."""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, p=0.5, training=True)


def get_inputs():
    return [torch.randn(256, 512)]
