"""Programs that rely on how usual inputs look."""

# fmt: off

# %% saturation_left_out
"""Leaves out a saturation that the problem's own inputs never reach, and computes by a product of matrices.
The reference computes one step after another and takes long. A judge that varies only the inputs of quick references
sees nothing. Here inputs in blocks near the ends of their range saturate it, whatever its speed."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    decay = 0.5 ** torch.arange(32, device=x.device, dtype=x.dtype)
    padded = F.pad(x.t().unsqueeze(1), (31, 0))
    return F.conv1d(padded, decay.flip(0).view(1, 1, -1)).squeeze(1).t().contiguous()

# %% memory_window
"""Keeps only the last 64 steps of a recurrence, because random gates forget whatever came before.
The product of 64 uniform gates is about 1e-28. Here gates are also brought close to one, and the memory lasts."""
def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    kept, state = torch.ones_like(x), torch.zeros_like(x)
    for back in range(64):
        state[back:] += (kept * (1 - gates) * x)[: len(x) - back]
        kept = torch.cat([kept[:-back - 1] * gates[back + 1 :], torch.zeros_like(kept[-back - 1 :])])
    return state

# %% top_of_parts
"""Takes the largest three values of each part of a row, and the largest four of these.
Four of the largest four are hardly ever in one of 128 parts. Here the largest values are also moved next to each
other."""
def forward(self, x: torch.Tensor) -> torch.Tensor:
    few = torch.topk(x.view(x.shape[0], 128, 32), 3, dim=-1).values.flatten(1)
    return torch.topk(few, 4, dim=-1).values

# %% expert_capacity
"""Gives each expert room for twice its usual number of tokens, and drops the rest.
Random routing never fills an expert. Here nearly all tokens are also sent to one of them."""
class ModelNew(nn.Module):
    def __init__(self, experts: int):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(experts, 32, 32))

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        out, room = torch.zeros_like(x), 2 * len(x) // len(self.weights)
        for number, weight in enumerate(self.weights):
            tokens = (expert == number).nonzero()[:room, 0]
            out[tokens] = x[tokens] @ weight
        return out

# %% longest_segment
"""Sums at most 2048 values of each segment, far more than any random segment has.
Offsets that are drawn evenly leave no longer gap. Here nearly all of them are also brought close to one end."""
def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    at = offsets[:-1, None] + torch.arange(2048, device=x.device)
    return torch.where(at < offsets[1:, None], x[at.clamp(max=len(x) - 1)], 0.0).sum(-1)
