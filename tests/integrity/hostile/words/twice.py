"""Answers each order twice, so that the judge takes an old answer for a new one.

The answer does not fit the order: the problem fails.
"""


def get_inputs():
    channel, command = caller("channel"), caller("command")
    from workers.judge.channel.protocol import Answer, Reply

    channel.send(Reply(Answer.DONE, command.sequence).pack())
    return [torch.randn(16, 8)]
