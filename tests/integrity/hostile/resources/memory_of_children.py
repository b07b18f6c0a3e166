"""Has children take the memory, each less than it may.

The limit holds for the whole tree: ``reference_error``.
"""


def get_inputs():
    for _ in range(16):
        if os.fork() == 0:
            held = bytearray(b"x") * (128 << 20)
            signal.pause()
            held.clear()
    signal.pause()
