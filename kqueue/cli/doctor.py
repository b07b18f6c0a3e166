"""`kqueue doctor`: show what works on this host, and how to fix what does not."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from kqueue.cli.render import console, one_line, text, write_json

_STYLES: Final = {"ok": "green", "info": "dim", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    """Add this group's commands to ``app``."""
    app.command()(doctor)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line per check.")] = False,
) -> None:
    """Check this host and its services.

    Exits with 1 if something is broken.
    """
    from kqueue.config import load
    from kqueue.doctor import State, examine

    checks = examine(load())
    if as_json:
        for check in checks:
            write_json(check.to_json())
    else:
        out, width = console(), max(len(check.name) for check in checks)
        group = ""
        for check in checks:
            if check.group != group:
                group = check.group
                out.print(text(group, "bold"))
            out.print(f"  {check.state:<4}", end="", style=_STYLES[check.state])
            out.print(f"  {check.name:<{width}}  {one_line(check.detail)}", soft_wrap=True)
            if check.fix:
                out.print(" " * (width + 10) + one_line(check.fix), style="cyan", soft_wrap=True)
    if any(check.state is State.FAIL for check in checks):
        raise typer.Exit(1)
