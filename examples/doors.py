"""Clients of other evaluation servers that use one fleet. Only their addresses are changed for kqueue.

    KQUEUE_GPU_FALLBACK=gpu kqueue up &     # on a machine without a GPU: KQUEUE_GPU_FALLBACK=cpu
    python examples/doors.py

Each line is one exchange. The exit status is 1 if a result is not as expected.
"""

import asyncio
import json
import sys
import time
from uuid import uuid4

import httpx
from eval_client import KERNEL, KERNELS, PROBLEM, address, authorization, error_message

from kqueue import KqueueError
from kqueue.integrations.local import LocalKernelEvaluator as LocalKernelEvaluatorWrapper
from kqueue.integrations.modal_like import ModalEvaluatorConfig, evaluate_kernel_batch, get_modal_evaluator

FAILED = 0


def show(exchange: str, outcome: object, good: bool) -> None:
    global FAILED
    FAILED += not good
    print(f"{'ok' if good else 'WRONG':5} {exchange:46} {outcome}", flush=True)


async def modal() -> None:
    """Evaluate like a training client. Each evaluation sets a timeout, and so requests an A100."""
    for name, kernel in KERNELS.items():
        evaluator = get_modal_evaluator(ModalEvaluatorConfig(timeout=120))
        result = await evaluator.evaluate_single_batched(ref_code=PROBLEM, kernel_code=kernel, num_correct_trials=5)
        asked, lane = result["metadata"].get("lane_asked", result["metadata"]["lane"]), result["metadata"]["lane"]
        outcome = f"asked {asked}, judged on {lane}: compiled={result['compiled']} correct={result['correctness']}"
        show(f"Modal: {name} kernel", outcome, (result["compiled"], result["correctness"]) == (True, name == "right"))
        if name == "right":
            metadata = result["metadata"]
            outcome = f"{metadata['correctness_trials']} and {metadata['hidden_trials']} hidden: {metadata['message']}"
            show("Modal: requested and completed checks", outcome, metadata["correctness_trials"] == "(5 / 5)")
    entries = [{"index": n, "ref_code": PROBLEM, "kernel_code": kernel} for n, kernel in enumerate((KERNEL, ""))]
    right, empty = await evaluate_kernel_batch(entries)
    good = right["correctness"] and empty["metadata"]["exception_type"] == "InvalidRequest"
    show("Modal: a batch with a fault", f"correct={right['correctness']}; {empty['error_message']}", good)
    await get_modal_evaluator().close()


def local() -> None:
    """Evaluate like a search that names a GPU model, which this machine does not need to have."""
    with LocalKernelEvaluatorWrapper(gpu="L40S", backend="triton") as evaluator:
        result = evaluator.evaluate(PROBLEM, KERNEL, False)
    outcome = f"judged on {result['metadata']['lane']}: compiled={result['compiled']} correct={result['correctness']}"
    show('LocalKernelEvaluatorWrapper(gpu="L40S")', outcome, result["correctness"])


def kernelgym_task(name: str, **fields: object) -> dict[str, object]:
    """Return one of the kernels as KernelGYM's training client sends it."""
    return {
        "task_id": f"{name}_{uuid4().hex[:8]}",
        "reference_code": PROBLEM,
        "kernel_code": KERNELS[name],
        "backend": "triton",
        "num_correct_trials": 5,
        "num_perf_trials": 100,
        "timeout": 300,
        "priority": "normal",
        "entry_point": "Model",
        "verbose_errors": True,
        "enable_profiling": True,
        "detect_decoy_kernel": True,
        **fields,
    }


def kernelgym(server: httpx.Client) -> None:
    """Evaluate like KernelGYM's training client: post, poll the status, fetch the result."""
    for name in KERNELS:
        task = kernelgym_task(name)
        task_id = task["task_id"]
        server.post("/evaluate", json=task).raise_for_status()
        while (status := server.get(f"/status/{task_id}").json()["status"]) not in ("completed", "failed", "cancelled"):
            time.sleep(1)
        result = server.get(f"/results/{task_id}").raise_for_status().json()
        outcome = (
            f"{status}: compiled={result['compiled']} correct={result['correctness']} {result['error_code'] or ''}"
        )
        show(f"KernelGYM: {name} kernel", outcome, status == "completed" and result["correctness"] is (name == "right"))


def kernelgym_requests(server: httpx.Client) -> None:
    """Send the other requests of KernelGYM's page: a batch, a workflow, the workers."""
    batch = {"batch_id": uuid4().hex, "tasks": [kernelgym_task(name) for name in KERNELS]}
    answer = server.post("/evaluate/batch", json=batch).raise_for_status().json()
    right = [result["correctness"] for result in answer["results"]]
    outcome = f"{answer['batch_status']}: {answer['completed_tasks']} of {answer['total_tasks']}, correct: {right}"
    show("KernelGYM: a batch", outcome, right == [name == "right" for name in KERNELS])
    envelope = {"workflow": "kernelbench", "payload": kernelgym_task("right", priority="high")}
    answer = server.post("/workflow/submit", json=envelope).raise_for_status().json()
    identity = answer["result"]["metadata"]["evaluation_id"]
    listed = server.get("/v1/evaluations", params={"limit": 1000}).raise_for_status().json()["evaluations"]
    priority = next(one["priority"] for one in listed if one["evaluation_id"] == identity)
    outcome = f"{answer['status']}: correct={answer['result']['correctness']}, asked for high, was {priority}"
    show("KernelGYM: a workflow", outcome, answer["result"]["correctness"] and priority == "interactive")
    simple = {"workflow": "kernel_simple", "task_id": "t", "payload": {"kernel_code": KERNEL}}
    refused = server.post("/workflow/submit", json=simple)
    why = refused.json()["detail"].partition("workflow: ")[2]
    show("KernelGYM: a kernel without a reference", f"{refused.status_code} {why}", refused.status_code == 422)
    workers = server.get("/workers/status").raise_for_status().json()
    outcome = ", ".join(f"{worker['status']} on {worker['device']}" for worker in workers.values())
    show("KernelGYM: the workers", outcome, bool(workers))


def simple_eval_server(server: httpx.Client) -> None:
    """Send requests like clients of `simple_eval_server`: probes, a seed, JSON posted as text."""
    for path in ("/health", "/health/"):
        show(f"HEAD {path}", answer := server.head(path).status_code, answer == 200)
    body = {"original_model_src": PROBLEM, "custom_model_src": KERNEL, "backend": "triton", "seed": 7}
    result = server.post("/eval", content=json.dumps(body)).json()
    outcome = (
        f"correct={result.get('correctness')}, ignored: {result.get('metadata', {}).get('ignored_fields', 'nothing')}"
    )
    show("POST /eval with a seed, without a content type", outcome, bool(result.get("correctness")))
    key = {"Idempotency-Key": uuid4().hex}
    found = [server.post("/eval", json=body, headers=key).json()["metadata"]["evaluation_id"] for _ in range(2)]
    show("POST /eval twice with one key", f"{len(set(found))} evaluation", len(set(found)) == 1)
    conflict = server.post("/eval", json=body | {"num_correct_trials": 2}, headers=key)
    outcome = f"{conflict.status_code} {conflict.json()['detail'].partition('was ')[2]}"
    show("the same key with other settings", outcome, conflict.status_code == 409)
    refused = server.post("/eval", content=json.dumps(body), headers={"Content-Type": "text/plain"})
    show("POST /eval as text/plain", f"{refused.status_code} {refused.json()['detail']}", refused.status_code == 415)


def main() -> int:
    url = address()
    asyncio.run(modal())
    local()
    with httpx.Client(base_url=url, headers=authorization(url), timeout=300) as server:
        kernelgym(server)
        kernelgym_requests(server)
        simple_eval_server(server)
    return 1 if FAILED else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except httpx.HTTPError as error:
        sys.exit(error_message(error))
    except KqueueError as error:  # no fleet runs, for instance
        sys.exit(f"{error}")
