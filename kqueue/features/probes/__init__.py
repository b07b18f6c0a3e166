"""Probes: evaluations with a known outcome, by which a fleet tests its own judge (`docs/gpu-health.md`)."""

from kqueue.registry import Command, Feature

PROBES = Feature(
    name="probes",
    commands=(Command("probe", f"{__name__}.command:group", "gpu"),),
    templates=__name__,
    duty=f"{__name__}.fleet",
    record=f"{__name__}.fleet:Record",
)
