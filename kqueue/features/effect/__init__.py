"""Effects: how much faster a kernel makes a model, and by how much it changes the logits (`docs/compare.md`)."""

from kqueue.registry import Command, Feature

EFFECT = Feature(
    name="effect",
    commands=(Command("effect", f"{__name__}.command:effect", "watch", answers=True),),
    trials=("effect-",),
)
