"""Problems that lie to the judge."""

# fmt: off

# %% closed
"""Closes its channel and lives on: ``reference_error``."""
def get_inputs():
    caller("channel").close()
    time.sleep(1000)

# %% descriptors
"""Floods its channel with descriptors, as many as a packet carries, and says nothing that can be read.
The judge closes what nobody asked for: ``reference_error``."""
def get_inputs():
    channel = caller("channel")
    for _ in range(64):
        socket.send_fds(channel, b"\0" * 64, [0] * 250)
    return [torch.randn(16, 8)]

# %% endless_shape
"""Tells of inputs of 2 to the power of 120 numbers: ``reference_error``."""
def get_init_inputs():
    telling((1 << 60, 1 << 60), torch.float32)
    return []

# %% exports
"""Announces memory of a GPU where there is none, with descriptors that open something else: ``reference_error``."""
def get_inputs():
    from workers.judge.channel.protocol import Export

    channel = caller("channel")
    for run in range(1000):
        export = Export(run, 200, (1 << 50,) * 200, (0,) * 200)
        socket.send_fds(channel, export.pack(), export.descriptors)
    return [torch.randn(16, 8)]

# %% garbage
"""Writes garbage on its channel: ``reference_error``."""
def get_inputs():
    caller("channel").send(b"x" * 57)
    return [torch.randn(16, 8)]

# %% large_shape
"""Tells of inputs of 80 GB, which it never makes: ``reference_error``.
The judge makes room for no more than the host can hold several times."""
def get_init_inputs():
    telling((20_000_000_000,), torch.float32)
    return []

# %% late_writer
"""Goes on changing inputs and outputs from a thread after it has answered.
The judge takes copies. What it finds in them is the problem's answer: an honest kernel is told wrong, or the problem
is, and nobody else."""
held = []

def scribble():
    while True:
        for tensor in list(held):
            tensor.data[:1] += 1.0

def forward(self, x):
    if not held:
        threading.Thread(target=scribble, daemon=True).start()
    held[:] = [x]
    return x * 2 + 1

# %% lies_about_the_call
"""Says of each call that it drew random numbers and wrote more bytes than there are.
Both are claims: the one does without answers in float64, the other is bounded by the outputs. It passes."""
def get_inputs():
    own = caller("self")
    if "_hand_over" not in vars(own):
        honest = own._hand_over
        own._hand_over = lambda *a, **k: dataclasses.replace(honest(*a, **k), drew=True, written_bytes=2**64 - 1)
    return [torch.randn(16, 8)]

# %% negative_shape
"""Tells of inputs of a negative size: ``invalid_problem``."""
def get_init_inputs():
    telling((-8, 8), torch.float32)
    return []

# %% other_order
"""Answers an order that was never given: ``reference_error``."""
def get_inputs():
    from workers.judge.channel.protocol import Answer, Reply

    caller("channel").send(Reply(Answer.DONE, 1_000_000).pack())
    return [torch.randn(16, 8)]

# %% pickle
"""Writes a pickle on its channel that runs a command where it is loaded: ``reference_error``.
The judge unpickles nothing that a sealed process sends."""
def get_inputs():
    caller("channel").send(pickle.dumps(Bomb()))
    return [torch.randn(16, 8)]

# %% sheet_bytes
"""Writes on the sheet that there are a terabyte of bytes: ``reference_error``."""
get_init_inputs = lambda: write([{"is": "bytes", "of": 10**12}]) or []

# %% sheet_changes
"""Rewrites the sheet all the time from a thread.
The judge copies it before it reads it: the problem passes, or fails by what stands there."""
def get_inputs():
    own = caller("self")

    def scribble():
        while True:
            own._scalar_page[os.urandom(1)[0]] = 0x30

    threading.Thread(target=scribble, daemon=True).start()
    return [torch.randn(16, 8)]

# %% sheet_collisions
"""Writes a set on the sheet whose items all have one hash: ``reference_error``.
Such a set takes time by the square of its size; only small ones are read."""
get_init_inputs = lambda: write([{"is": "set", "of": [(2**61 - 1) * i for i in range(30_000)]}]) or []

# %% sheet_deep
"""Writes lists on the sheet that are nested a hundred thousand deep: ``reference_error``."""
get_init_inputs = lambda: write(b"[" * 100_000 + b"]" * 100_000) or []

# %% sheet_garbage
"""Writes no JSON on the sheet: ``reference_error``."""
get_init_inputs = lambda: write(b"\xff" * 1000) or []

# %% sheet_integer
"""Writes an integer of 100,000 digits on the sheet: ``reference_error``."""
get_init_inputs = lambda: write(b"[" + b"9" * 100_000 + b"]") or []

# %% sheet_no_arguments
"""Writes a number on the sheet where arguments are to be: ``reference_error``."""
get_inputs = lambda: write(5) or [torch.randn(16, 8)]

# %% sheet_objects
"""Writes values on the sheet that no argument may be: ``invalid_problem``."""
get_inputs = lambda: write({"is": "dict", "of": [
    ["arguments", [{"is": "leaf"}, {"is": "range", "of": [0, 10**9, 1]}]], ["views", [[0, 0, [], [], False]]],
]}) or [torch.randn(16, 8)]

# %% sheet_places
"""Writes arguments without a place for the tensor on the sheet: ``invalid_problem``."""
get_inputs = lambda: write({"is": "dict", "of": [["x", 5], ["y", {"is": "tuple", "of": []}]]}) or [torch.randn(16, 8)]

# %% sheet_places_beyond
"""Writes more places of tensors on the sheet than there are, which would fail in the candidate: ``invalid_problem``."""
get_inputs = lambda: write({"is": "dict", "of": [
    ["arguments", [{"is": "leaf"}] * 99], ["views", [[0, 0, [], [], False]]],
]}) or [torch.randn(16, 8)]

# %% sheet_tensors
"""Writes on the sheet of ten thousand tensors that all lie in the same 60 MB: ``reference_error``.
No byte of the sheet belongs to two tensors, so that the judge never takes more memory than the sheet has."""
def get_init_inputs():
    write([{"is": "tensor", "dtype": "torch.uint8", "shape": [60_000_000], "at": 0}] * 10_000, bytes(60_000_000))
    return []

# %% sheet_unhashable
"""Writes a dict on the sheet whose keys are lists: ``reference_error``."""
get_init_inputs = lambda: write([{"is": "dict", "of": [[[], 1]]}]) or []

# %% shrinks_memory
"""Cuts the memory that it shares with the judge, so that the judge would die when it touches it.
The sizes are sealed. It passes."""
def attack():
    for number in range(3, 256):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "memfd:" in target:
            for size in (0, 100):
                try:
                    os.ftruncate(number, size)
                except OSError:
                    continue
                raise RuntimeError(f"ATTACK SUCCEEDED: {target}")

def forward(self, x):
    attack()
    return x * 2 + 1

# %% twice
"""Answers each order twice, so that the judge takes an old answer for a new one.
The answer does not fit the order: the problem fails."""
def get_inputs():
    channel, command = caller("channel"), caller("command")
    from workers.judge.channel.protocol import Answer, Reply

    channel.send(Reply(Answer.DONE, command.sequence).pack())
    return [torch.randn(16, 8)]
