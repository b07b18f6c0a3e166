"""`kqueue doctor`: check this host and its services, and name remedies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kqueue.cli import options
from kqueue.cli.render import console, emit, text
from kqueue.text import one_line

if TYPE_CHECKING:
    from kqueue.doctor import Check

#: Width in characters of the column of names.
_NAME: Final = 22
_STYLES: Final = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also judge known kernels, and report faults. Takes minutes.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check this host and its services. The report contains no secrets, so you can share it to ask for help.

    Exits with 1 if something is broken.
    """
    from kqueue.config import load
    from kqueue.doctor import State, examine

    group, failed = "", False
    # Each check is shown at once, because all of them take a minute on a busy host.
    for check in examine(load(), deep=deep):
        failed = failed or check.state is State.FAIL
        if check.group != group and not as_json:
            group = check.group
            console().print(text(group, "bold"))
        emit(check, _print, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _print(check: Check) -> None:
    out = console()
    out.print(f"  {check.state:<4}", end="", style=_STYLES[check.state])
    out.print(f"  {check.name:<{_NAME}}  {one_line(check.detail)}", soft_wrap=True)
    if check.fix:
        out.print(" " * (_NAME + 10) + one_line(check.fix), style="cyan", soft_wrap=True)
    sys.stdout.flush()
