"""The tool `tune`."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from mcp import Client
from sqlalchemy import Engine, text

from kqueue.categories import Category
from tests.mcp.agents import quoted, refusal, text_of, told
from tests.mcp.fixtures import *  # noqa: F403
from tests.samples import ended, measurement

pytestmark = pytest.mark.anyio
PROBLEM = "class Model: ..."


async def test_tuning_goes_on_where_it_was(client: Client, judge, queued, engine: Engine) -> None:
    """A call that times out returns a name, the next call continues with it, and the last one names the winner."""
    kernel = "BLOCK = 1\nclass ModelNew: ..."
    given = {"problem": PROBLEM, "kernel": kernel, "backend": "torch", "timeout_s": 0, "repeats": 2}
    given["grid"] = {"BLOCK": [1, 2, 4, 8]}

    def judge_all() -> int:
        """Judge the queued ones: a larger BLOCK is faster, but 8 is wrong."""
        waiting = queued()
        for identity in waiting:
            query = "SELECT source FROM kernels JOIN evaluations ON hash = kernel_hash WHERE id = CAST(:id AS uuid)"
            with engine.connect() as connection:
                block = int(connection.scalar(text(query), {"id": identity}).split()[2])
            times = {"runtime": measurement(8.0 / block), "baseline": measurement(8.0)}
            judge(identity, ended(Category.WRONG_VALUES) if block == 8 else ended(Category.PASSED, **times))
        return len(waiting)

    heard: list[tuple[float, float | None, str | None]] = []

    async def progress(seconds: float, of: float | None, message: str | None) -> None:
        heard.append((seconds, of, message))

    result = await client.call_tool("tune", given)
    assert text_of(result).startswith("No winner yet. 11 calls: 0 of 4 judged. The rest continues: call `tune` again")
    name = told(result)["tuning"]
    assert await asyncio.to_thread(judge_all) == 4

    async def finish() -> None:
        while not heard:
            await anyio.sleep(0.05)
        while True:
            await asyncio.to_thread(judge_all)
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(finish)
        again = {**given, "tuning": name, "timeout_s": 60}
        result = await client.call_tool("tune", again, progress_callback=progress)
        tasks.cancel_scope.cancel()
    found = told(result)
    assert "Duel of the original (A) with the best (B): B is faster, certainty 99.02 %: " in text_of(result)
    assert (found["state"], found["won"], found["beats_original"]) == ("done", True, True)
    best, *_, wrong = found["configurations"]
    assert (best["values"], best["runtime_ms"], best["calls"], best["final"]) == ({"BLOCK": "4"}, 2.0, 100, True)
    assert (wrong["values"], wrong["category"]) == ({"BLOCK": "8"}, "wrong_values")
    assert text_of(result).startswith("The first is the winner: read kqueue://evaluations/")
    source = await client.call_tool("read", {"uri": f"kqueue://evaluations/{best['evaluation_id']}/kernel.py"})
    assert quoted(text_of(source)) == kernel.replace("1", "4")
    assert "100 calls, the last comparison: " in (heard[0][2] or "")
    # No configuration is judged twice.
    assert told(await client.call_tool("tune", again)) == found
    assert "idempotency" in refusal(await client.call_tool("tune", again | {"grid": {"BLOCK": [1, 3]}}))
    assert "SIZE is not in the kernel" in refusal(await client.call_tool("tune", given | {"grid": {"SIZE": [1]}}))
