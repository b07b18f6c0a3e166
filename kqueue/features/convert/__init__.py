"""Verdicts as other projects' results, and their results as fields of verdicts (`docs/export.md`)."""

from kqueue.registry import Command, Feature

CONVERT = Feature(name="convert", commands=(Command("convert", f"{__name__}.command:convert", "cost"),))
