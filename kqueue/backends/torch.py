"""PyTorch's own operators."""

from typing import Final

from kqueue.backends import Backend

TORCH: Final = Backend(name="torch", description="PyTorch's own operators", cpu=True, own_kernels=False)
