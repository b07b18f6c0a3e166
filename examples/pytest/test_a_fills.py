"""A test that always passes, although it writes one element too far."""

from pool import buffer, write

OUT = buffer(4)


def test_fill():
    for index in range(5):  # 4 would be right
        write(OUT, index, 1.0)
    assert list(OUT) == [1.0] * 4
