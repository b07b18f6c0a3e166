"""Announces memory of a GPU where there is none, with descriptors that open something else: ``reference_error``."""


def get_inputs():
    from workers.judge.channel.protocol import Export

    channel = caller("channel")
    for run in range(1000):
        export = Export(run, 200, (1 << 50,) * 200, (0,) * 200)
        socket.send_fds(channel, export.pack(), export.descriptors)
    return [torch.randn(16, 8)]
