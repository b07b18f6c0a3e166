"""A guide for Trace, and an agent that starts from the reference. Start a fleet with `kqueue up`, then run this.

With Trace's PrioritySearch (`opto`) installed:

    from opto.features.priority_search import PrioritySearch

    PrioritySearch(agent, optimizer).train(guide, {"inputs": [TASK], "infos": [REFERENCE]}, num_threads=8)
"""

import sys
from pathlib import Path

from kqueue import KqueueError
from kqueue.integrations.trace import KernelAgent, KernelGuide

HERE = Path(__file__).resolve().parent
REFERENCE = (HERE / "problems" / "row_sum.py").read_text()
TASK = "Write a kernel that sums rows."

agent = KernelAgent(initial_kernel_code=REFERENCE)
guide = KernelGuide(gpu="auto", backend="torch", num_correct_trials=2, num_perf_trials=20, score="speedup")

answer = agent(TASK)
for kernel in (getattr(answer, "data", answer), (HERE / "kernels" / "bad" / "wrong_shape.py").read_text()):
    try:
        score, feedback = guide.get_feedback(TASK, kernel, REFERENCE)
    except KqueueError as error:  # no fleet runs, for instance
        sys.exit(f"{error}")
    print(f"score {score:.3g}\n{feedback}\n")
guide.close()
