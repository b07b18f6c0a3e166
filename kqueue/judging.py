"""Judging on this machine without a fleet: no Postgres, no Redis, and no torch in this process.

::

    outcome = kqueue.judge(problem=REFERENCE, kernel=SOURCE)
    print(outcome.category, outcome.runtime_ms, outcome.speedup)

    with kqueue.LocalJudge() as judge:
        for outcome in judge.map(requests):
            ...

A child process judges, ``python -m workers.judge``. It isolates kernels and problems, compares and times as a worker of
a fleet does. It needs the extra ``worker``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError

from kqueue.config import Config, load
from kqueue.contract import CPU_BACKENDS, Backend, Outcome, Precision, Request, Settings, parse_request
from kqueue.errors import InvalidRequest, JudgeUnavailable
from kqueue.evidence import Environment

#: Seconds that the child may take to end what it runs and to remove its files.
_STOP_S: Final = 20.0
#: How much of the child's own messages an error shows.
_WORDS_BYTES: Final = 2000

#: Signs of a backend in a source. One that compiles CUDA usually has the signs of ``cpp`` too.
_SIGNS: Final = {
    Backend.TRITON: re.compile(r"^\s*(?:import|from)\s+triton\b", re.MULTILINE),
    Backend.CUPY: re.compile(r"^\s*(?:import|from)\s+cupy\b", re.MULTILINE),
    Backend.CUDA: re.compile(r"\bcuda_sources\b|\.cu['\"]"),
    Backend.CPP: re.compile(r"\bcpp_sources\b|\.cpp['\"]"),
}


class Start(BaseModel):
    """What the child process is told first.

    Attributes:
        parent: the process that it ends with.
        device: a GPU's UUID or index, or ``cpu``; None for the first GPU, or the CPU where there is none.
        gpus, scratch, candidate_uid, isolation, gpu_shared, build_store_bytes: settings, as in
            :class:`~kqueue.config.Config`.
        build_store: the setting ``build_store``, or its default.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parent: int
    device: str | None
    gpus: str
    scratch: str
    candidate_uid: int
    isolation: Literal["none", "basic", "strong", "full"]
    gpu_shared: Literal["wait", "refuse", "label"]
    build_store: str
    build_store_bytes: int


class Machine(BaseModel):
    """What a local judge judges on."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: str
    """A GPU's UUID, or ``cpu``."""
    isolation: str
    """How far candidates are isolated: ``none``, ``basic``, ``strong`` or ``full``."""
    environment: Environment
    """What times depend on: the device's name, driver, CUDA, torch, Triton, host."""


def guess_backend(source: str) -> Backend:
    """Return the backend that a kernel's source is written for.

    A source that imports Triton or CuPy, or that compiles CUDA or C++, shows it. Any other source is ``torch``.

    Raises:
        InvalidRequest: the source shows more than one.
    """
    shown = [backend for backend, sign in _SIGNS.items() if sign.search(source)]
    if Backend.CUDA in shown and Backend.CPP in shown:
        shown.remove(Backend.CPP)
    if len(shown) > 1:
        raise InvalidRequest(f"backend: the source could be {' or '.join(shown)}; say which it is")
    return shown[0] if shown else Backend.TORCH


class LocalJudge:
    """Judges kernels one after the other on one device of this machine. Threads may share it.

    The child process starts when the ``with`` block is entered, or with the first call, and ends with :meth:`close`. If
    it ends earlier, as after an interrupted call, the next call starts another.

    Attributes:
        doubts: reasons to doubt the GPU that came up. Numbers taken since may be wrong.
    """

    def __init__(self, device: str | None = None, *, config: Config | None = None) -> None:
        """Configure a judge without starting anything.

        Args:
            device: a GPU's UUID or index, or ``cpu``; by default the first GPU, or the CPU where there is none.
            config: the settings ``gpus``, ``scratch``, ``candidate_uid``, ``isolation``, ``gpu_shared`` and
                ``build_store*``; by default the environment's.
        """
        self._device = device
        self._config = config
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.doubts: list[str] = []

    def __enter__(self) -> Self:
        """Start the child process.

        Raises:
            JudgeUnavailable: this machine cannot judge, or has no such device.
        """
        with self._lock:
            self._started()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process, with whatever it runs, and wait for that. A later call starts another."""
        with self._lock:
            self._stop()

    @property
    def machine(self) -> Machine:
        """The device and software that kernels are judged on.

        Raises:
            JudgeUnavailable: this machine cannot judge.
        """
        with self._lock:
            return self._started().machine

    def __call__(
        self,
        request: Request | None = None,
        *,
        problem: str | None = None,
        kernel: str | None = None,
        backend: Backend | str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Judge one kernel, given as a :class:`Request` or by its fields.

        Args:
            request: the whole request. Its lane, batch, idempotency key and queue wait mean nothing here.
            problem: source of the reference.
            kernel: source of the candidate.
            backend: ``cuda``, ``triton``, ``torch``, ``cpp`` or ``cupy``; by default what the source shows.
            settings: how it is judged.

        Raises:
            InvalidRequest: a field is wrong, or the problem is given by its hash.
            JudgeUnavailable: this machine cannot judge, or the kernel needs a GPU and this machine has none.
        """
        if request is None:
            request = request_of(problem=problem, kernel=kernel, backend=backend, settings=settings)
        elif not (problem is kernel is backend is settings is None):
            raise InvalidRequest("request: give a Request or its fields, not both")
        if request.names_problem:
            raise InvalidRequest("problem: only a fleet has stored problems; give the source")
        with self._lock:
            child = self._started()
            if child.machine.device == "cpu" and request.backend not in CPU_BACKENDS:
                raise JudgeUnavailable(f"a {request.backend} kernel needs a GPU, and this judge uses the CPU")
            try:
                answer = child.ask(request)
            except BaseException:
                # Ctrl-C too: the answer would be taken for the next request's.
                self._stop()
                raise
        self.doubts += answer["doubts"]
        return Outcome.model_validate(answer["outcome"])

    def map(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Judge each request and yield the outcomes in the same order, each as soon as it is known.

        Raises:
            InvalidRequest, JudgeUnavailable: as a call does.
        """
        for request in requests:
            yield self(request)

    def _started(self) -> _Child:
        if self._child is not None and self._child.owner != os.getpid():
            self._child = None  # a fork inherits the pipes of its parent's child
        if self._child is not None and self._child.ended():
            self._stop()
        if self._child is None:
            config = self._config or load()
            self._child = _Child(
                Start(
                    parent=os.getpid(),
                    device=self._device,
                    gpus=config.gpus,
                    scratch=str(config.scratch.absolute()),
                    candidate_uid=config.candidate_uid,
                    isolation=config.isolation,
                    gpu_shared=config.gpu_shared,
                    build_store=config.build_location,
                    build_store_bytes=config.build_store_bytes,
                )
            )
        return self._child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.owner == os.getpid():
            child.stop()


def judge(
    *,
    problem: str,
    kernel: str,
    backend: Backend | str | None = None,
    precision: Precision | str | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Outcome:
    """Judge one kernel on this machine, without a fleet. It takes seconds: :class:`LocalJudge` is for many kernels.

    Args:
        problem: source of the reference: ``Model``, ``get_inputs()`` and ``get_init_inputs()``.
        kernel: source of the candidate: ``ModelNew``.
        backend: ``cuda``, ``triton``, ``torch``, ``cpp`` or ``cupy``; by default what the source shows.
        precision: ``fp32``, ``fp16`` or ``bf16``; overrides the settings'.
        settings: how the kernel is judged.
        device: a GPU's UUID or index, or ``cpu``; by default the first GPU, or the CPU where there is none.

    Returns:
        the outcome. A kernel's or problem's failure is an outcome too.

    Raises:
        InvalidRequest: an argument is wrong.
        JudgeUnavailable: this machine cannot judge, or not this kernel.
    """
    request = request_of(problem=problem, kernel=kernel, backend=backend, precision=precision, settings=settings)
    with LocalJudge(device) as local:
        return local(request)


def request_of(
    *,
    problem: str | None,
    kernel: str | None,
    backend: Backend | str | None = None,
    precision: Precision | str | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
) -> Request:
    """Return a checked request with the arguments of :func:`judge`.

    Raises:
        InvalidRequest: an argument is missing or wrong; the message names it.
    """
    given = settings.model_dump(exclude_unset=True) if isinstance(settings, Settings) else dict(settings or {})
    if precision is not None:
        given["precision"] = precision
    if backend is None and isinstance(kernel, str):
        backend = guess_backend(kernel)
    fields = {"problem": problem, "kernel": kernel, "backend": backend, "settings": given}
    return parse_request({name: value for name, value in fields.items() if value is not None})


class _Child:
    """The process that judges, and the pipes to it.

    Attributes:
        owner: the process that started it.
        machine: what it judges on.
    """

    def __init__(self, start: Start) -> None:
        """Start the process and wait until it can judge.

        Raises:
            JudgeUnavailable: it cannot; the message says why.
        """
        self.owner = os.getpid()
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by stop()
        # A session of its own: Ctrl-C is for this process, which then ends that one.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env={name: value for name, value in os.environ.items() if not name.startswith("KQUEUE_")},
            start_new_session=True,
        )
        try:
            self._send(start)
            self.machine = Machine.model_validate(self._receive()["ready"])
        except BaseException:
            self.stop()
            raise

    def ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def ask(self, request: Request) -> dict[str, Any]:
        """Have a request judged, and return the answer.

        Raises:
            JudgeUnavailable: the process ended; the message says why.
        """
        self._send(request)
        return self._receive()

    def stop(self) -> None:
        """End the process and all that it started."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):  # all that it started dies with it
                self._process.wait(_STOP_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._words.close()

    def _send(self, message: BaseModel) -> None:
        assert self._process.stdin
        try:
            line = message.model_dump_json().encode() + b"\n"
        except PydanticSerializationError as error:
            # Whatever these models hold can be written: it was Ctrl-C, which pydantic wraps.
            raise KeyboardInterrupt from error
        with contextlib.suppress(BrokenPipeError):  # its last words say why
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise JudgeUnavailable(f"the local judge ended unexpectedly: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise JudgeUnavailable(answer["error"])
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._words.seek(max(0, os.fstat(self._words.fileno()).st_size - _WORDS_BYTES))
        words = self._words.read().decode(errors="replace").strip()
        return words or f"exit status {self._process.returncode}"
