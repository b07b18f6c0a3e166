"""Duels: which of two kernels is faster, by how much, and with what certainty (`docs/compare.md`)."""

from kqueue.registry import Command, Feature

DUEL = Feature(
    name="duel",
    commands=(Command("duel", f"{__name__}.command:duel", "watch", answers=True),),
    router=f"{__name__}.routes:router",
    templates=__name__,
    batch=f"{__name__}.routes:of_batch",
    tool=f"{__name__}.tools:duel",
    advice="To know which of two is faster call `duel`. ",
    client=f"{__name__}.client:Duels",
    names={"Duel": f"{__name__}.duels", "duel": f"{__name__}.client"},
    trials=("duel-",),
)
