"""KernelBench's runs, and sets of problems in other projects' formats (`docs/kernelbench.md`)."""

from kqueue.registry import Command, Feature

KERNELBENCH = Feature(
    name="kernelbench",
    commands=(
        Command("kernelbench", f"{__name__}.command:kernelbench", "watch", answers=True),
        Command("problems", f"{__name__}.command:problems", "doctor"),
    ),
)
