"""Goes on changing inputs and outputs from a thread after it has answered.

The judge takes copies. What it finds in them is the problem's answer: an honest kernel is told wrong, or the problem is,
and nobody else.
"""

held = []


def scribble():
    while True:
        for tensor in list(held):
            tensor.data[:1] += 1.0


def forward(self, x):
    if not held:
        threading.Thread(target=scribble, daemon=True).start()
    held[:] = [x]
    return x * 2 + 1
