"""Raises SystemExit in the constructor: ``reference_error``."""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sys.exit(0)
