"""Proposers of kernels: any model of LiteLLM, a command of the user, or a folder of recorded kernels. Their prompts."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kqueue.errors import ConfigError, InvalidRequest, ProposerFailed
from kqueue.features.search.plan import Plan
from kqueue.feedback import instruction
from kqueue.files import read_text
from kqueue.store.searches import Proposal
from kqueue.text import short

_RETRIES: Final = 3
_SHOWN_CHARACTERS: Final = 400
_MOST_FAILURES: Final = 12
_MOST_GAINS: Final = 12
_MESSAGE_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True)
class Question:
    """A request to a proposer for a kernel that is better than a given one. A command reads it as JSON.

    Attributes:
        step: the step, from 1.
        number: the proposal's number in the search, from 1.
        kernel: source of the kernel to start from.
        scores: its score for each metric.
        summary: the failures and improvements so far, or None unless the algorithm has a summariser.
        prompt: the whole question as a text for a language model.
    """

    run: str
    step: int
    number: int
    problem: str
    backend: str
    kernel: str
    scores: dict[str, float]
    feedback: str
    summary: str | None
    prompt: str


class Proposer(ABC):
    """A writer of kernels. Several threads can call it at once."""

    most: int | None = None
    """Maximum number of kernels that it can write, or None for any number."""

    @abstractmethod
    def propose(self, question: Question) -> str:
        """Return an answer, a kernel or a text that contains one, or raise ProposerFailed."""

    def summarize(self, problem: str, digest: str) -> str:  # noqa: ARG002 for models
        """Return advice for proposers, made from ``digest``, a list of failures and improvements."""
        return digest

    def close(self) -> None:  # noqa: B027 most have nothing to abort
        """Abort running requests."""


def make_proposer(plan: Plan) -> Proposer:
    """Return the proposer of a plan."""
    match plan.proposer:
        case "model":
            return Model(plan.given, answer_s=plan.answer_s)
        case "command":
            return Command(plan.given, answer_s=plan.answer_s)
        case "recorded":
            return Recorded(Path(plan.given))


class Recorded(Proposer):
    """The kernels ``*.py`` of a folder, sorted by name. Proposal 1 is the first file, whatever its parent is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = sorted(folder.glob("*.py"))
        if not self._files:
            raise InvalidRequest(f"--recorded: {folder} holds no *.py: name a folder of kernels")
        self.most = len(self._files)

    def propose(self, question: Question) -> str:
        """Return the source of the file with the proposal's number."""
        if question.number > len(self._files):
            # The folder had more files when the step was planned.
            raise ProposerFailed(
                f"--recorded: {self._folder} now holds {len(self._files)} *.py, none for proposal {question.number}. "
                "Restore the removed files"
            )
        file = self._files[question.number - 1]
        try:
            return read_text(file, 1 << 20)
        except InvalidRequest as error:
            raise ProposerFailed(str(error)) from None


class Command(Proposer):
    """A command that reads a :class:`Question` as JSON on stdin and writes an answer to stdout."""

    def __init__(self, words: str, *, answer_s: float) -> None:
        """Parse a command line that is quoted as for a shell. Each answer has a limit of ``answer_s`` seconds."""
        try:
            self._command = shlex.split(words)
        except ValueError as error:
            raise InvalidRequest(f"--proposer: {error}: {words!r}") from None
        if not self._command:
            raise InvalidRequest("--proposer: the command is empty")
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._running = set[subprocess.Popen[str]]()
        self._closed = False

    def propose(self, question: Question) -> str:
        """Run the command once."""
        process = self._start()
        try:
            out, err = process.communicate(json.dumps(asdict(question)), timeout=self._answer_s)
        except subprocess.TimeoutExpired:
            raise ProposerFailed(
                f"{self._command[0]} gave no answer in {self._answer_s:g} s. --answer-s allows more"
            ) from None
        except UnicodeDecodeError as error:
            raise ProposerFailed(f"{self._command[0]} wrote output that is not UTF-8: {error}") from None
        finally:
            _kill(process)
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            message = err.strip()[-_SHOWN_CHARACTERS:] or "it wrote nothing to stderr"
            raise ProposerFailed(f"{self._command[0]} ended with {process.returncode}: {message}")
        if not out.strip():
            raise ProposerFailed(f"{self._command[0]} wrote nothing to stdout, where a kernel is expected")
        return out

    def close(self) -> None:
        """Kill running commands and their descendants."""
        with self._lock:
            self._closed = True
            for process in self._running:
                _kill(process)

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        with self._lock:
            if self._closed:
                raise ProposerFailed("the search is over")
            try:
                # A separate session: Ctrl-C reaches only the search, which then kills the command.
                process = subprocess.Popen(
                    self._command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", start_new_session=True
                )
            except OSError as error:
                raise ProposerFailed(f"{self._command[0]}: {error.strerror or error}") from None
            self._running.add(process)
            return process


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Model(Proposer):
    """A model of LiteLLM, which reads keys and addresses from the environment."""

    def __init__(self, name: str, *, answer_s: float) -> None:
        """Load LiteLLM for a model such as ``openai/gpt-5``. Each answer has a limit of ``answer_s`` seconds."""
        try:
            self._litellm: Any = importlib.import_module("litellm")
            self._fault: type[Exception] = importlib.import_module("openai").OpenAIError
        except ImportError as error:
            raise ConfigError(
                f"--model needs LiteLLM ({error}): pip install 'kqueue[search]', or give --proposer or --recorded"
            ) from None
        self._litellm.suppress_debug_info = True
        self._name = name
        self._answer_s = answer_s

    def propose(self, question: Question) -> str:
        """Send the question's prompt to the model."""
        return self._ask(question.prompt)

    def summarize(self, problem: str, digest: str) -> str:
        """Ask the model for advice that is based on the digest."""
        return self._ask(
            "Many kernels were tried as replacements of this PyTorch reference:\n\n"
            f"```python\n{problem.strip()}\n```\n\nThese were the results:\n\n{digest}\n\n"
            "Write in at most ten short lines what to avoid and what to try next. Answer with these lines only."
        )

    def _ask(self, text: str) -> str:
        try:
            response = self._litellm.completion(
                model=self._name,
                messages=[{"role": "user", "content": text}],
                timeout=self._answer_s,
                max_retries=_RETRIES,
            )
        except self._fault as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ProposerFailed(f"{self._name}: {first[:_SHOWN_CHARACTERS]}") from error
        answer: object = response.choices[0].message.content
        if not isinstance(answer, str) or not answer.strip():
            raise ProposerFailed(f"{self._name} answered nothing")
        return answer


# Prompts -----------------------------------------------------------------------------------------------


def prompt(problem: str, backend: str, kernel: str, feedback: str, summary: str | None) -> str:
    """Return the text that asks for a kernel better than ``kernel``."""
    so_far = f"\nLessons of earlier attempts:\n{summary.strip()}\n" if summary else ""
    return (
        f"{instruction(problem, backend)}\n"
        f"Start from this kernel:\n\n```python\n{kernel.strip()}\n```\n\n"
        f"Its verdict:\n{feedback.strip()}\n{so_far}\n"
        "If it failed, repair it. If it is correct, make it faster. Change the parts that the verdict points to."
    )


def digest(proposals: Sequence[Proposal]) -> str:
    """Return the failures and improvements of a search so far as text, the latest first."""
    ended = {one.number: one for one in proposals if one.ended_at is not None}
    lines: list[str] = []
    failures: dict[str, list[Proposal]] = defaultdict(list)
    for one in reversed(ended.values()):
        if one.category != "passed" and one.scores is not None:
            first_line = short((one.message or "").partition("\n")[0], _MESSAGE_CHARACTERS)
            failures[f"{one.category or 'no kernel'}: {first_line}"].append(one)
    if failures:
        lines.append("Failed:")
    for failure, proposals_failed in list(failures.items())[:_MOST_FAILURES]:
        some, number = ", ".join(str(one.number) for one in proposals_failed[:5]), len(proposals_failed)
        lines.append(f"- {failure} ({f'{number} times: proposals' if number > 1 else 'proposal'} {some})")
    gains = [
        (one, ended[one.parent])
        for one in reversed(ended.values())
        if one.parent in ended and _better(one, ended[one.parent])
    ]
    if gains:
        lines.append("Better than their parents:")
    for one, parent in gains[:_MOST_GAINS]:
        lines.append(f"- proposal {one.number}: {_scores(parent)} -> {_scores(one)}")
    slower = sum(
        one.category == "passed" and one.parent in ended and not _better(one, ended[one.parent])
        for one in ended.values()
    )
    if slower:
        lines.append(f"Correct, but no better than their parents: {slower}.")
    return "\n".join(lines) or "Nothing was tried yet."


def _better(one: Proposal, parent: Proposal) -> bool:
    if one.scores is None or parent.scores is None:
        return False
    before = parent.scores
    return one.scores != before and all(score >= before.get(name, score) for name, score in one.scores.items())


def _scores(one: Proposal) -> str:
    return ", ".join(f"{name} {score:.4g}" for name, score in (one.scores or {}).items())
