"""Duels: which of two kernels is faster, by how much, and with what certainty (`docs/duel.md`)."""

from kqueue.registry import Command, Feature

DUEL = Feature(
    name="duel",
    commands=(Command(name="duel", function="kqueue.features.duel.command:duel", after="watch", answers=True),),
    routers=("kqueue.features.duel.routes:router",),
    templates="kqueue.features.duel",
    batch="kqueue.features.duel.page:of_batch",
    tools="kqueue.features.duel.tools:TOOLS",
    advice="To know which of two is faster call `duel`.",
    client="kqueue.features.duel.client:Duels",
    async_client="kqueue.features.duel.client:AsyncDuels",
    names={"Duel": "kqueue.features.duel.duels", "duel": "kqueue.features.duel.client"},
    trials=("duel-",),
)
