"""Exports: finished evaluations as a dataset of Parquet files (`docs/export.md`)."""

from kqueue.registry import Command, Feature

EXPORT = Feature(name="export", commands=(Command("export", f"{__name__}.command:export", "cost"),))
