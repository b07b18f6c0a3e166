"""Who writes kernels: any model of LiteLLM, a command of yours, or a folder of kernels written before."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from kqueue.errors import ConfigError, InvalidRequest, ProposerFailed
from kqueue.search.plan import Plan
from kqueue.search.prompts import summary_request

_RETRIES: Final = 3
_SHOWN_CHARACTERS: Final = 400


@dataclass(frozen=True, slots=True)
class Question:
    """What a proposer is asked: a kernel that is better than another one. A command reads it as JSON.

    Attributes:
        run: the search's name.
        step: the step, from 1.
        number: the proposal's number in the search, from 1.
        problem: source of the reference.
        backend: what the kernel is to be written in.
        kernel: source of the kernel to start from.
        scores: its score for each metric.
        feedback: its verdict in words.
        summary: what failed and what helped so far; None unless the algorithm has a summariser.
        prompt: all of this as a text for a language model.
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


class Proposer(Protocol):
    """Writes kernels. Threads ask at once."""

    @property
    def most(self) -> int | None:
        """The number of kernels that it can write; None for any."""
        ...

    def propose(self, question: Question) -> str:
        """Return an answer: a kernel, or a text with one in it.

        Raises:
            ProposerFailed: there is none.
        """
        ...

    def summarize(self, problem: str, digest: str) -> str:
        """Return what to tell proposers of ``digest``, which says what failed and what helped.

        Raises:
            ProposerFailed: there is nothing.
        """
        ...

    def close(self) -> None:
        """Break off what runs."""
        ...


def make_proposer(plan: Plan) -> Proposer:
    """Return the proposer of a plan.

    Raises:
        ConfigError: LiteLLM is not installed.
        InvalidRequest: there is no such program or folder, or the folder is empty.
    """
    match plan.proposer:
        case "model":
            return Model(plan.given, answer_s=plan.answer_s)
        case "command":
            return Command(plan.given, answer_s=plan.answer_s)
        case "recorded":
            return Recorded(Path(plan.given))


class Recorded:
    """A folder's ``*.py`` in the order of their names: proposal 1 is the first, whatever it is made from."""

    def __init__(self, folder: Path) -> None:
        """Look into the folder.

        Raises:
            InvalidRequest: it is none, or holds no kernel.
        """
        self._folder = folder
        self._files = sorted(folder.glob("*.py"))
        if not self._files:
            raise InvalidRequest(f"--recorded: {folder} holds no *.py; name a folder of kernels")

    @property
    def most(self) -> int:
        """The number of files."""
        return len(self._files)

    def propose(self, question: Question) -> str:
        """Return the file of the proposal's number."""
        if question.number > len(self._files):
            # The step was planned when there were more.
            raise ProposerFailed(
                f"--recorded: {self._folder} now holds {len(self._files)} *.py, none for proposal {question.number}; "
                "put back what was removed"
            )
        file = self._files[question.number - 1]
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ProposerFailed(f"{file}: {error}") from None

    def summarize(self, problem: str, digest: str) -> str:  # noqa: ARG002 nobody to read it
        """Return the digest as it is."""
        return digest

    def close(self) -> None:
        """Do nothing."""


class Command:
    """A command: it reads a :class:`Question` as JSON on stdin and writes an answer to stdout."""

    @property
    def most(self) -> None:
        """Any number."""

    def __init__(self, words: str, *, answer_s: float) -> None:
        """Take the command's words, quoted as for a shell. Each answer may take ``answer_s`` seconds.

        Raises:
            InvalidRequest: there are no words, or a quote has no end.
        """
        try:
            self._words = shlex.split(words)
        except ValueError as error:
            raise InvalidRequest(f"--proposer: {error}: {words!r}") from None
        if not self._words:
            raise InvalidRequest("--proposer: is empty; name a command")
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
                f"{self._words[0]} gave no answer in {self._answer_s:g} s; --answer-s allows more"
            ) from None
        except UnicodeDecodeError as error:
            raise ProposerFailed(f"{self._words[0]} wrote what is not UTF-8: {error}") from None
        finally:
            _kill(process)
            with self._lock:
                self._running.discard(process)
        if process.returncode:
            said = err.strip()[-_SHOWN_CHARACTERS:] or "and said nothing on stderr"
            raise ProposerFailed(f"{self._words[0]} ended with {process.returncode}: {said}")
        if not out.strip():
            raise ProposerFailed(f"{self._words[0]} wrote nothing to stdout; it is to write a kernel")
        return out

    def summarize(self, problem: str, digest: str) -> str:  # noqa: ARG002 the command has the problem anyway
        """Return the digest as it is: the command is told it with the next question."""
        return digest

    def close(self) -> None:
        """Kill what runs, with all that it started."""
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
                # In a session of its own: Ctrl-C is for the search, which ends the command.
                process = subprocess.Popen(
                    self._words, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", start_new_session=True
                )
            except OSError as error:
                raise ProposerFailed(f"{self._words[0]}: {error.strerror or error}") from None
            self._running.add(process)
            return process


def _kill(process: subprocess.Popen[str]) -> None:
    """End a command and all that it left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Model:
    """A model of LiteLLM, which takes keys and addresses from the environment."""

    @property
    def most(self) -> None:
        """Any number."""

    def __init__(self, name: str, *, answer_s: float) -> None:
        """Take the model's name as LiteLLM has it, such as ``openai/gpt-5``. Each answer may take ``answer_s`` seconds.

        Raises:
            ConfigError: LiteLLM is not installed.
        """
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
        """Ask the model the question's prompt."""
        return self._ask(question.prompt)

    def summarize(self, problem: str, digest: str) -> str:
        """Ask the model to make advice of the digest."""
        return self._ask(summary_request(problem, digest))

    def close(self) -> None:
        """Do nothing: an answer that comes later is dropped."""

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
