"""Evolve a kernel with OpenEvolve, judged by a fleet.

Start a fleet with `kqueue up`, then either run this file, which evaluates two programs, or give it to OpenEvolve:

    openevolve-run kernels/good/torch/row_sum.py openevolve_evaluator.py --config config.yaml
"""

from pathlib import Path

from kqueue.integrations.openevolve import evaluator

HERE = Path(__file__).resolve().parent
# OpenEvolve calls this with the path of each program. It raises if the fleet failed, and OpenEvolve tries again.
evaluate = evaluator(HERE / "problems" / "row_sum.py", backend="torch", score="correctness")

if __name__ == "__main__":
    for name in ("good/torch/row_sum.py", "bad/wrong_shape.py"):
        result = evaluate(str(HERE / "kernels" / name))
        print(f"{name}: {result.metrics['combined_score']} {result.artifacts['feedback'].splitlines()[0]}")
