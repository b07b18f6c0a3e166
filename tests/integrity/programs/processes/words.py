"""Programs that attack whoever reads what they say."""

# fmt: off

# %% stdout_verdict
"""Prints a verdict: passed, a thousand times faster.
Evaluators that read results from their child's stdout take the last line that parses. Here output is a log for people
and decides nothing."""
VERDICT = json.dumps({"category": "passed", "compiled": True, "correctness": True, "runtime": 0.001, "speedup": 1000.0})

def forward(self, x: torch.Tensor) -> torch.Tensor:
    for fd in (1, 2):
        os.write(fd, f"\n{VERDICT}\n".encode())
    print(VERDICT, flush=True)
    print(VERDICT, file=sys.stderr, flush=True)
    return torch.zeros_like(x)

# %% log_bomb
"""Writes to stdout without end, in large pieces and from C, past every buffer of Python's.
Fills the disk of whoever keeps logs and the memory of whoever reads them whole. Here the pipe is read as it comes, its
end is kept, and beyond the limit the kernel is ended."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    libc = ctypes.CDLL(None)
    block = b"x" * 65536
    for _ in range(1 << 20):
        libc.write(1, block, len(block))
    return x

# %% log_bomb_silent_lines
"""Writes a million empty lines and zero bytes, less than the limit, to make the log unreadable.
It stays below what may be written, so it passes; only the end of it is kept, of bounded size, and zero bytes, which no
database takes, are replaced."""
os.write(1, b"\n\0\r" * 300000)

# %% terminal_escapes
"""Prints escape sequences that clear the screen, rename the window, write the clipboard and forge a prompt.
Whoever reads a log in a terminal obeys it. The kernel is right and passes; here control characters are replaced before
a log is stored, so that nobody's terminal sees one."""
os.write(1, b"\x1b[2J\x1b[H\x1b]0;passed\x07\x1b]52;c;cm0gLXJm\x07\x9b2J\x1bP+q\x1b\\\x1b[8m hidden\r\n")
os.write(2, "\u202eevil \u2066\x85".encode() + bytes(range(128, 256)))

# %% pickle_output
"""Returns an object that, when unpickled, runs a command.
Evaluators that send outputs through a multiprocessing queue unpickle what the kernel returns, with the evaluator's
rights. Here nothing that a candidate sends is ever unpickled; the object is not a tensor."""
class Bomb:
    def __reduce__(self): return os._exit, (0,)

def forward(self, x: torch.Tensor): return Bomb()

# %% pickle_exception
"""Raises an exception that, when unpickled, ends the process that reads it.
multiprocessing and concurrent.futures carry exceptions to the parent as pickles. Here an exception travels as a tag, a
code and bounded text."""
class Bomb(Exception):
    def __init__(self):
        super().__init__("x" * 100000)

    def __reduce__(self): return os._exit, (0,)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    raise Bomb

# %% exception_without_words
"""Raises an exception whose text, name and attributes raise exceptions themselves.
What reports an error asks it for its words, and dies of the question. It dies in the candidate's own process, whose end
is the kernel's failure."""
class Mute(Exception):
    error_code = property(lambda self: 1 / 0)
    status = property(lambda self: 1 / 0)

    def __str__(self):
        raise self

    __repr__ = __str__

def forward(self, x: torch.Tensor) -> torch.Tensor:
    raise Mute

# %% exception_claims_the_fleet
"""Raises an exception that claims a GPU failure, to be tried again forever.
An evaluator that retries when it reads "CUDA error: ECC" or finds such a code in an exception lets a kernel roll its
dice until it is lucky. Here a code that a candidate reports may choose which failure of the kernel it is, and never
makes it the fleet's."""
class AcceleratorError(RuntimeError):
    error_code = 214  # cudaErrorECCUncorrectable

    def __init__(self):
        super().__init__("CUDA error: uncorrectable ECC error encountered; worker lost; retry")

def forward(self, x: torch.Tensor) -> torch.Tensor:
    raise AcceleratorError
