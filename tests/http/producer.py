"""Use the client over HTTP where nothing else is installed, with the server and the token in the environment."""

from __future__ import annotations

import asyncio
import sys

import kqueue
from kqueue.integrations.rl import reward

PROBLEM = "class Model: ...\n\ndef get_inputs(): ...\n\ndef get_init_inputs(): ...\n"
KERNEL = "class ModelNew: ...\n"


def entry(number: int, **fields: object) -> dict[str, object]:
    """Return the fields of one of several requests."""
    kernel = f"{KERNEL}# {number}\n"
    return {"problem": PROBLEM, "kernel": kernel, "backend": "torch", "lane": "cpu", "batch": "light", **fields}


def refused(call: object, *args: object, **kwargs: object) -> str:
    """Return the words with which a call is refused."""
    try:
        call(*args, **kwargs)  # type: ignore[operator]
    except kqueue.KqueueError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(call)


with kqueue.RemoteClient() as client:
    results = client.evaluate_batch([entry(1), {"kernel": "x"}, entry(2)], timeout=60)
    assert [type(one).__name__ for one in results] == ["Verdict", "InvalidRequest", "Verdict"], results
    verdict = client.evaluate(kqueue.Request(**entry(3)), timeout=60)
    assert verdict.passed
    assert verdict.evidence is not None
    assert kqueue.Verdict.load(verdict.model_dump(mode="json")) == verdict
    assert client.get(verdict.evaluation_id).verdict() == verdict
    assert len(client.batch("light")) == 3
    assert refused(client.get, "no-id").startswith("UnknownEvaluation")
    assert "settings.checks" in refused(client.submit, **entry(5, settings={"checks": -1}))
assert set(kqueue.Request.model_json_schema()["properties"]) > {"problem", "kernel"}
answer = f"Here it is:\n```python\n{KERNEL}# 6\n```\n"
assert asyncio.run(reward(PROBLEM, [answer], backend="torch", lane="cpu", score="correctness")) == [1.0]
sys.stdout.write(refused(kqueue.Client))
