"""Rewards for a batch of answers, and an episode of two turns. Start a fleet with `kqueue up`, then run this."""

import asyncio
import sys
from pathlib import Path

from kqueue import KqueueError
from kqueue.integrations.rl import KernelEnv, reward

HERE = Path(__file__).resolve().parent
REFERENCE = (HERE / "problems" / "row_sum.py").read_text()
RIGHT = f"Like this:\n```python\n{(HERE / 'kernels' / 'good' / 'torch' / 'row_sum.py').read_text()}\n```"
WRONG = (HERE / "kernels" / "bad" / "wrong_shape.py").read_text()
HOW = {"backend": "torch", "num_correct_trials": 2, "num_perf_trials": 20}

try:
    rewards = asyncio.run(reward(REFERENCE, [RIGHT, WRONG, "I do not know."], score="correctness", **HOW))
except KqueueError as error:  # no fleet runs, for instance
    sys.exit(f"{error}")
print("rewards:", rewards)  # mask None: the kernel was not judged

env = KernelEnv([REFERENCE], max_turns=2, score="correctness", **HOW)
observation, info = env.reset(seed=0)
for answer in (WRONG, RIGHT):
    observation, score, terminated, truncated, info = env.step(answer)
    print(f"turn {info['turn']}: reward {score}, over {terminated or truncated}\n{observation}\n")
env.close()
