"""Tournaments: the best three of many kernels within a budget (`docs/compare.md`)."""

from kqueue.registry import Command, Feature

TOURNAMENT = Feature(
    name="tournament",
    commands=(Command("tournament", f"{__name__}.command:tournament", "watch"),),
    runs={"tournament": f"{__name__}.command:TournamentRecord"},
)
