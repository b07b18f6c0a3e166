"""Shared parts of `kqueue search` and `kqueue tune`: options, clients, progress, and proposals as text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kqueue.cli.render import make_bar, milliseconds, ratio, text
from kqueue.errors import InvalidRequest
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue.client import Client
    from kqueue.client.remote import RemoteClient
    from kqueue.search.plan import Task
    from kqueue.store.searches import Proposal, Run, Step

Url = Annotated[
    str | None,
    typer.Option(
        help="Judge on another fleet, through its `kqueue serve`, with the token in KQUEUE_TOKEN.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print each verdict's feedback to stderr.")]


def checked(name: str) -> str:
    """Return a run's name.

    Raises:
        InvalidRequest: it is not a valid name.
    """
    from kqueue.store.models import SEARCH_NAME

    if not re.fullmatch(SEARCH_NAME, name):
        raise InvalidRequest(f"--run-name {name!r}: use up to 100 letters, digits and . _ + -, a letter or digit first")
    return name


def named(label: str | None, algorithm: str) -> str:
    """Return a new name for a run of the problem with this label."""
    from uuid import uuid4

    stem = re.sub(r"[^A-Za-z0-9._+-]", "-", label or "").lstrip("._+-")[:60] or "search"
    return f"{stem}-{algorithm}-{uuid4().hex[:6]}"


def client_of(url: str | None) -> Client | RemoteClient:
    """Return a client of the fleet at an address, or of this environment's."""
    if url is None:
        from kqueue.client import Client

        return Client()
    from kqueue.client.remote import RemoteClient

    return RemoteClient(url)


def to_repeat(plan: Task) -> list[str]:
    """Return the options that must be repeated to resume a run.

    Any user who can search can change the record of any run. The run's plan can make this process execute a command,
    import a function, read a folder, or send secrets to a fleet or to a model, whose name can be an address.
    """
    from kqueue.search.plan import Plan

    options: list[str] = []
    if isinstance(plan, Plan):
        options += [{"model": "--model", "command": "--proposer", "recorded": "--recorded"}[plan.proposer], plan.given]
    if plan.url is not None:
        options += ["--url", plan.url]
    for metric in plan.metrics:
        if ":" in metric:
            options += ["--metric", metric]
    return options


def say_how_to_go_on(run: Run, repeated: Sequence[str]) -> None:
    """Print to stderr the command that resumes a run."""
    command = shlex.join(["kqueue", "search", "resume", run.name, *repeated])
    # `say` would collapse white space, which matters within a command's quotes.
    typer.echo(f"kqueue: the search is recorded. Resume it with: {clean(command)}", err=True)


class Progress:
    """A bar on a terminal, and a line for each reported step.

    Args:
        line: formats a proposal in one line.
        steps: number of the last step, or None if it is unknown.
        every: number of steps between two reports.
    """

    def __init__(
        self, run: Run, line: Callable[[Proposal], str], *, steps: int | None, every: int = 1, verbose: bool
    ) -> None:
        self._line = line
        self._steps = steps
        self._every = every
        self._verbose = verbose
        self._bar = make_bar()
        self._task = self._bar.add_task("steps", total=None if steps is None else steps + 1)
        self._say(f"search {run.name} ({run.id})")

    def __enter__(self) -> Progress:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def proposal(self, proposal: Proposal, done: int, planned: int) -> None:
        """Report that a proposal ended."""
        description = f"step {proposal.step}: {done}/{planned} judged"
        if self._steps is None:
            self._bar.update(self._task, description=description, completed=done, total=planned)
        else:
            self._bar.update(self._task, description=description)
        if self._verbose:
            self._say(self._line(proposal))
            for line in (proposal.feedback or "").splitlines():
                self._say(f"  {line}", whole=True)

    def step(self, step: Step, proposals: Mapping[int, Proposal]) -> None:
        """Report that a step ended."""
        if self._steps is not None:
            self._bar.update(self._task, completed=step.number + 1)
        if step.number % self._every == 0 or step.number == self._steps:
            best = "none" if step.best is None else self._line(proposals[step.best])
            of = "" if self._steps is None else f"/{self._steps}"
            self._say(f"step {step.number}{of}: best is {best}{tested(step)}")

    def _say(self, line: str, *, whole: bool = False) -> None:
        self._bar.console.print(clean(line) if whole else text(line), soft_wrap=True)


def line(one: Proposal) -> str:
    """Return a proposal of a search in one line."""
    made = "the start" if one.parent is None else f"step {one.step}, from {one.parent}"
    return f"proposal {one.number} ({made}): {outcome(one)}"


def outcome(one: Proposal) -> str:
    """Return the result of a proposal in one line."""
    state = one.category or ("no answer" if one.error else "no kernel" if one.ended_at else "open")
    times = "" if one.runtime_ms is None else f", {milliseconds(one.runtime_ms)} ms {ratio(one.speedup)}".rstrip()
    why = "" if one.category == "passed" else f": {(one.error or one.message or '').partition(chr(10))[0][:200]}"
    return f"{state}{why}{times}{scored(one.scores)}"


def scored(scores: Mapping[str, float] | None) -> str:
    """Return scores as text, each after a comma."""
    return "".join(f", {name} {score:.4g}" for name, score in (scores or {}).items())


def tested(step: Step) -> str:
    """Return the result of the test of a step's best kernel as text. Empty if there was none."""
    return f", judged once more{scored(step.test['scores'])}" if step.test else ""
