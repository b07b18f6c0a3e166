"""The judge of tests/judge, for the corpus."""

from tests.judge.conftest import rig, rig_database

__all__ = ["rig", "rig_database"]
