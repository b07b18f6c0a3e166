"""Says that its output lies a terabyte beyond an allocation that it really has.

The judge would read memory of its own, or none: an illegal access would end the judge's CUDA context and be the
fleet's failure. Here what is said of a place is held against the allocation's size before anything is read.
"""


def forward(self, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    exports = Exports()
    true = exports.location(out)
    for number in orders():
        location = Location(Where.EXPORTED, run=true.run, offset=1 << 40, stride=(1 << 20, 1))
        for export in exports.pending():
            announce(export)
        send(Reply(Answer.DONE, number, structure="T", tensors=(TensorSpec.of(x),), locations=(location,)))
    return out
