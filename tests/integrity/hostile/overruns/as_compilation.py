"""Says that a compiler is at work and sleeps, to be given the compilers' time as well: ``reference_timeout``.

That time is limited too, and it has it once.
"""


def get_inputs():
    caller("page")[48] = 1
    time.sleep(1000)
