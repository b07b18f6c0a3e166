"""Evaluate a batch with the evaluator that has Modal's interface. Start a fleet with `kqueue up`, then run this.

`--gpu` is a model such as H200, or any, auto, cpu.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from kqueue import KqueueError
from kqueue.integrations.modal_like import (
    ModalEvaluatorConfig,
    ModalKernelEvaluator,
    get_modal_evaluator,
    set_modal_evaluator,
)

HERE = Path(__file__).resolve().parent
REFERENCE = (HERE / "problems" / "row_sum.py").read_text()
KERNELS = {
    "good": (HERE / "kernels" / "good" / "torch" / "row_sum.py").read_text(),
    "wrong shape": (HERE / "kernels" / "bad" / "wrong_shape.py").read_text(),
    "not a kernel": "print('hello')",
    "empty": "",
}
HOW = {"backend": "torch", "num_correct_trials": 2, "measure_performance": True, "num_perf_trials": 20}


async def main(gpu: str) -> None:
    set_modal_evaluator(ModalKernelEvaluator(ModalEvaluatorConfig(gpu_type=gpu, timeout=60)))
    evaluator = get_modal_evaluator()
    evaluations = [{"ref_code": REFERENCE, "kernel_code": kernel, **HOW} for kernel in KERNELS.values()]
    for name, result in zip(KERNELS, await evaluator.evaluate_batch(evaluations)):
        error = result["error_message"] or ""
        if "exception_type" in result["metadata"]:
            print(f"{name}: no result: {error}")
        else:
            print(f"{name}: correct={result['correctness']} runtime_ms={result['runtime_ms']} {error}")
    await evaluator.close()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--gpu", default="auto")
try:
    asyncio.run(main(parser.parse_args().gpu))
except KqueueError as error:  # no fleet runs, for instance
    sys.exit(f"{error}")
