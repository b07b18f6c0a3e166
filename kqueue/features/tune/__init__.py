"""Tuning: the best values for names in a kernel (`docs/search.md`)."""

from kqueue.registry import Command, Feature

TUNE = Feature(
    name="tune",
    commands=(Command("tune", f"{__name__}.command:tune", "watch"),),
    tool=f"{__name__}.tools:tune",
    trials=("tune-",),
    runs={"tune": f"{__name__}.command:TuneRecord"},
)
