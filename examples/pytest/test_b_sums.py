"""Right, and passes alone. In one process with test_a_fills.py it fails: its first element is no longer zero."""

from pool import buffer

TOTAL = buffer(4)


def test_sum_of_nothing():
    assert sum(TOTAL) == 0.0
