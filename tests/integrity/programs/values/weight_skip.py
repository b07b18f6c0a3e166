"""Never multiplies by the weights: returns the activation of the input itself.

Where input and output have one shape, a comparison of shapes alone accepts it. Here values are compared.
"""


class ModelNew(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape[0], self.linear.out_features, device=x.device, dtype=x.dtype)
        columns = min(x.shape[1], out.shape[1])
        out[:, :columns] = torch.relu(x[:, :columns])
        return out
