"""Writes on the sheet of ten thousand tensors that all lie in the same 60 MB: ``reference_error``.

No byte of the sheet belongs to two tensors, so that the judge never takes more memory than the sheet has.
"""


def get_init_inputs():
    write([{"is": "tensor", "dtype": "torch.uint8", "shape": [60_000_000], "at": 0}] * 10_000, bytes(60_000_000))
    return []
