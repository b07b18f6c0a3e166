"""Judging on this machine without a fleet. It needs no Postgres, no Redis, and no torch in this process.

::

    outcome = kqueue.judge(problem=REFERENCE, kernel=SOURCE)
    print(outcome.category, outcome.runtime_ms, outcome.speedup)

    with kqueue.LocalJudge() as judge:
        for outcome in judge.map(requests):
            ...

A child process, ``python -m workers.judge``, judges. It isolates, compares and times kernels exactly like a worker of
a fleet. It needs the extra ``worker``.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticSerializationError

from kqueue import backends, program
from kqueue.backends import Backend
from kqueue.config import Config, load
from kqueue.contract import Outcome, Precision, Request, Settings, parse_request
from kqueue.errors import InvalidRequest, JudgeUnavailable
from kqueue.evidence import Environment
from kqueue.folders import clean_environment

#: Seconds that the child is given to end its processes and to remove its files.
_STOP_S: Final = 20.0
#: Maximum number of bytes of the child's own messages that an error shows.
_MESSAGE_BYTES: Final = 2000


class Start(BaseModel):
    """The first message to the child process.

    Attributes:
        parent: id of the process that the child exits with.
        device: a GPU's UUID or index, or ``cpu``. None stands for the first GPU, or the CPU where there is none.
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
    """The machine that a local judge uses."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: str
    """A GPU's UUID, or ``cpu``."""
    isolation: str
    """The isolation of candidates: ``none``, ``basic``, ``strong`` or ``full``."""
    environment: Environment
    """The factors that times depend on: the device's name, driver, CUDA, torch, Triton, host."""


def guess_backend(source: str) -> str:
    """Return the backend that a kernel's source is written for.

    A source that imports a backend's modules, or compiles CUDA or C++, has that backend. Any other source has
    ``torch``. Raise InvalidRequest if the source matches more than one.
    """
    imported, words = set[str](), set[str]()
    for name, is_module in _signs(source):
        (imported if is_module else words).add(name)
    shown = [backend for backend in backends.registered().values() if _is_shown(backend, imported, words)]
    included = {name for backend in shown for name in backend.includes}
    names = [backend.name for backend in shown if backend.name not in included]
    if len(names) > 1:
        raise InvalidRequest(f"backend: the source could be {' or '.join(names)}: name one of them")
    return names[0] if names else "torch"


def _is_shown(backend: Backend, imported: Iterable[str], words: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for name in imported for module in backend.modules) or (
        backend.words != "" and any(re.fullmatch(backend.words, word) for word in words)
    )


def _signs(source: str) -> Iterator[tuple[str, bool]]:
    """Yield a source's imported names, and its argument names and strings without docstrings. True marks the former."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # The judge reports it.
    unused = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, True) for alias in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from ((f"{module}.{alias.name}", True) for alias in names)
            case ast.keyword(arg=str(word)) | ast.Name(id=word) | ast.Constant(value=str(word)):
                if id(node) not in unused:
                    yield word, False
            case _:
                pass


class LocalJudge:
    """A judge for one device of this machine. It judges one kernel at a time, and threads can share it.

    The child process starts when the ``with`` block is entered, or with the first call, and ends with :meth:`close`. If
    it ends earlier, for example after an interrupted call, the next call starts another one.

    Attributes:
        doubts: reasons to suspect the GPU. Results since the first one can be wrong.
    """

    def __init__(self, device: str | None = None, *, config: Config | None = None) -> None:
        """Configure a judge without starting a process.

        Args:
            device: a GPU's UUID or index, or ``cpu``. The default is the first GPU, or the CPU where there is none.
            config: the settings ``gpus``, ``scratch``, ``candidate_uid``, ``isolation``, ``gpu_shared``,
                ``preload`` and ``build_store*``. The default is the environment's.
        """
        self._device = device
        self._config = config
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self.doubts: list[str] = []

    def __enter__(self) -> Self:
        """Start the child process. Raise JudgeUnavailable if this machine cannot judge, or has no such device."""
        with self._lock:
            self._started()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process and everything that it runs. A later call starts another one."""
        with self._lock:
            self._stop()

    @property
    def machine(self) -> Machine:
        """The device and software that judge kernels. Raise JudgeUnavailable if this machine cannot judge."""
        with self._lock:
            return self._started().machine

    def __call__(
        self,
        request: Request | None = None,
        *,
        problem: str | None = None,
        kernel: str | None = None,
        backend: str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Judge one kernel, given as a :class:`Request` or by its fields.

        Args:
            request: the whole request. Its lane, batch, idempotency key and queue wait are ignored.
            problem: source of the reference.
            kernel: source of the candidate.
            backend: name of a backend, such as ``triton``. By default it is guessed from the source.
            settings: settings of the evaluation.

        Raises:
            InvalidRequest: a field is wrong, or the problem is given by its hash.
            JudgeUnavailable: this machine cannot judge, or the kernel needs a GPU and this machine has none.
        """
        if request is None:
            request = request_of(problem=problem, kernel=kernel, backend=backend, settings=settings)
        elif not (problem is kernel is backend is settings is None):
            raise InvalidRequest("request: give a Request or its fields, not both")
        if request.names_problem:
            raise InvalidRequest("problem: only a fleet has stored problems: give the source")
        if request.tree_names - request.tree_texts.keys():
            raise InvalidRequest("trees: only a fleet has stored trees: give the text of each that a source names")
        self.check(request)
        with self._lock:
            child = self._started()
            self.check(request)
            try:
                answer = child.ask(request)
            except BaseException:
                # Ctrl-C too: the pending answer would be read as the next request's.
                self._stop()
                raise
        self.doubts += answer["doubts"]
        return Outcome.model_validate(answer["outcome"])

    def check(self, request: Request) -> None:
        """Raise JudgeUnavailable if a kernel needs a GPU and the device, as far as it is known by now, is none."""
        device = self._device if self._child is None else self._child.machine.device
        if device == "cpu" and not backends.find(request.backend).cpu:
            raise JudgeUnavailable(f"a {request.backend} kernel needs a GPU, and this judge uses the CPU")

    def map(self, requests: Iterable[Request]) -> Iterator[Outcome]:
        """Judge each request, and yield the outcomes in the same order, each as soon as it is known.

        Raise InvalidRequest if a request is wrong. Raise JudgeUnavailable if this machine cannot judge.
        """
        yield from map(self, requests)

    def _started(self) -> _Child:
        # A fork inherits the pipes of its parent's child.
        if self._child is not None and (self._child.owner != os.getpid() or self._child.ended()):
            self._stop()
        if self._child is None:
            config = self._config or load()
            try:
                config.scratch.mkdir(mode=0o711, parents=True, exist_ok=True)
            except OSError as error:
                raise JudgeUnavailable(f"KQUEUE_SCRATCH: {config.scratch}: {error.strerror}") from None
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
                ),
                config.preload,
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
    backend: str | None = None,
    precision: Precision | str | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Outcome:
    """Judge one kernel on this machine, without a fleet. It takes seconds. For many kernels use :class:`LocalJudge`.

    Args:
        problem: source of the reference: ``Model``, ``get_inputs()`` and ``get_init_inputs()``.
        kernel: source of the candidate: ``ModelNew``.
        backend: name of a backend, such as ``triton``. By default it is guessed from the source.
        precision: ``fp32``, ``fp16`` or ``bf16``, which overrides the settings'.
        settings: settings of the evaluation.
        device: a GPU's UUID or index, or ``cpu``. The default is the first GPU, or the CPU where there is none.

    Returns:
        The outcome. A failure of the kernel or the problem is an outcome too.

    Raises:
        InvalidRequest: an argument is wrong.
        JudgeUnavailable: this machine cannot judge, or cannot judge this kernel.
    """
    request = request_of(problem=problem, kernel=kernel, backend=backend, precision=precision, settings=settings)
    with LocalJudge(device) as local:
        return local(request)


def request_of(
    *,
    problem: str | None,
    kernel: str | None,
    backend: str | None = None,
    precision: Precision | str | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
) -> Request:
    """Return a validated request with the arguments of :func:`judge`. An InvalidRequest names the wrong argument."""
    given = settings.model_dump(exclude_unset=True) if isinstance(settings, Settings) else dict(settings or {})
    if precision is not None:
        given["precision"] = precision
    if backend is None and isinstance(kernel, str):
        backend = guess_backend(kernel)
    fields = {"problem": problem, "kernel": kernel, "backend": backend, "settings": given}
    return parse_request({name: value for name, value in fields.items() if value is not None})


class _Child:
    """The process that judges, and the pipes to it. ``owner`` is the id of the process that started it."""

    def __init__(self, start: Start, preload: str) -> None:
        """Start the process, with modules to import first, and wait until it can judge."""
        self.owner = os.getpid()
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by stop()
        # A separate session: Ctrl-C reaches only this process, which then ends the child.
        self._process = subprocess.Popen(
            [*program.PYTHON, "workers.judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env=clean_environment(os.environ | {"KQUEUE_PRELOAD": preload}),
            start_new_session=True,
        )
        try:
            self._send(start)
            self.machine = Machine.model_validate(self._receive()["ready"])
        except BaseException:
            self.stop()
            raise

    def ended(self) -> bool:
        """Return True if the process has ended."""
        return self._process.poll() is not None

    def ask(self, request: Request) -> dict[str, Any]:
        """Send a request, and return the answer."""
        self._send(request)
        return self._receive()

    def stop(self) -> None:
        """End the process and everything that it started."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):  # everything that it started is killed with it
                self._process.wait(_STOP_S)
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._messages.close()

    def _send(self, message: BaseModel) -> None:
        assert self._process.stdin
        try:
            line = message.model_dump_json().encode() + b"\n"
        except PydanticSerializationError as error:
            # These models can always be serialized, so the cause was Ctrl-C, which pydantic wraps.
            raise KeyboardInterrupt from error
        with contextlib.suppress(BrokenPipeError):  # _receive reports the reason
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._messages.seek(max(0, os.fstat(self._messages.fileno()).st_size - _MESSAGE_BYTES))
            last = self._messages.read().decode(errors="replace").strip() or f"exit status {self._process.returncode}"
            raise JudgeUnavailable(f"the local judge ended unexpectedly: {last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise JudgeUnavailable(answer["error"])
        return answer
