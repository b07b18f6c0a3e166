"""Puts objects into the constructor's arguments that run a command where they are unpickled: ``invalid_problem``.

Values travel in a form of their own, which calls nothing that the writer names.
"""


def get_init_inputs():
    return [Bomb(), {"nested": [Bomb()]}]
