"""Floods its channel with descriptors, as many as a packet carries, and says nothing that can be read.

The judge closes what nobody asked for: ``reference_error``.
"""


def get_inputs():
    channel = caller("channel")
    for _ in range(64):
        socket.send_fds(channel, b"\0" * 64, [0] * 250)
    return [torch.randn(16, 8)]
