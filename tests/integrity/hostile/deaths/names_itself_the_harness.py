"""Raises an exception that looks like the harness's own word on a malformed problem: ``invalid_problem``.

It may say of itself that it is malformed.
"""


class ProblemError(Exception):
    __module__ = "workers.judge.candidate.harness"


def get_inputs():
    raise ProblemError("all is well")
