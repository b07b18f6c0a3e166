"""Raises an exception whose text takes for ever to make: ``reference_timeout``."""


class Slow(Exception):
    def __str__(self):
        while True:
            pass


def get_inputs():
    raise Slow
