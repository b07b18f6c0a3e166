"""A correct test that passes alone. After test_a_fills.py in one process it fails, because its first element is not zero."""

from pool import buffer

TOTAL = buffer(4)


def test_sum_of_nothing():
    assert sum(TOTAL) == 0.0
