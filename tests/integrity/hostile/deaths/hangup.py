"""Sends itself SIGHUP in ``forward``: ``reference_error``.

Only SIGKILL, which operators send, counts as the fleet's doing.
"""


def forward(self, x):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the fleet may have it ignored
    os.kill(os.getpid(), signal.SIGHUP)
    return x * 2 + 1
