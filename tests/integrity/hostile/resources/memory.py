"""Takes more of the host's memory than it may.

The control group, or the fork server, which looks every 40 ms, ends it: ``reference_error``.
"""


def forward(self, x):
    held = []
    while True:
        held.append(bytearray(b"x") * (16 << 20))
