"""`kqueue check`: what a change of a repository does to its operators (`docs/check.md`)."""

from kqueue.registry import Command, Feature

CHECK = Feature(
    name="check",
    commands=(Command("check", f"{__name__}.command:check", "watch", answers=True),),
    trials=("check-",),
)
