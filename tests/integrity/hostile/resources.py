"""Problems that take more than their share."""

# fmt: off

# %% daemon
"""Leaves a daemon: forked twice, in a session of its own, deaf to signals, its descriptors closed.
It lives as long as the reference does and is killed with it, by uid and as the fork server's orphan. The problem
passes."""
def attack():
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(1, 32):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 4096)
        while True:
            time.sleep(1000)
    os.wait()

# %% descriptors
"""Opens all the files that it may.
Its limit is its own. What the judge sends finds no place and the call fails: ``reference_error``."""
held = []

def get_inputs():
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return [torch.randn(16, 8)]

# %% disk
"""Fills the disk with many files.
The fork server looks at its directory and ends it beyond the limit: ``reference_error``."""
def get_inputs():
    number = 0
    while True:
        number += 1
        open(f"file-{number}", "wb").write(bytes(1 << 20))

# %% disk_in_the_deep
"""Fills the disk below a path that is longer than any path may be, where a look by name does not reach.
Its file system has a size; where it has none, what cannot be looked at counts as too much: ``reference_error``."""
def get_inputs():
    for _ in range(40):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    open("file", "wb").write(bytes(32 << 20))
    time.sleep(1000)

# %% disk_one_file
"""Writes one file without end.
The kernel refuses what is beyond the largest size of a file: ``reference_error``."""
def get_inputs():
    with open("file", "wb") as stream:
        while True:
            stream.write(bytes(1 << 20))

# %% disk_without_a_name
"""Fills the disk with a file that it has unlinked and holds open, so that no directory shows it.
What its processes hold open counts too: ``reference_error``."""
def get_inputs():
    held = [open(f"file-{number}", "wb") for number in range(32)]
    for number, stream in enumerate(held):
        os.unlink(f"file-{number}")
        stream.write(bytes(1 << 20))
        stream.flush()
    time.sleep(1000)

# %% fork_bomb
"""Forks until it may no more, and leaves the children waiting.
Their number is limited, and each counts with its memory: it goes on and passes, or is ended. With the reference all of
its uid is killed."""
def attack():
    try:
        for _ in range(100_000):
            if os.fork() == 0:
                signal.pause()
    except OSError:
        return
    raise RuntimeError("ATTACK SUCCEEDED: as many processes as it wanted")

# %% memory_of_children
"""Has children take the memory, each less than it may.
The limit holds for the whole tree: ``reference_error``."""
def get_inputs():
    for _ in range(16):
        if os.fork() == 0:
            held = bytearray(b"x") * (128 << 20)
            signal.pause()
            held.clear()
    signal.pause()

# %% memory_without_a_name
"""Takes memory that no process has mapped: anonymous files.
The control group counts them: ``reference_error``."""
def get_inputs():
    held = []
    while True:
        held.append(os.memfd_create("held"))
        os.write(held[-1], bytes(16 << 20))

# %% output
"""Prints without end.
Beyond the limit it is ended, and the last of it is kept: ``reference_error``."""
def get_inputs():
    while True:
        print("x" * 65536)
