"""Fills the disk below a path that is longer than any path may be, where a look by name does not reach.

Its file system has a size; where it has none, what cannot be looked at counts as too much: ``reference_error``.
"""


def get_inputs():
    for _ in range(40):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    open("file", "wb").write(bytes(32 << 20))
    time.sleep(1000)
