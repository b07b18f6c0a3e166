"""Raises an exception with a message of NUL, half characters and a terminal's orders: ``reference_error``.

Texts are bounded, decoded with replacement, and decide nothing.
"""


def forward(self, x):
    raise type("\ud800" * 500, (Exception,), {})("\0\ud800\x1b]0;owned\a" * 10_000)
