"""The evaluator with Modal's interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from kqueue import AsyncClient, InvalidRequest, LaneUnavailable
from kqueue.config import Config
from kqueue.errors import ConfigError
from kqueue.integrations import modal_like
from kqueue.integrations.modal_like import (
    ModalEvaluatorConfig,
    ModalKernelEvaluator,
    get_modal_evaluator,
    set_modal_evaluator,
)
from tests.integrations.sources import BROKEN_REFERENCE, NO_KERNEL, QUICK, RAISES, REFERENCE, RIGHT, WRONG

KEYS = {"format_ok", "compiled", "correctness", "tests_passed", "tests_total", "speedup", "runtime_ms"}
KEYS |= {"baseline_runtime_ms", "error_message", "code_length", "metadata"}
ON_CPU = ModalEvaluatorConfig(gpu_type="cpu")


def entry(kernel: str = RIGHT, **changes: Any) -> dict[str, Any]:
    """Return the arguments of one evaluation."""
    return {"ref_code": REFERENCE, "kernel_code": kernel, **QUICK, **changes}


class CountingClient(AsyncClient):
    """A client that records the size of each batch."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.batches: list[int] = []

    async def evaluate_batch(self, entries: Iterable[Any], **options: Any) -> Any:
        """Evaluate like :class:`AsyncClient`."""
        everything = list(entries)
        self.batches.append(len(everything))
        return await super().evaluate_batch(everything, **options)


def evaluated(config: Config, use: Callable[[ModalKernelEvaluator], Any], **settings: Any) -> tuple[Any, list[int]]:
    """Return the result of ``use`` with an evaluator of the fleet, and the sizes of its batches."""

    async def main() -> tuple[Any, list[int]]:
        async with CountingClient(config) as client:
            evaluator = ModalKernelEvaluator(ModalEvaluatorConfig(**{"gpu_type": "cpu", **settings}), client)
            return await use(evaluator), client.batches

    return asyncio.run(main())


@pytest.fixture
def shared() -> Iterator[None]:
    """Remove the process's evaluator after the test."""
    yield
    set_modal_evaluator(None)


def test_one_kernel(config: Config) -> None:
    """The result has Modal's keys, and times only on request."""
    asked = ("torch", 1, True, 5, "fp32", "do_bench", True, 0.0)
    result, _ = evaluated(config, lambda e: e.evaluate_single(REFERENCE, RIGHT, *asked))
    assert result.keys() == KEYS
    assert (result["format_ok"], result["compiled"], result["correctness"]) == (True, True, True)
    assert (result["tests_passed"], result["tests_total"]) == (1, 1)
    assert (result["error_message"], result["code_length"]) == (None, len(RIGHT))
    assert (result["runtime_ms"], result["baseline_runtime_ms"], result["speedup"]) == (0.5, 1.0, 2.0)
    metadata = result["metadata"]
    assert (metadata["timing_method"], metadata["timing_basis"]) == ("do_bench", "cpu_clock")
    assert metadata["excessive_speedup"]  # every speedup is, above a threshold of zero
    result, _ = evaluated(config, lambda e: e.evaluate_single(REFERENCE, RIGHT, "torch", 1))
    assert result["correctness"] is True
    assert (result["runtime_ms"], result["baseline_runtime_ms"], result["speedup"]) == (None, None, None)


def test_a_batch_with_faults(config: Config) -> None:
    """Results are in order, and an invalid entry gets a record of its exception without affecting another."""
    asked = [
        (entry(), "passed"),
        (entry(WRONG), "wrong_values"),
        (entry(backend="fortran"), "InvalidRequest"),
        (entry(ref_code=BROKEN_REFERENCE), "EvaluationFailed"),
        (entry(NO_KERNEL), "entry_point_missing"),
        (entry(RAISES), "runtime_error"),
        (entry(""), "InvalidRequest"),
        ({"ref_code": REFERENCE}, "InvalidRequest"),
        (entry(WRONG, index=8, colour="red"), "wrong_values"),
        (entry(timing_method="sundial"), "InvalidRequest"),
        (entry(backend="cuda"), "InvalidRequest"),
    ]
    slots, _ = evaluated(config, lambda e: e.evaluate_batch([fields for fields, _ in asked]))
    assert all(slot.keys() == KEYS for slot in slots)
    ends = [slot["metadata"].get("exception_type", slot["metadata"].get("category")) for slot in slots]
    assert ends == [end for _, end in asked]
    assert slots[8]["metadata"]["ignored_fields"] == ["colour", "index"]
    assert "ignored_fields" not in slots[0]["metadata"]
    for place, named in {2: "fortran", 6: "kernel", 7: "kernel_code", 9: "timing_method", 10: "cuda"}.items():
        assert named in slots[place]["metadata"]["exception"]
        assert named in slots[place]["error_message"]
    of_the_problem = slots[3]["metadata"]
    assert (of_the_problem["category"], of_the_problem["blame"]) == ("reference_error", "problem")
    assert (slots[3]["format_ok"], slots[3]["compiled"], slots[3]["speedup"]) == (True, False, None)
    assert (slots[3]["tests_passed"], slots[3]["tests_total"], slots[7]["tests_total"]) == (0, 1, 5)
    assert (slots[3]["code_length"], slots[7]["code_length"]) == (len(RIGHT), 0)
    assert (slots[1]["compiled"], slots[1]["correctness"], slots[1]["tests_passed"]) == (True, False, 0)
    assert slots[1]["error_message"].startswith("wrong_values: ")
    assert (slots[4]["format_ok"], slots[4]["compiled"]) == (True, False)
    assert "seven" in slots[5]["error_message"]


def test_calls_of_one_window_go_out_together(config: Config) -> None:
    """Single calls are batched up to the batch size, unless batching is off."""

    async def use(evaluator: ModalKernelEvaluator, *kernels: str) -> list[Any]:
        calls = [evaluator.evaluate_single_batched(**entry(kernel)) for kernel in kernels]
        slots = await asyncio.gather(*calls, return_exceptions=True)
        return [slot["correctness"] if isinstance(slot, dict) else type(slot) for slot in slots]

    together = evaluated(config, lambda e: use(e, RIGHT, WRONG, "", RIGHT), max_batch_size=3, batch_window_s=0.3)
    # The third of the first three is refused before its batch is sent.
    assert together == ([True, False, InvalidRequest, True], [2, 1])
    assert evaluated(config, lambda e: use(e, WRONG, WRONG), batch_single=False) == ([False, False], [1, 1])


def test_a_cancelled_call_spoils_no_other(config: Config) -> None:
    """A cancelled call does not affect the results of the rest of its window."""

    async def use(evaluator: ModalKernelEvaluator) -> dict[str, Any]:
        given_up = asyncio.create_task(evaluator.evaluate_single_batched(**entry(WRONG)))
        kept = asyncio.create_task(evaluator.evaluate_single_batched(**entry()))
        await asyncio.sleep(0.05)
        given_up.cancel()
        return await kept

    result, batches = evaluated(config, use)
    assert (result["correctness"], batches) == (True, [2])


@pytest.mark.usefixtures("shared")
def test_one_evaluator_in_several_loops(config: Config) -> None:
    """The process's evaluator and functions work in one event loop after another."""
    set_modal_evaluator(ModalKernelEvaluator(ON_CPU))
    for kernel in (RIGHT, WRONG):
        result = asyncio.run(get_modal_evaluator().evaluate_single_batched(**entry(kernel)))
        assert result["correctness"] is (kernel == RIGHT)
    single = asyncio.run(modal_like.evaluate_kernel_single(REFERENCE, WRONG, "torch", num_correct_trials=1))
    gathered = asyncio.run(modal_like.ModalBatcher(get_modal_evaluator()).submit(entry(WRONG)))
    assert single["metadata"]["category"] == gathered["metadata"]["category"] == "wrong_values"
    right, empty = asyncio.run(modal_like.evaluate_kernel_batch([entry(), entry("")], ModalEvaluatorConfig(timeout=60)))
    assert (right["correctness"], empty["metadata"]["exception_type"]) == (True, "InvalidRequest")
    asyncio.run(get_modal_evaluator().close())


def test_a_gpu_that_no_worker_has(config: Config) -> None:
    """Without waiting, a missing GPU raises an error that lists the lanes, and gives no record of a bad kernel."""
    for ask in (
        lambda e: e.evaluate_single(REFERENCE, RIGHT),
        lambda e: e.evaluate_single_batched(REFERENCE, RIGHT),
        lambda e: e.evaluate_batch([entry(), entry(WRONG)]),
    ):
        with pytest.raises(LaneUnavailable, match=r"gpu\.l40s.*served now: cpu.*KQUEUE_GPU_FALLBACK"):
            evaluated(config, ask, gpu_type="L40S", wait_for_gpu=False)


def test_the_fleets_fallback(config: Config) -> None:
    """The fleet's fallback replaces a lane without workers, and the result has both lanes."""
    with_fallback = config.model_copy(update={"gpu_fallback": "cpu"})
    [right, wrong], _ = evaluated(with_fallback, lambda e: e.evaluate_batch([entry(), entry(WRONG)]), gpu_type="A100")
    assert (right["correctness"], wrong["correctness"]) == (True, False)
    assert (right["metadata"]["lane"], right["metadata"]["lane_asked"]) == ("cpu", "gpu.a100")
    ours, _ = evaluated(with_fallback, lambda e: e.evaluate_single(**entry(WRONG)))
    assert "lane_asked" not in ours["metadata"]


def test_waiting_for_a_gpu(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    """A call waits up to its limit with a warning, then raises an error without any record."""
    with pytest.raises(LaneUnavailable, match=r"gpu\.l40s"):
        evaluated(config, lambda e: e.evaluate_batch([entry()]), gpu_type="L40S", max_queue_wait_s=0.5)
    [warning] = [record.getMessage() for record in caplog.records if "wait for a worker" in record.getMessage()]
    assert all(words in warning for words in ("gpu.l40s", "KQUEUE_GPU_FALLBACK"))


def test_wrong_configurations_are_named(config: Config) -> None:
    """Invalid configurations name the field, and a disabled evaluator raises."""
    for wrong in ({"deployment_mode": "eager"}, {"max_batch_size": 0}, {"batch_window_s": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong)).removeprefix("batch_").removesuffix("_s")):
            ModalEvaluatorConfig(**wrong)
    with pytest.raises(ConfigError, match="enabled=True"):
        evaluated(config, lambda e: e.evaluate_single(REFERENCE, RIGHT), enabled=False)
