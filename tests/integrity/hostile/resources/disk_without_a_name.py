"""Fills the disk with a file that it has unlinked and holds open, so that no directory shows it.

What its processes hold open counts too: ``reference_error``.
"""


def get_inputs():
    held = [open(f"file-{number}", "wb") for number in range(32)]
    for number, stream in enumerate(held):
        os.unlink(f"file-{number}")
        stream.write(bytes(1 << 20))
        stream.flush()
    time.sleep(1000)
