"""The kernel in a model's answer: forms of answers, the reported place, and hostile answers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from typing import Any

import pytest

from kqueue import Client
from kqueue.feedback import instruction
from kqueue.integrations.common import take_from
from kqueue.integrations.extraction import Taken, take
from kqueue.integrations.rl import KernelEnv
from kqueue.integrations.trace import KernelGuide
from tests.integrations.answers import ANSWERS, DRAFT, FENCED, FENCED_ANSWERS, KERNEL
from tests.integrations.sources import REFERENCE, RIGHT, SETTINGS

BLOCK = f"```python\n{KERNEL}```"
DRAFTED = f"```python\n{DRAFT}```"


@pytest.mark.parametrize("name", list(ANSWERS))
def test_a_right_kernel_is_found(name: str) -> None:
    """The whole kernel is extracted from every form of answer, and nothing else."""
    assert take(ANSWERS[name]).kernel.replace("\r\n", "\n").strip() == KERNEL.strip()


@pytest.mark.parametrize("name", list(FENCED_ANSWERS))
def test_a_kernel_with_fences_in_its_strings_is_found(name: str) -> None:
    """Lines with fences in strings and comments do not end a block."""
    assert take(FENCED_ANSWERS[name]).kernel.strip() == FENCED.strip()


def test_a_source_is_unchanged() -> None:
    """A plain kernel is unchanged, whatever its strings and line ends."""
    for source in (KERNEL, FENCED, FENCED.replace("\n", "\r\n"), f"\n\n{FENCED}\n\n", f"\ufeff{KERNEL}"):
        assert take(source) == Taken(source)
        assert take(source).note == ""


@pytest.mark.parametrize(
    ("answer", "place"),
    [
        (KERNEL, "the whole answer"),
        (f"Here:\n{BLOCK}", "block 1 of 1 (python), lines 3-22"),
        (
            f"<think>\n{DRAFTED}\n</think>\n{BLOCK}\n```sh\nls\n```\n",
            "block 1 of 2 (python), lines 26-45, reasoning dropped",
        ),
        (f"```\n{KERNEL}```", "block 1 of 1, lines 2-21"),
        (f"````md\n# Kernel\n{BLOCK}\n````", "block 1 of 1 (python), lines 4-23"),
        (f"Here:\n\n{KERNEL}", "text outside of fences, lines 3-22"),
        (json.dumps({"code": KERNEL}), "block 1 of 1 (json)"),
        (f"<think>\n{DRAFTED}", "nothing, reasoning dropped"),
        ("", "nothing"),
        ("I cannot do that.", "the whole answer"),
    ],
)
def test_the_place_is_reported(answer: str, place: str) -> None:
    """The block, its language, its lines in the answer, and dropped reasoning are reported."""
    taken = take(answer)
    assert str(taken) == place
    assert taken.note == ("" if place == "the whole answer" else f"Taken from the answer: {place}.")
    if taken.lines is not None:
        first, last = taken.lines
        assert "\n".join(answer.split("\n")[first - 1 : last]).strip() == KERNEL.strip()


@pytest.mark.parametrize(
    ("answer", "kernel"),
    [
        # A syntax error is the model's fault and is judged.
        ("```python\nclass ModelNew(:\n```\n```sh\nls\n```", "class ModelNew(:\n"),
        ("```python\nclass ModelNew(:\n```\n```python\nclass ModelNew(]:\n```", "class ModelNew(]:\n"),
        ("import torch\nclass ModelNew(:\n    x\n\ny\n", "import torch\nclass ModelNew(:\n    x\n\ny\n"),
        ("import torch\nclass ModelNew: 1\n\nx = = 2\n", "import torch\nclass ModelNew: 1\n\nx = = 2\n"),
        # A fragment is better than nothing, and a class under another name can be bound to the right one.
        ("```python\nclass ModelNew(nn.Module): 1\n```\nand\n```\n1\n```", "class ModelNew(nn.Module): 1\n"),
        ("```python\nclass Fast: 1\nModelNew = Fast\n```\n```sh\nls\n```", "class Fast: 1\nModelNew = Fast\n"),
        # Without the class the last block is judged.
        ("```python\nx = 1\n```\n```python\ny = 1\n```", "y = 1\n"),
        ("I cannot do that.", "I cannot do that."),
        ("<think>Hm.</think>\nI cannot do that.", "I cannot do that."),
        ("```python\n```", "```python\n```"),
        ("", ""),
        # Blocks are not joined.
        ("```python\nimport torch\n```\n```python\nclass ModelNew(torch.nn.Module): 1\n```",
         "class ModelNew(torch.nn.Module): 1\n"),
    ],
)  # fmt: skip
def test_an_answer_without_a_right_kernel(answer: str, kernel: str) -> None:
    """The closest block is judged unchanged: nothing is repaired or joined."""
    assert take(answer).kernel == kernel


def test_the_instruction_has_no_kernel() -> None:
    """For an answer that repeats the task, the reference is judged."""
    text = instruction("class Model: ...", "triton")
    assert "triton" in text
    assert take(text).kernel == "class Model: ...\n"


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": DRAFTED}, {"role": "assistant", "content": BLOCK}],
        [{"role": "assistant", "content": BLOCK}, {"role": "tool", "content": "passed"}],
        [{"role": "assistant", "content": [{"type": "text", "text": BLOCK}]}],
        [{"role": "assistant", "content": [{"type": "thinking", "text": DRAFTED}, {"text": BLOCK}]}],
        [{"role": "assistant", "content": ["Here:", BLOCK]}],
        [{"content": BLOCK}],
    ],
)  # fmt: skip
def test_a_chat(chat: list[dict[str, Any]]) -> None:
    """The kernel is extracted from the assistant's last message."""
    assert take_from(chat).kernel.strip() == KERNEL.strip()


def test_a_chat_without_an_answer() -> None:
    """Messages without text, and chats without messages, have no kernel."""
    for chat in ([], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": []}]):
        assert take_from(chat).kernel == ""


def test_a_wrong_escape_is_no_error() -> None:
    """Escapes in C++ strings cause no error, even if a trainer turns Python's warnings into errors."""
    answer = BLOCK.replace("#include", r"\d #include")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert take(f"{answer}\n```python\nm = ModelNew()\n```").block == 1


_CLASS = "class ModelNew:\n"
_STRING = f"{_CLASS} x='''\n"


@pytest.mark.parametrize(
    ("head", "filler"),
    [
        *[("", filler) for filler in ("`", "~", "```\n", "- ```\n", "> ", "- ", "1. ```a\n", "\n")],
        *[("", filler) for filler in ("<think>", "</think>")],
        *[("```\n", filler) for filler in ("<think>", "<think> ", "a <think>a</think>")],
        *[(_CLASS, filler) for filler in ("`", "[", '{"a":', "(", "import a\n", "\\\n", "\0", "-")],
        *[(f"```\n{_STRING}", filler) for filler in ("x```\n", "```x y\n", "# x```\n", "- ```\n", f"```\n{_STRING}")],
        *[(f"import a\n{_CLASS} x=(", filler) for filler in (" ", "<a>", "</a>", "</a> ", "<", "prose is\n")],
        ("", f"- > 1. ```python\n{_STRING}"),
        ("```\n```\n", "<!--\n"),
    ],
)  # fmt: skip
def test_hostile_answers_take_linear_time(head: str, filler: str) -> None:
    """Hostile answers are parsed in seconds, where a comparison of all pairs of parts would take hours."""
    begun = time.process_time()
    take(head + filler * (100_000 // len(filler)) + "x")
    assert time.process_time() - begun < 30


def test_the_parser_is_loaded_when_it_is_needed() -> None:
    """Neither importing the integrations nor judging bare sources loads the parser."""
    code = (
        "import sys; from kqueue.integrations import rl, extraction; extraction.take('class ModelNew: 1');"
        "print('markdown_it' in sys.modules); extraction.take('```\\nx\\n```'); print('markdown_it' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


# Integrations ------------------------------------------------------------------------------------------


def test_feedback_says_what_was_taken(kq: Client) -> None:
    """Observation, info and a guide's feedback contain the place, also for a refused kernel."""
    answer = f"<think>\n{DRAFTED}\n</think>\nHere: ```python\n{RIGHT.strip()}```\n```sh\nls\n```"
    place = "block 1 of 2 (python), lines 26-40, reasoning dropped"
    env = KernelEnv([REFERENCE], client=kq, max_turns=3, **SETTINGS)
    assert env.reset()[1]["taken"] is None
    text, score, *_, info = env.step(answer)
    assert (score, info["taken"]) == (1.0, place)
    assert f"Taken from the answer: {place}." in text.splitlines()
    text, score, *_, info = env.step(f"<think>\n{DRAFTED}")
    assert (score, info["taken"], info["verdict"]) == (0.0, "nothing, reasoning dropped", None)
    assert text.startswith("FAILED: kernel: ")
    assert text.endswith("\nTaken from the answer: nothing, reasoning dropped.")
    text, score, *_ = env.step(RIGHT)
    assert score == 1.0
    assert "Taken" not in text
    score, text = KernelGuide(gpu="cpu", connect=lambda: kq, **SETTINGS).get_feedback("task", answer, REFERENCE)
    assert score == 1.0
    assert f"Taken from the answer: {place}." in text.splitlines()
