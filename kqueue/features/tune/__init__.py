"""Tuning: the best values for names in a kernel (`docs/tune.md`)."""

from kqueue.registry import Command, Feature

TUNE = Feature(
    name="tune",
    commands=(Command("tune", f"{__name__}.command:tune", "watch"),),
    tool=f"{__name__}.tools:tune",
    trials=("tune-",),
    runs={"tune": f"{__name__}.command:TuneRecord"},
)
