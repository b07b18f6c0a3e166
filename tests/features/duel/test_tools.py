"""The tool `duel`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp import Client

from kqueue.categories import Category
from tests.mcp.agents import refusal, text_of, told
from tests.mcp.fixtures import *  # noqa: F403
from tests.samples import ended

pytestmark = pytest.mark.anyio
PROBLEM = "class Model: ..."


async def test_a_duel_goes_on_where_it_was(client: Client, judge, queued) -> None:
    """A call that times out returns an id, the next call continues with it, and a wrong kernel loses by that."""
    given: dict[str, Any] = {"problem": PROBLEM, "a": "class ModelNew: a = 1", "b": "class ModelNew: b = 1"}
    given |= {"a_backend": "torch", "b_backend": "torch", "timeout_s": 0}
    open_ = told(await client.call_tool("duel", given))
    assert open_["reason"] is None
    first = queued()
    assert len(first) == 2
    for identity in first:
        await asyncio.to_thread(judge, identity)
    again = given | {"duel": open_["id"]}
    assert told(await client.call_tool("duel", again))["rounds"] == 1
    assert len(queued()) == 18
    await asyncio.to_thread(judge, queued()[0], ended(Category.WRONG_VALUES))
    result = await client.call_tool("duel", again)
    assert told(result)["reason"] == "failed"
    assert "ended as wrong_values" in text_of(result)
    assert "an id of a duel is expected" in refusal(await client.call_tool("duel", given | {"duel": "x"}))
