"""Computes in ``get_inputs`` for ever, deaf to signals: ``reference_timeout``."""


def get_inputs():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass
