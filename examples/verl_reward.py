"""Score answers with the reward function of verl's trainers. Start a fleet with `kqueue up`, then run this."""

import sys
from pathlib import Path

from kqueue import KqueueError
from kqueue.integrations.verl import compute_score

HERE = Path(__file__).resolve().parent
REFERENCE = (HERE / "problems" / "row_sum.py").read_text()
ANSWERS = {
    "right": f"```python\n{(HERE / 'kernels' / 'good' / 'torch' / 'row_sum.py').read_text()}\n```",
    "wrong": (HERE / "kernels" / "bad" / "wrong_shape.py").read_text(),
    "no kernel": "I do not know.",
}
for name, answer in ANSWERS.items():
    try:
        reward = compute_score("kernels", answer, REFERENCE, {}, backend="torch", score="correctness")
    except KqueueError as error:  # never a reward: the kernel was not judged
        sys.exit(f"{error}")
    print(f"{name}: reward {reward}")
