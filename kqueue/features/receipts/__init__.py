"""Receipts as files: signed records of evaluations, their checks, and a new judgement (`docs/export.md`)."""

from kqueue.registry import Command, Feature

RECEIPTS = Feature(
    name="receipts",
    commands=(
        Command("receipt", f"{__name__}.command:receipt", "diff"),
        Command("verify", f"{__name__}.command:verify", "diff", answers=True),
        Command("replay", f"{__name__}.command:replay", "diff", answers=True),
    ),
)
