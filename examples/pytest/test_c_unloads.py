"""Eight tests that pass, each of which writes one element further.

The damage shows when modules are unloaded. Plain pytest reports that all tests passed, and then its process aborts.
"""

import pytest
from pool import buffer, unload_at_exit, write

OUT = buffer(4)
SPARE = buffer(7)
TABLE = buffer(4)
TABLE[:] = [0.0, 1.0, 2.0, 3.0]
unload_at_exit(TABLE)


@pytest.mark.parametrize("step", range(8))
def test_step(step):
    write(OUT, len(OUT) + step, -1.0)
    assert list(OUT) == [0.0] * 4
