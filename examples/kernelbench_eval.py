"""Judge a kernel with KernelBench's function on a fleet. Start one with `kqueue up`, then run this."""

import sys
from pathlib import Path

from kqueue import KqueueError
from kqueue.integrations.kernelbench import eval_kernel_against_ref

HERE = Path(__file__).resolve().parent
REFERENCE = (HERE / "problems" / "row_sum.py").read_text()
for name in ("good/torch/row_sum.py", "bad/wrong_shape.py"):
    try:
        result = eval_kernel_against_ref(
            original_model_src=REFERENCE,
            custom_model_src=(HERE / "kernels" / name).read_text(),
            num_correct_trials=2,
            measure_performance=True,
            backend="torch",
        )
    except KqueueError as error:
        sys.exit(f"{error}")
    print(f"{name}: correctness={result.correctness} runtime={result.runtime:.4g} ms {result.metadata['category']}")
