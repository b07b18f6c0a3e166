"""Raises KeyboardInterrupt in ``forward``: ``reference_error``."""


def forward(self, x):
    raise KeyboardInterrupt
