"""The judge of tests/judge, for the corpus."""

from tests.judge.conftest import rig

__all__ = ["rig"]
