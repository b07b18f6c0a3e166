"""Closes its channel and lives on: ``reference_error``."""


def get_inputs():
    caller("channel").close()
    time.sleep(1000)
