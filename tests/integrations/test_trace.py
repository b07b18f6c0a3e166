"""The guide and the agent for Trace."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text

from kqueue import Client, InvalidRequest
from kqueue.config import Config
from kqueue.integrations import trace
from kqueue.integrations.trace import KernelAgent, KernelGuide, starting_kernel
from kqueue.store.engine import connect
from tests.integrations.sources import BROKEN_REFERENCE, QUICK, REFERENCE, RIGHT, WRONG
from tests.packages import needs

TASK = "Write it faster."


def guide(**changes: Any) -> KernelGuide:
    """Return a guide on the `cpu` lane with the fewest calls."""
    return KernelGuide(**{"gpu": "cpu", "score": "correctness", **QUICK, **changes})


def evaluations(kq: Client, run: str) -> int:
    """Count the evaluations of a run."""
    engine = connect(kq._transport._config.require_database(), application="tests", pool_size=1)
    with engine.connect() as connection:
        query = text("SELECT count(*) FROM evaluations WHERE idempotency_key LIKE :like")
        found = connection.scalar(query, {"like": f"{run}/%"})
    engine.dispose()
    return found or 0


def test_a_right_and_a_wrong_kernel(config: Config) -> None:
    """A right kernel scores 1 / seconds with its times, and a wrong one 0 with its first wrong places."""
    own = guide(score="inverse_runtime")
    score, feedback = own.get_feedback(TASK, RIGHT, REFERENCE)
    assert score == pytest.approx(2000.0)
    assert feedback.startswith("CORRECT")
    assert all(words in feedback for words in ("Runtime: ", "Reference: "))
    score, feedback = own.get_feedback(TASK, WRONG, REFERENCE)
    own.close()
    assert (score, feedback.startswith("FAILED: wrong_values")) == (0.0, True)
    assert "index [0, 0]: expected" in feedback


def test_every_way_to_call_it(kq: Client) -> None:
    """Positional, named, base-class and `metric` calls with extra arguments work, and judge a kernel once."""
    own = guide()
    in_a_block = f"Here it is:\n```python\n{RIGHT}\n```"
    assert own.get_feedback(TASK, RIGHT, REFERENCE)[0] == 1.0
    assert own.get_feedback(task=TASK, response=RIGHT, info=REFERENCE)[0] == 1.0
    assert own.get_feedback(TASK, RIGHT, reference=REFERENCE, step=3)[0] == 1.0
    assert own.get_feedback(TASK, RIGHT, {"ref_arch_src": REFERENCE, "level": 1})[0] == 1.0
    assert own(TASK, RIGHT, REFERENCE)[0] == 1.0
    assert own.metric(TASK, RIGHT, REFERENCE) == own.metric(TASK, RIGHT, info=REFERENCE, seed=1) == 1.0
    assert own.metric(TASK, in_a_block, REFERENCE) == 1.0
    assert evaluations(kq, own._run) == 2  # in the block it has one more line at the end
    own.close()


def test_copies_share_verdicts_and_connection(kq: Client) -> None:
    """Copies of a guide, one per item of a batch, share verdicts and one connection."""
    own = guide()
    copies = [copy.deepcopy(own), own, pickle.loads(pickle.dumps(own)), copy.deepcopy(own)]
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda each: each.metric(TASK, RIGHT, REFERENCE), copies * 4))
    assert scores == [1.0] * 16
    assert evaluations(kq, own._run) == 1
    assert copies[0]._connection is own._connection
    assert copies[2]._connection is not own._connection
    for each in (own, copies[2]):
        each.close()


def test_what_is_known_of_nothing_is_tried_again(kq: Client) -> None:
    """A failure of the fleet scores -1 with the reason, and is not cached like a verdict."""
    own = guide()
    for tries in (1, 2):
        score, feedback = own.get_feedback(TASK, RIGHT, BROKEN_REFERENCE)
        assert score == -1.0
        assert feedback.startswith("NOT JUDGED (reference_error, to blame: problem)")
        assert evaluations(kq, own._run) == tries
    own.close()


def test_answers_without_a_kernel(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Unusable answers score 0 without an evaluation, and `verbose` prints the feedback."""
    for answer in ("", None, "\n", "class ModelNew: '\0'", "# " + "x" * (1 << 20)):
        score, feedback = guide(verbose=True).get_feedback(TASK, answer, REFERENCE)
        assert (score, feedback.startswith("FAILED: kernel: ")) == (0.0, True)
        assert "score 0\nFAILED: " in capsys.readouterr().err


def test_no_reference(config: Config) -> None:
    for info in (None, {"level": 1}, 7):
        with pytest.raises(InvalidRequest, match="reference"):
            guide().get_feedback(TASK, RIGHT, info)
    with pytest.raises(InvalidRequest, match="problem"):
        guide().get_feedback(TASK, RIGHT, "")


def test_only_the_model_is_renamed() -> None:
    """Only the class and references to it are renamed, not comments, strings, attributes or longer names."""
    source = (
        "import torch\n\n\nclass Modelled: ...\n\n\n@torch.no_grad\n"
        "class  Model(torch.nn.Module):  # Model é\n"
        '    """A Model."""\n\n    def __init__(self):\n'
        "        é = 1; super(Model, self).__init__()\n        self.Model = é\n"
    )
    kernel = starting_kernel(source)
    assert kernel == source.replace("class  Model(", "class  ModelNew(").replace("super(Model,", "super(ModelNew,")
    assert starting_kernel(kernel) == kernel

    for nothing in ("class Model(", "x = 1", "", "class A:\n    class Model: ..."):
        with pytest.raises(InvalidRequest, match="the initial kernel"):
            KernelAgent(nothing)


def test_the_agent_is_traces() -> None:
    """With Trace installed the kernel is a trainable parameter, and the answer is a node that depends on it."""
    needs("opto")
    agent = KernelAgent(REFERENCE)
    [parameter] = agent.parameters()
    assert parameter.trainable
    assert parameter.data == starting_kernel(REFERENCE)
    answer = agent(TASK)
    assert answer.data == parameter.data
    answer.backward(feedback="make it faster")
    assert parameter.feedback
    assert pickle.loads(pickle.dumps(agent)).parameters()[0].data == parameter.data
    assert issubclass(KernelAgent, trace._Module)
