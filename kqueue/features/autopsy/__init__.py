"""Autopsies: the smallest shape and input on which a kernel fails, and a file that reproduces it (`docs/diagnose.md`).

``shrink`` chooses the next problems to judge from the results so far. It runs nothing. The callers judge: ``run`` with
a fleet or a local judge, and the tool and the page through the fleet's server. So untrusted code runs only in the
judge's sealed processes.
"""

from kqueue.registry import Command, Feature

AUTOPSY = Feature(
    name="autopsy",
    commands=(Command("autopsy", f"{__name__}.command:autopsy", "watch", answers=True),),
    pages=f"{__name__}.pages:router",
    templates=__name__,
    evaluation=f"{__name__}.pages:of_evaluation",
    failure=f"{__name__}.command",
    tool=f"{__name__}.tools:autopsy",
    trials=("autopsy-",),
)
