"""Options that `kqueue submit` and `kqueue judge` share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from kqueue.cli import sources

Backend = Annotated[
    str | None, typer.Option("--backend", "-b", help="cuda, triton, torch, cpp or cupy.", show_default=False)
]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, fp16 or bf16.")]
Checks = Annotated[int | None, typer.Option("--checks", help="Number of input sets to compare.")]
NoTiming = Annotated[bool, typer.Option("--no-timing", help="Do not time the kernels.")]
Calls = Annotated[int | None, typer.Option("--calls", help="Maximum number of timed calls.")]
SettingsTree = Annotated[str | None, typer.Option("--settings", metavar="FILE|JSON", help="Settings as a JSON object.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="One setting, such as deadlines.check_s=5. Repeatable."),
]


def settings_of(
    settings: str | None,
    assignments: Iterable[str],
    *,
    precision: str | None,
    checks: int | None,
    calls: int | None,
    no_timing: bool,
) -> dict[str, Any]:
    """Return the settings from ``--settings``, overridden by ``--set``, overridden by the short options.

    Raises:
        InvalidRequest: the settings are not JSON, or an assignment has no name.
    """
    tree = sources.read_settings(settings, assignments)
    for short in (
        {} if precision is None else {"precision": precision},
        {} if checks is None else {"checks": checks},
        {} if calls is None else {"timing": {"calls": calls}},
        {"timing": {"enabled": False}} if no_timing else {},
    ):
        tree = sources.merged(tree, short)
    return tree
