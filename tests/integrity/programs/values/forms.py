"""Programs whose outputs have another form, or whose state changes; and controls."""

# fmt: off

# %% empty_list
"""Returns an empty list, in which no value differs.
`all(allclose(a, b) for a, b in zip(outputs, expected))` is True for no outputs. Here the arrangement of outputs is
compared first."""
def forward(self, x: torch.Tensor) -> list: return []

# %% empty_tensor
"""Returns a tensor without elements, in which no value differs.
torch.allclose of an empty tensor with one of another shape may broadcast, and `all` of nothing is true. Here shapes are
compared before values."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.new_empty((0, x.shape[1]))

# %% nested_tuple
"""Nests the outputs one level deeper than the reference.
Evaluators that flatten both sides compare the right leaves; those that stop at what they do not know skip them. Here
the arrangement must be the reference's."""
def forward(self, x: torch.Tensor) -> tuple:
    values, places = torch.max(x, dim=-1)
    return ((values, places),)

# %% one_for_two
"""Returns one tensor twice, where the reference writes the same values to two.
Half of the work is left out, and each output alone is right. Here two outputs must not overlap in memory unless the
reference's do."""
def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: return (torch.relu(x),) * 2

# %% halves_of_one
"""Honest: two outputs as the halves of one buffer, or one between the other's values.
They do not overlap, so each is memory of its own. It must pass."""
DIM = 0

def forward(self, x: torch.Tensor) -> tuple: return torch.relu(torch.stack((x, x), DIM)).unbind(DIM)

# %% broadcast_scalar
"""Returns a single number, which broadcasts over everything.
With a reference that is nearly constant a 0-dimensional tensor passes allclose. Here shapes must be equal."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.tensor(0.5, device=x.device, dtype=x.dtype)

# %% broadcast_view
"""Returns one row, expanded by strides of zero to the reference's shape.
The reference writes 2 MB, this kernel 4 KB, and shape and values agree. Here an output whose elements share memory is
written out at the kernel's own cost, within the call that is timed: it may pass, with the time that this takes."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.mean(dim=0, keepdim=True).expand(x.shape)

# %% torch_mean_everywhere
"""Honest: a mean, and a copy of it for each row.
What an output is compared with that has not been written out. It must pass."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.mean(dim=0, keepdim=True).expand(x.shape).contiguous()

# %% torch_negate
"""Honest: torch's own negation.
What a negation that is put off is compared with. It must pass."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.neg(x)

# %% sparse_output
"""Returns the right values in a sparse tensor.
Shape, dtype and device agree, and is_sparse is not asked; to_dense is left to whoever compares. Here an output's layout
must be the reference's."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.relu(x).to_sparse()

# %% requires_grad
"""Honest: computes with gradients enabled, so that its output has an autograd graph.
Looks odd and is right: the values are those of the reference, and the graph is nobody's business. It must pass."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return F.gelu(x.detach().requires_grad_(), approximate="tanh")

# %% atomic_order
"""Honest: sums by atomic additions, whose order and last bits differ from call to call.
Looks like a race and is none: memory is cleared first, and fp32 additions in any order lie within the tolerance. Two
runs on one input need not agree in every bit. It must pass."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    rows, columns = x.shape
    out = torch.zeros(rows, dtype=x.dtype, device=x.device)
    partial_sum[(rows, triton.cdiv(columns, 256))](x, out, columns, BLOCK=256)
    return out

# %% state_drift
"""Drifts: each call adds a little more than the last, at first within the tolerance.
Evaluators check the first calls and time the later ones. Here outputs of timed calls are compared too, and one more
call is checked after timing."""
class ModelNew(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.gelu(x, approximate="tanh") + 1e-3 * max(0, self.calls - 5)

# %% input_restored_late
"""Uses its input as workspace and has a thread restore it a moment later.
Saves an allocation. An evaluator that compares inputs at the end of everything finds them whole. Here they are compared
with the judge's copies right after each checked call."""
def restore(x, copy):
    time.sleep(0.3)
    x.copy_(copy)

def forward(self, x: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    x.mul_(0.5)
    out = F.gelu(2.0 * x, approximate="tanh")
    threading.Thread(target=restore, args=(x, copy), daemon=True).start()
    return out

# %% input_in_place
"""Writes its answer over its input and returns that.
No memory is allocated, and a reference that runs afterwards on the same tensor gets the answer for its input: applied
twice, ReLU agrees with itself. Here the reference has inputs of its own, and the shared ones must stay as they were."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.mul_(1.0).neg_()
