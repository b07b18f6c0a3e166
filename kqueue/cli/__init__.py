"""The command `kqueue`: one module per command group, and the exit statuses that all of them share."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from kqueue.cli import (
    categories,
    database,
    doctor,
    fleet,
    gpu,
    judge,
    kernelbench,
    results,
    serve,
    submit,
    sweep,
    token,
)
from kqueue.cli.render import say
from kqueue.errors import (
    AccessRefused,
    ConfigError,
    EvaluationFailed,
    InvalidRequest,
    JudgeUnavailable,
    KqueueError,
    ServiceError,
    UnknownEvaluation,
    WaitTimeout,
)

#: Exit statuses for commands that could not do their work. Status 1 is reserved for "done, and the answer is no".
STATUSES: dict[type[KqueueError], int] = {
    InvalidRequest: 2,
    ServiceError: 3,
    AccessRefused: 3,
    ConfigError: 3,
    EvaluationFailed: 3,
    JudgeUnavailable: 3,
    WaitTimeout: 4,
    UnknownEvaluation: 5,
}

app = typer.Typer(
    name="kqueue",
    help="A worker fleet that judges GPU kernels.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for group in (judge, submit, kernelbench, results, fleet, gpu, serve, token, sweep, database, categories, doctor):
    group.register(app)


def exit_status(error: KqueueError) -> int:
    """Return the exit status for ``error``."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 1)


def main() -> NoReturn:
    """Run this process's command line and exit.

    A :class:`KqueueError` becomes one line on stderr and an exit status from :data:`STATUSES`.
    """
    try:
        app(prog_name="kqueue")
    except KqueueError as error:
        say(error)
        sys.exit(exit_status(error))
    sys.exit(0)
