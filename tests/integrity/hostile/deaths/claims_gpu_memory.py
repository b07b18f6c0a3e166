"""Says that the GPU's memory ran out, which a busy GPU would be blamed for: ``reference_error``.

The judge ends the process and looks whether its share of the memory is free.
"""


def forward(self, x):
    raise torch.OutOfMemoryError("CUDA out of memory")
