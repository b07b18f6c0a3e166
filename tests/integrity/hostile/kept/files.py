"""Answers otherwise from its second evaluation on, by a file that it left in its directory.

Its answer to an input of the evaluation before has changed: it is replaced, and its directory goes with it.
"""


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 3 if os.path.exists("been-here") else 2
        open("been-here", "w").close()

    def forward(self, x):
        return x * self.factor + 1
