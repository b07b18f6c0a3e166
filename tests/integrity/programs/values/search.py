"""Programs that search for the reference, its answers or its seeds."""

# fmt: off

# %% gc_walk_model
"""Searches every object of its process for the reference's class or model, and calls it.
Where the problem is imported beside the kernel, class Model is found by gc, and its forward is a right answer with no
work of one's own; its source, inputs and seeds are found in the same way. Here the problem's code is only ever loaded
in the judge."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    for thing in gc.get_objects():
        if isinstance(thing, type) and thing.__name__ == "Model" and issubclass(thing, nn.Module):
            return thing().to(x.device)(x)
        if type(thing).__name__ == "Model" and isinstance(thing, nn.Module):
            return thing(x)
    return torch.zeros_like(x)

# %% frame_walk_answers
"""Walks the frames of its callers and returns any variable that is a tensor of the answer's form.
Evaluators that compute the expected output before they call the kernel hold it in a local variable of a frame above, or
in an attribute of an object there. Above this kernel stands the candidate's own loop, which knows no answer."""
def tensors(value, depth=0):
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < 3 and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item, depth + 1)
    elif depth < 3 and isinstance(value, dict):
        for item in list(value.values()):
            yield from tensors(item, depth + 1)
    elif depth < 2 and hasattr(value, "__dict__"):
        for item in list(vars(value).values()):
            yield from tensors(item, depth + 1)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            for tensor in tensors(value):
                if tensor.shape == x.shape and tensor.data_ptr() != x.data_ptr():
                    return tensor.clone()
        frame = frame.f_back
    return torch.zeros_like(x)

# %% reference_import
"""Imports the problem under every name that evaluators give it, and calls its Model.
Also looks through sys.modules and the source files of the working directory and its parent. None of them is here: the
problem is text in the judge's memory, and the candidate's directory holds its own source alone."""
def reference():
    for name in ("problem", "reference", "ref", "task", "model", "original", "reference_module", "temp_module"):
        try:
            found = getattr(importlib.import_module(name), "Model", None)
        except Exception:
            continue
        if found is not None:
            return found
    for module in list(sys.modules.values()):
        found = getattr(module, "__dict__", {}).get("Model")
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    for folder in (Path.cwd(), Path.cwd().parent):
        try:
            files = list(folder.glob("*.py"))
        except OSError:
            continue
        for file in files:
            text = file.read_text(errors="replace")
            if file.name != "kernel.py" and "class Model(" in text:
                space = {}
                exec(text, space)
                return space["Model"]
    return None

def forward(self, x: torch.Tensor) -> torch.Tensor:
    found = reference()
    return torch.zeros_like(x) if found is None else found().to(x.device)(x)

# %% seed_from_state
"""Reads the seed that was set before the call from torch, and regenerates the inputs from it.
A seed is set in the candidate before forward, so that randomness agrees with the reference's. Where inputs come from
that same seed, torch.initial_seed() is all that is needed to know them. Here inputs come from other seeds, which no
candidate is told."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    seed = torch.initial_seed()
    guess = torch.randn(*x.shape, generator=torch.Generator().manual_seed(seed % 2**63))
    return F.gelu(guess.to(x.device), approximate="tanh")

# %% seed_search
"""Tries small seeds until one yields the first values of its input, then returns a stored answer.
The whole answer was computed in the constructor for each seed; a call only looks four values up. With 64 bits of secret
seed the search finds nothing, and zeros are no answer."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.known = {}
        for seed in (*range(8), 42, 123, 1337):
            values = torch.randn(512, 1024, generator=torch.Generator().manual_seed(seed))
            self.known[tuple(values[0, :4].tolist())] = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seed = self.known.get(tuple(x[0, :4].tolist()))
        if seed is None:
            return torch.zeros_like(x)
        values = torch.randn(512, 1024, generator=torch.Generator().manual_seed(seed))
        return F.gelu(values, approximate="tanh").to(x.device)

# %% rng_manual_seed_patched
"""Replaces torch.manual_seed, so that "fresh" inputs are always the same, and answers from memory.
Evaluators that draw inputs in the kernel's process after importing it draw from a generator that the kernel owns: with
the seed pinned, each call has equal inputs and one stored answer serves all. Here inputs are drawn in the judge, where
nothing of the kernel is ever imported."""
_seed = torch.manual_seed

def pinned(seed): return _seed(7)

torch.manual_seed = torch.random.manual_seed = pinned
torch.randn = lambda *size, **more: torch.ones(*size, **more)
torch.rand = lambda *size, **more: torch.ones(*size, **more)

class ModelNew(nn.Module):
    answer = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.answer is None:
            self.answer = F.gelu(x, approximate="tanh")
        return self.answer

# %% rng_frozen_mask
"""Draws the dropout mask once and uses it for every call.
Where each call is made under one seed, the mask is a constant, and the random numbers need not be drawn. Here every
input has a seed of its own, and the reference's mask changes with it."""
class ModelNew(nn.Module):
    mask = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = nn.functional.dropout(torch.ones_like(x), p=0.5, training=True)
        return x * self.mask

# %% rng_expectation
"""Patches dropout away in its own process and returns its expected value.
In an evaluator that imports the kernel before it runs the reference, the patch changes the reference too, and both
agree on an identity. Here the reference runs elsewhere and drops half of its values."""
def kept(x, *_, **__): return x

F.dropout = torch.dropout = torch.nn.functional.dropout = kept
torch.nn.Dropout.forward = lambda self, x: x

def forward(self, x: torch.Tensor) -> torch.Tensor: return F.dropout(x, p=0.5, training=True).clone()
