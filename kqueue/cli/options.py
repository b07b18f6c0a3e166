"""Options that several commands share, and the groups of them that a command takes as one parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kqueue.cli import sources
from kqueue.cli.connection import detail_of
from kqueue.errors import EvaluationFailed, InvalidRequest, KqueueError

if TYPE_CHECKING:
    from kqueue.contract import Request, Verdict

Json = Annotated[bool, typer.Option("--json", help="Print JSON, one record on each line.")]
Timeout = Annotated[float | None, typer.Option(metavar="S", min=0, help="Maximum seconds to wait for verdicts.")]
Evaluation = Annotated[str, typer.Argument(metavar="ID", help="An evaluation's id, or its first digits.")]
Evaluations = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids, or their first digits.")]
Backend = Annotated[
    str | None, typer.Option("--backend", "-b", help="Backend of the kernel, such as triton.", show_default=False)
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help="A GPU's index or UUID, or cpu.", show_default="first GPU, else cpu"
    ),
]
Fleet = Annotated[bool, typer.Option("--fleet", help="Judge on the fleet instead of this machine.")]
Url = Annotated[
    str | None,
    typer.Option(
        help="Judge on another fleet, through its `kqueue serve`, with the token in KQUEUE_TOKEN.", show_default=False
    ),
]
Precision = Annotated[str | None, typer.Option("--precision", help="fp32, fp16 or bf16.")]
Checks = Annotated[int | None, typer.Option("--checks", help="Number of input sets to compare.")]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree",
        metavar="DIR[@REV][:ROOT]",
        help="A folder, or a revision of it, that the kernels can import, beginning in its folder ROOT.",
    ),
]
NoTiming = Annotated[bool, typer.Option("--no-timing", help="Do not time the kernels.")]
Calls = Annotated[int | None, typer.Option("--calls", help="Maximum number of timed calls.")]
Owner = Annotated[str, typer.Option(help="The owner of its submissions, whose work alone it sees.")]
SettingsTree = Annotated[str | None, typer.Option("--settings", metavar="FILE|JSON", help="Settings as a JSON object.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="One setting, such as deadlines.check_s=5. Repeatable."),
]

Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="PATH=NUMBER",
        help="Upper limit of a number in its requests, such as deadlines.check_s=30, limits.host_memory_bytes=4GiB or, "
        "for tokens, source_bytes=100000 and running=2 (attempts at once). Repeatable.",
    ),
]


def limits_of(given: Iterable[str] | None) -> dict[str, float]:
    """Return the values of ``--limit`` by path, or raise InvalidRequest."""
    from kqueue import upper_limits

    pairs = [limit.partition("=") for limit in given or ()]
    try:
        return upper_limits.parse({path: number for path, _, number in pairs})
    except InvalidRequest as error:
        raise InvalidRequest(f"--limit {error}") from None


def check_owner(name: str, option: str = "--owner", instead: str = "") -> None:
    """Raise InvalidRequest if an owner cannot have this name. ``instead`` is more advice."""
    from kqueue.store.models import OWNER_NAME

    if not re.fullmatch(OWNER_NAME, name):
        allowed = "use 1 to 63 of a-z, 0-9 and ._- that begin with a letter or digit"
        raise InvalidRequest(f"{option}: {name!r}: {allowed}{instead}")


def on_fleet(*, fleet: bool, url: str | None, device: str | None, lane: str | None) -> bool:
    """Return whether a fleet judges. Raise InvalidRequest if another option does not fit."""
    judges = fleet or url is not None
    if lane is not None and not judges:
        raise InvalidRequest("--lane: only a fleet has lanes: give --fleet too")
    if device is not None and judges:
        raise InvalidRequest("--device: a fleet's devices are chosen with --lane")
    return judges


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command in which each parameter that is a dataclass is replaced by the options that are its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = groups.get(parameter.name)
        annotations = hints if kind is None else get_type_hints(kind, include_extras=True)
        parameters += (
            one.replace(annotation=annotations[one.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for one in ([parameter] if kind is None else inspect.signature(kind).parameters.values())
        )

    def run(**given: Any) -> Any:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    return run


@dataclass(frozen=True)
class Timed:
    """The options on how kernels are judged and timed."""

    precision: Precision = None
    checks: Checks = None
    calls: Calls = None
    settings: SettingsTree = None
    assignments: Assignments = None

    def tree(self) -> dict[str, Any]:
        """Return the settings of ``--settings``, overridden by ``--set``, overridden by the short options."""
        given = {"precision": self.precision, "checks": self.checks}
        short: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.calls is not None:
            short["timing"] = {"calls": self.calls}
        return sources.merged(sources.read_settings(self.settings, self.assignments or ()), short)


@dataclass(frozen=True)
class Judging(Timed):
    """The options on how kernels are judged."""

    no_timing: NoTiming = False

    def tree(self) -> dict[str, Any]:
        """Return the settings, without times for ``--no-timing``."""
        return sources.merged(super().tree(), {"timing": {"purpose": "check"}} if self.no_timing else {})


@dataclass(frozen=True, slots=True)
class Subject:
    """A kernel to examine, its verdict unless it is a file, and a local judge's device or None for the fleet."""

    request: Request
    verdict: Verdict | None = None
    device: str | None = None


@dataclass(frozen=True)
class Examined:
    """The options that name a kernel to examine: an evaluation's, or a file's with its problem."""

    what: Annotated[
        str,
        typer.Argument(
            metavar="ID|KERNEL", help="An evaluation's id, or its first digits. With --problem, a kernel's file."
        ),
    ]
    problem: Annotated[
        str | None, typer.Option("--problem", "-p", metavar="FILE", help="The reference of a kernel in a file.")
    ] = None
    backend: Backend = None
    lane: Annotated[str | None, typer.Option("--lane", help="With --problem: auto, cpu, gpu, or gpu.<model>.")] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="With --problem: judge without a fleet, on a GPU's index or UUID, or cpu.",
        ),
    ] = None
    precision: Precision = None
    settings: SettingsTree = None
    assignments: Assignments = None

    def find(self, command: str, what: str | None = None) -> Subject:
        """Return the named kernel, or ``what`` of its problem.

        Its evaluations are in the batch of the command's name and the examined evaluation's id.
        """
        what = what or self.what
        if self.problem is None:
            for name in ("backend", "lane", "device", "precision", "settings", "assignments"):
                if getattr(self, name):
                    option = "set" if name == "assignments" else name
                    raise InvalidRequest(f"--{option}: an evaluation's options are fixed: give --problem too")
            detail = detail_of(command, what)
            if detail.verdict is None:
                raise KqueueError(
                    f"{detail.evaluation_id} has no verdict yet: `kqueue wait {detail.evaluation_id}` waits for it"
                )
            if detail.verdict.blame not in {"none", "candidate"}:
                raise EvaluationFailed(detail.verdict)
            request = detail.request(batch=f"{command}-{detail.evaluation_id}", priority="interactive")
            return Subject(request, detail.verdict)
        tree = Timed(self.precision, settings=self.settings, assignments=self.assignments).tree()
        if self.device is not None and self.lane is not None:
            raise InvalidRequest("--lane and --device: give one of them. --device judges without a fleet")
        fields = sources.read_problem(self.problem)
        if "problem_label" not in fields:
            raise InvalidRequest(f"--problem {self.problem}: give a file")
        lane = {} if self.lane is None else {"lane": self.lane}
        return Subject(of_file(Path(what), self.backend, {**fields, "settings": tree, **lane}), device=self.device)


def of_file(kernel: Path, backend: str | None, fields: Mapping[str, Any]) -> Request:
    """Return the request for a kernel's file with the other ``fields``. By default its priority is ``interactive``."""
    from kqueue.contract import parse_request
    from kqueue.judging import guess_backend

    own = {"kernel": sources.read_source(kernel), "kernel_label": kernel.stem}
    given = sources.adapted({"priority": "interactive", **fields, **own})
    return parse_request(given | {"backend": backend or guess_backend(given["kernel"])})
