"""Sleeps when it is timed as the baseline, and only then: ``reference_timeout``.

The phase of timing has a deadline of its own.
"""


def forward(self, x):
    if sys._getframe(4).f_code.co_name == "_time" or sys._getframe(5).f_code.co_name == "_time":
        time.sleep(1000)
    return x * 2 + 1
