"""Problems with impossible inputs and answers."""

# fmt: off

# %% answers_change
"""Adds the number of the call to its answer: ``invalid_problem``.
Before a kernel is called wrong the reference answers the same input again."""
def forward(self, x): return x * 2 + called()

# %% count_changes
"""Draws one tensor more each time: ``invalid_problem``."""
def get_inputs(): return [torch.randn(4, 8)] * called()

# %% dtypes_change
"""Draws inputs of another dtype the second time: ``invalid_problem``."""
def get_inputs(): return [torch.ones(4, 8, dtype=torch.int64 if called() > 1 else torch.float32)]

# %% elsewhere
"""Answers with tensors that have no data: ``invalid_problem``."""
def forward(self, x): return x.to("meta")

# %% huge_structure
"""Answers with a million tensors in nested lists: ``invalid_problem``."""
def forward(self, x): return [[x[:1, :1]] * 1000] * 1000

# %% large
"""Answers with a tensor that is far larger than the host, though it takes no memory: ``reference_error``.
The judge refuses to make room for it."""
def forward(self, x): return x[:1, :1].expand(1 << 20, 1 << 20)

# %% large_tensors
"""Returns tensors of 100 MB for the constructor: ``invalid_problem``."""
def get_init_inputs(): return [torch.ones(25_000_000)]

# %% long_integer
"""Returns an integer of a million digits for the constructor: ``reference_error``."""
def get_init_inputs(): return [10**1_000_000]

# %% long_string
"""Returns a string of 100 MB for the constructor: ``invalid_problem``."""
def get_init_inputs(): return ["x" * 100_000_000]

# %% million_scalars
"""Returns a million numbers for the constructor: ``invalid_problem``."""
def get_init_inputs(): return list(range(1_000_000))

# %% nan
"""Answers with NaN, which nothing agrees with: ``invalid_problem``."""
def forward(self, x): return x * float("nan")

# %% no_list
"""Returns a class in the place of the constructor's list: ``invalid_problem``."""
def get_init_inputs(): return dict

# %% nothing
"""Answers with no tensor at all: ``invalid_problem``."""
def forward(self, x): return {"answer": 42}

# %% odd_dtype
"""Answers with a dtype that the protocol does not know: ``invalid_problem``."""
def forward(self, x): return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)

# %% recursion
"""Returns a list that holds itself for the constructor: ``invalid_problem``."""
def get_init_inputs():
    knot = []
    knot.append(knot)
    return knot

# %% recursive_structure
"""Answers with a list that holds itself: ``invalid_problem``."""
def forward(self, x):
    knot = [x]
    knot.append(knot)
    return knot

# %% reducer
"""Puts objects into the constructor's arguments that run a command where they are unpickled: ``invalid_problem``.
Values travel in a form of their own, which calls nothing that the writer names."""
def get_init_inputs(): return [Bomb(), {"nested": [Bomb()]}]

# %% scalars_change
"""Draws another number beside the same tensors each time: ``invalid_problem``."""
def get_inputs(): return [torch.randn(4, 8), called()]

# %% shapes_change
"""Draws inputs of another shape each time: ``invalid_problem``."""
def get_inputs(): return [torch.randn(called(), 8)]

# %% strange_layouts
"""Draws inputs that overlap themselves and each other, are expanded, transposed, conjugate or empty.
Each arrives as the values that it stands for. It passes."""
def get_inputs():
    x = torch.randn(8)
    whole = torch.randn(32)
    overlapping = whole.as_strided((16, 16), (1, 1))
    return [x.expand(16, 8), x, overlapping, overlapping.T, torch.empty(0, 8), x[::2], True, None, "words", 2.5]

# %% structure_changes
"""Answers with a tensor first and with a list later: ``invalid_problem``."""
def forward(self, x):
    self.own = getattr(self, "own", 0) + 1
    return x * 2 + 1 if self.own == 1 else [x * 2 + 1]

# %% subclass
"""Draws a subclass of Tensor, whose methods are its own: ``invalid_problem``."""
class Mine(torch.Tensor):
    pass

def get_inputs(): return [torch.randn(4, 8).as_subclass(Mine)]
