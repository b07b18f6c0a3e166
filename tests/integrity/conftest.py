"""The judge of tests/judge, for the corpus."""

from tests.judge.conftest import judge_environment, rig

__all__ = ["judge_environment", "rig"]
