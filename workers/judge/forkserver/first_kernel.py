"""A Triton kernel that the fork server compiles first, to initialise the compiler. It never runs."""

# Triton interprets annotations as its types.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false

import triton
import triton.language as tl


@triton.jit
def normalise(x, y, columns, BLOCK: tl.constexpr):  # noqa: D103, N803 -- compiled as it is, and Triton's constants are in capitals
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * columns + i, values / tl.sum(values, 0), mask=i < columns)


#: Types of the kernel's arguments, and values of its constants.
SIGNATURE = {"x": "*fp32", "y": "*fp32", "columns": "i32", "BLOCK": "constexpr"}
CONSTANTS = {"BLOCK": 1024}
