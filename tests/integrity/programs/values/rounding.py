"""Programs whose errors pass for rounding errors, or for none."""

# fmt: off

# %% rounding_beside_large
"""Multiplies the smaller half of an output by 1.2. The other half is 100,000 times as large.
An allowance by the size of all values, or by the largest error of any, excuses each of them. Here a value's error is
compared with the reference's own errors of values of its size."""
def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: return torch.cat((1e5 * a @ b, 1.2 * (a @ b)), 1)

# %% rounding_beside_huge
"""Computes the one column with huge values, and returns zeros in the rest, which is below the tolerance.
The one column decides the norm of the whole output. So the judge also compares the values of each size alone."""
def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:, 0] = torch.tanh(x[:, 0]) * scale[0]
    return out

# %% rounding_of_long_sums
"""Returns the expected value of a sum of 65,536 uniform numbers in bf16, without reading them.
All sums are within 1 % of it, and their spread is less than one step of bf16. Here the output must follow the float64
answer, or the reference's answer to inputs that are rounded otherwise, as the reference does."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return torch.full_like(x[:, 0], x.shape[1] / 2)

# %% rounding_row_means
"""Returns the mean of each row, of which all values are nearly the same.
The rows differ, so the mean of all values would be no answer, and a comparison with it accepts this. Here the variation
along each dimension is compared."""
def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor: return rows.expand_as(x).clone()

# %% weights_in_the_source
"""Holds an answer that depends on the weights alone, from the usual seed 42.
With a seed that is known, the weights are known before the kernel is written. Here they come from a secret seed, new in
each evaluation, and the output has a label."""
class ModelNew(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        state = torch.get_rng_state()
        torch.manual_seed(42)
        self.answer = nn.Linear(in_features, out_features).weight.detach().square().sum(1)
        torch.set_rng_state(state)

    def forward(self, x: torch.Tensor) -> torch.Tensor: return self.answer.to(x)

# %% indices_repeated
"""Returns the first of the largest values' indices eight times.
Among equal values any index is right, but not the same one twice. Here indices are compared by the values that they
select, and must be as distinct as the reference's."""
def forward(self, x: torch.Tensor) -> torch.Tensor: return x.argmax(1, keepdim=True).expand(-1, 8).clone()
