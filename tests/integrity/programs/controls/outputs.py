"""Honest kernels whose outputs or inputs look odd."""

# fmt: off

# %% copies_the_input
"""Honest: a copy of the input where the reference returns the input itself.
More work than the reference does, and as right."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.clone()

# %% dense_output
"""Honest: a dense output where the reference returns a strided one that is expensive to copy.
Half of the work is left out, since only every second column is asked for. What is compared with it in time is the same
kernel beside nulls that it slows."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.tanh(x[:, ::2]).t().contiguous()

# %% fewer_roundings
"""Honest: all layers in fp32, where the reference rounds each one to 16 bits.
It is nearer the exact answer than the reference, and beyond the tolerance from the reference."""
def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y, w = x.float(), w.float()
    for _ in range(6):
        y = torch.tanh(y @ w)
    return y.to(x.dtype)

# %% integer_inputs
"""Honest: integer inputs, and a table of weights.
Gathers rows and averages them."""
class ModelNew(nn.Module):
    def __init__(self, rows: int, features: int):
        super().__init__()
        self.table = nn.Embedding(rows, features)

    def forward(self, ids: torch.Tensor) -> torch.Tensor: return F.embedding_bag(ids, self.table.weight, mode="mean")

# %% non_contiguous_output
"""Honest: an output whose strides are not the reference's.
Shape and values are right; the memory is in the order that suited the kernel."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return F.gelu(x.t().contiguous(), approximate="tanh").t()

# %% outer_product
"""Multiplies as the reference does, into an output of 10 MB.
What the judge does with so large an output of each call must not differ from one call to the next. The times of
programs that look for such a difference are compared with this one's."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return a[:, None] * b[None, :]

# %% given_layouts
"""Honest: relies on the strides of its problem's inputs.
Every process must get them as the problem made them."""
def forward(self, image: torch.Tensor, q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert q.stride() == k.stride() == (96, 1)
    assert k.data_ptr() - q.data_ptr() == 32 * q.itemsize
    assert scale.stride() == (1, 0)
    return torch.relu(image).sum(dim=1) + (q * k * scale).sum()

# %% effect_in_place
"""Honest: scales its input in place, like the reference.
Only where the reference does so is a changed input right."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    torch.add(x, x, out=x)
    return x.sum(dim=1)

# %% own_table
"""Honest: an answer, and a table and a weight of the model, like the reference.
They must not be overwritten before the next call, although they were delivered."""
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(512))
        self.table = torch.linspace(0, 1, 512)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.table = self.table.to(x.device)
        return x * self.table * self.weight, self.table, self.weight.detach()

# %% returns_the_input
"""Honest: the input itself, like the reference.
Only where the reference does so is this an answer."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x

# %% single_element
"""Honest: the least possible work.
A few microseconds at most: what is nearly the null must neither be refused nor called a cheat."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x * x

# %% static_output
"""Honest: one output tensor, allocated once and returned at every call.
It holds the right values whenever it is returned."""
class ModelNew(nn.Module):
    out = None

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.out is None:
            self.out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        return torch.mm(a, b, out=self.out)

# %% padding
"""Honest: writes the answer and the zeros around it in every call.
A fifth of what it writes is constant."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.shape[0], x.shape[1] + 256)
    out[:, : x.shape[1]] = x
    out[:, x.shape[1] :] = 0
    return out

# %% sums_in_turn
"""Honest: a product whose terms are added one after another.
Sums in blocks have smaller errors. Its own errors show where terms cancel."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[1], device=a.device)
    for k in range(a.shape[1]):
        out += a[:, k, None] * b[k]
    return torch.cat((1e5 * out, out), 1)

# %% ties_in_another_order
"""Honest: the positions of the largest values, the last of equal ones first.
No order among equal values is promised."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    return x.shape[1] - 1 - x.flip(1).sort(dim=1, descending=True, stable=True)[1][:, :8]

# %% two_outputs
"""Honest: two outputs, one of them of integers.
Values and places of the largest elements."""
def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: return x.max(dim=1)[0], x.argmax(dim=1)

# %% view_of_own_memory
"""Honest: a view into the kernel's own larger buffer.
The output begins in the middle of an allocation, with room between its rows."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    buffer = torch.zeros(rows + 2, columns + 32, dtype=x.dtype, device=x.device)
    view = buffer[1:-1, 16:-16]
    view.copy_(F.gelu(x, approximate="tanh"))
    return view

# %% view_of_the_input
"""Honest: a view of the input, like the reference.
No work at all, rightly: the time may be zero."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.transpose(0, 1)
