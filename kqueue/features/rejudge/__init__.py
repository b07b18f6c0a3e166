"""Published claims, judged again (`docs/kernelbench.md`)."""

from kqueue.registry import Command, Feature

REJUDGE = Feature(name="rejudge", commands=(Command("rejudge", f"{__name__}.command:rejudge", "watch"),))
