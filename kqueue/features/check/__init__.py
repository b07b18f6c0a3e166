"""`kqueue check`: what a change of a repository does to its operators (`docs/check.md`)."""

from kqueue.registry import Command, Feature

CHECK = Feature(
    name="check",
    commands=(Command("check", f"{__name__}.command:check", "watch", answers=True),),
    pages=f"{__name__}.pages:router",
    templates=__name__,
    navigation=(("/checks", "Checks"),),
    trials=("check-",),
)
