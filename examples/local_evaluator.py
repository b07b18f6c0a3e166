"""Judge a kernel. If no fleet runs, one starts on this machine, and ends with this script."""

from pathlib import Path

from kqueue.integrations.local import LocalKernelEvaluator

HERE = Path(__file__).resolve().parent
REFERENCE = (HERE / "problems" / "row_sum.py").read_text()
KERNEL = (HERE / "kernels" / "good" / "torch" / "row_sum.py").read_text()

if __name__ == "__main__":
    with LocalKernelEvaluator(gpu="auto", idle_timeout=600, backend="torch", num_correct_trials=2) as evaluator:
        result = evaluator.evaluate(REFERENCE, KERNEL, verbose=True)
    print(f"compiled={result['compiled']} correctness={result['correctness']} runtime={result['runtime']:.4g} ms")
