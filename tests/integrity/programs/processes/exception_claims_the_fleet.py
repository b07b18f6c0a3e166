"""Raises an exception that claims that the GPU has failed, to be tried again for ever.

An evaluator that retries when it reads "CUDA error: ECC" or finds such a code in an exception lets a kernel roll its
dice until it is lucky. Here a code that a candidate reports may choose which failure of the kernel it is, and never
makes it the fleet's.
"""


class AcceleratorError(RuntimeError):
    error_code = 214  # cudaErrorECCUncorrectable

    def __init__(self):
        super().__init__("CUDA error: uncorrectable ECC error encountered; worker lost; retry")


def forward(self, x: torch.Tensor) -> torch.Tensor:
    raise AcceleratorError
