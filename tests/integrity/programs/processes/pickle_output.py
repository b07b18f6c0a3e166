"""Returns an object that, when unpickled, runs a command.

Evaluators that send outputs through a multiprocessing queue unpickle what the kernel returns, with the evaluator's
rights. Here nothing that a candidate sends is ever unpickled; the object is not a tensor.
"""


class Bomb:
    def __reduce__(self):
        return os._exit, (0,)


def forward(self, x: torch.Tensor):
    return Bomb()
