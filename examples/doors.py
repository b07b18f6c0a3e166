"""One fleet behind the doors of other evaluation servers, asked as their own clients ask. Only addresses are kqueue's.

    KQUEUE_GPU_FALLBACK=gpu kqueue up &     # on a machine without a GPU: KQUEUE_GPU_FALLBACK=cpu
    python examples/doors.py

Each line is one exchange. The exit status is 1 if one came out otherwise than it must.
"""

import asyncio
import json
import sys
import time
from uuid import uuid4

import httpx
from eval_client import KERNEL, KERNELS, PROBLEM, authorization

from kqueue.integrations.local import LocalKernelEvaluator as LocalKernelEvaluatorWrapper
from kqueue.integrations.modal_like import ModalEvaluatorConfig, evaluate_kernel_batch, get_modal_evaluator

FAILED = 0


def show(door: str, said: object, good: bool) -> None:
    """Print an exchange."""
    global FAILED
    FAILED += not good
    print(f"{'ok' if good else 'WRONG':5} {door:46} {said}", flush=True)


async def modal() -> None:
    """A training client: each evaluation sets a timeout, and so asks for an A100."""
    for name, kernel in KERNELS.items():
        evaluator = get_modal_evaluator(ModalEvaluatorConfig(timeout=120))
        result = await evaluator.evaluate_single_batched(ref_code=PROBLEM, kernel_code=kernel, num_correct_trials=5)
        asked, lane = result["metadata"].get("lane_asked", result["metadata"]["lane"]), result["metadata"]["lane"]
        said = f"asked {asked}, judged on {lane}: compiled={result['compiled']} correct={result['correctness']}"
        show(f"Modal: {name} kernel", said, (result["compiled"], result["correctness"]) == (True, name == "right"))
        if name == "right":
            metadata = result["metadata"]
            said = f"{metadata['correctness_trials']} and {metadata['hidden_trials']} hidden: {metadata['message']}"
            show("Modal: what was asked for and done", said, metadata["correctness_trials"] == "(5 / 5)")
    entries = [{"index": n, "ref_code": PROBLEM, "kernel_code": kernel} for n, kernel in enumerate((KERNEL, ""))]
    right, empty = await evaluate_kernel_batch(entries)
    good = right["correctness"] and empty["metadata"]["exception_type"] == "InvalidRequest"
    show("Modal: a batch with a fault", f"correct={right['correctness']}; {empty['error_message']}", good)
    await get_modal_evaluator().close()


def local() -> None:
    """A search that names a GPU which this machine need not have."""
    with LocalKernelEvaluatorWrapper(gpu="L40S", backend="triton") as evaluator:
        result = evaluator.evaluate(PROBLEM, KERNEL, False)
    said = f"judged on {result['metadata']['lane']}: compiled={result['compiled']} correct={result['correctness']}"
    show('LocalKernelEvaluatorWrapper(gpu="L40S")', said, result["correctness"])


def kernelgym(server: httpx.Client) -> None:
    """KernelGYM's training client: post, poll the status, fetch the result."""
    for name, kernel in KERNELS.items():
        task_id = f"{name}_{uuid4().hex[:8]}"
        task = {
            "task_id": task_id,
            "reference_code": PROBLEM,
            "kernel_code": kernel,
            "backend": "triton",
            "num_correct_trials": 5,
            "num_perf_trials": 100,
            "timeout": 300,
            "priority": "normal",
            "entry_point": "Model",
            "verbose_errors": True,
            "enable_profiling": True,
            "detect_decoy_kernel": True,
        }
        server.post("/evaluate", json=task).raise_for_status()
        while (status := server.get(f"/status/{task_id}").json()["status"]) not in ("completed", "failed", "cancelled"):
            time.sleep(1)
        result = server.get(f"/results/{task_id}").raise_for_status().json()
        said = f"{status}: compiled={result['compiled']} correct={result['correctness']} {result['error_code'] or ''}"
        show(f"KernelGYM: {name} kernel", said, status == "completed" and result["correctness"] is (name == "right"))


def simple_eval_server(server: httpx.Client) -> None:
    """What clients of `simple_eval_server` do: probes, a seed, JSON posted as text."""
    for path in ("/health", "/health/"):
        show(f"HEAD {path}", answer := server.head(path).status_code, answer == 200)
    body = {"original_model_src": PROBLEM, "custom_model_src": KERNEL, "backend": "triton", "seed": 7}
    result = server.post("/eval", content=json.dumps(body)).json()
    said = (
        f"correct={result.get('correctness')}, ignored: {result.get('metadata', {}).get('ignored_fields', 'nothing')}"
    )
    show("POST /eval with a seed, without a content type", said, bool(result.get("correctness")))
    refused = server.post("/eval", content=json.dumps(body), headers={"Content-Type": "text/plain"})
    show("POST /eval as text/plain", f"{refused.status_code} {refused.json()['detail']}", refused.status_code == 415)


def main() -> int:
    """Try every door."""
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:18188"
    asyncio.run(modal())
    local()
    with httpx.Client(base_url=url, headers=authorization(url), timeout=300) as server:
        kernelgym(server)
        simple_eval_server(server)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
