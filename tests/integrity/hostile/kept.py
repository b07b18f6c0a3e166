"""Problems that harm later evaluations."""

# fmt: off

# %% busy_thread
"""Computes in threads while it is kept and others are timed.
The fork server ends a reference that works while it has nothing to do. The next evaluation gets a new one and
passes."""
# Made once: torch's default dtype changes while the reference answers in float64.
ONES = torch.ones(200, 200)

def spin():
    while True:
        ONES @ ONES

for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()

# %% default_dtype
"""Leaves torch set otherwise than it was: default dtype, threads, gradients, seeds.
Its model is constructed anew under the same settings in each evaluation, and its answers are the same. It passes
twice."""
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.set_grad_enabled(False)
torch.manual_seed(0)

# %% dies
"""Dies while it is kept.
The next evaluation gets a new one and passes."""
def after(channel):
    os._exit(3)

def get_inputs():
    rest_and_then(after)
    return [torch.randn(16, 8)]

# %% does_not_rest
"""Never comes to rest when it is to be kept.
It is given a few seconds and ended; the verdict stands."""
def get_inputs():
    caller("self").orders[20] = lambda command: time.sleep(1000)
    return [torch.randn(16, 8)]

# %% handlers
"""Leaves handlers behind: for signals, for its end, for what nobody catches.
It is ended by SIGKILL, which none of them hears. It passes twice."""
atexit.register(lambda: open("/tmp/kqueue-outside/atexit", "w"))
sys.excepthook = sys.unraisablehook = lambda *a: None
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)

# %% hangs
"""Hangs in the constructor from its second evaluation on.
The next judge gives it a few seconds and replaces it, as a new one does not hang."""
class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1
        if Model.evaluations == 2:
            time.sleep(1000)

    def forward(self, x): return x * 2 + 1

# %% lies_later
"""Answers the check of a kept reference rightly and lies from then on, always the same.
Its first input is answered twice, so that it disagrees with itself: ``invalid_problem``. Evaluations of other problems
pass."""
class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * (3 if Model.evaluations > 1 and self.calls > 1 else 2) + 1

# %% patched_harness
"""Patches the harness that serves it, so that every later evaluation is told nonsense.
The harness is in its own process: what it tells is refused, and it is replaced."""
def get_inputs():
    own = caller("self")
    honest = own.orders[20]

    def rest(command):
        reply = honest(command)
        own.orders.clear()
        return reply

    own.orders[20] = rest
    return [torch.randn(16, 8)]

# %% patched_libraries
"""Patches torch, random, json and os in its first evaluation, to spoil whoever uses them later.
Nobody but itself does: each problem and each kernel has a process of its own. It is replaced as its inputs have
changed."""
def spoil():
    torch.randn = lambda *shape: torch.full(shape, Model.evaluations * 0.5)
    random.seed = json.loads = lambda *a, **k: None
    os.listdir = lambda *a: ["nothing"]

class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1
        spoil()

    def forward(self, x): return x * 2 + 1

def get_inputs(): return [torch.randn(16, 8) + 0.5 * torch.rand(16, 8)]

# %% random
"""Draws inputs that follow no seed.
Its answer to an input of the evaluation before cannot be the same: it is replaced each time. It passes."""
def get_inputs(): return [torch.frombuffer(bytearray(os.urandom(128)), dtype=torch.uint8).float().reshape(16, 8)]

# %% speaks_ahead
"""Answers the orders of the next judge before they are given.
What it says does not fit what is asked, or its answer has changed: it is replaced."""
def after(channel):
    from workers.judge.channel.protocol import Answer, Reply

    for sequence in range(1, 20):
        channel.send(Reply(Answer.DONE, sequence).pack())

def get_inputs():
    rest_and_then(after)
    return [torch.randn(16, 8)]

# %% state
"""Answers otherwise from its second evaluation on, by a number that it keeps on its class.
Its answer to an input of the evaluation before has changed: it is replaced, and the second evaluation passes too."""
class Model(torch.nn.Module):
    evaluations = 0

    def __init__(self):
        super().__init__()
        Model.evaluations += 1

    def forward(self, x): return x * (2 if Model.evaluations == 1 else 3) + 1

# %% stops
"""Stops itself while it is kept.
The next judge gives it a few seconds and replaces it."""
def after(channel):
    os.kill(os.getpid(), signal.SIGSTOP)

def get_inputs():
    rest_and_then(after)
    return [torch.randn(16, 8)]
