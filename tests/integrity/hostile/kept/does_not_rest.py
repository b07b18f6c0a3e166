"""Never comes to rest when it is to be kept.

It is given a few seconds and ended; the verdict stands.
"""


def get_inputs():
    caller("self").orders[20] = lambda command: time.sleep(1000)
    return [torch.randn(16, 8)]
