"""`kqueue rejudge`: judge a paper's published kernels again, and report which of its claims hold."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from hashlib import sha256
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer

from kqueue.cli import options
from kqueue.cli.render import emit, print_table, progress, ratio, say, span
from kqueue.errors import ConfigError, InvalidRequest, JudgeUnavailable
from kqueue.text import cell, one_line

if TYPE_CHECKING:
    from kqueue.claims import Claim, Claims, Ruled
    from kqueue.contract import Outcome, Request, Result

#: Number of evaluations submitted in one transaction.
_CHUNK: Final = 100
#: Exit status if some kernels have no verdict because the fleet failed, so that the command must be run again.
_INCOMPLETE: Final = 3
#: Speedup above which a kernel counts as faster than its reference.
_FASTER: Final = 1.01
#: Maximum number of characters of a cell in Markdown.
_CELL: Final = 160


def rejudge(
    claims: Annotated[
        Path, typer.Argument(metavar="FILE|FOLDER", help="CUDA-L1's release, a run of KernelBench, or JSON lines.")
    ],
    *,
    profile: Annotated[
        str | None, typer.Option(help="Protocol of its authors.", show_default="the one of the format")
    ] = None,
    problems: Annotated[
        Path | None, typer.Option(metavar="DIR", help="KernelBench's problems, for a run of KernelBench.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the verdicts and the report.")] = Path("rejudged"),
    local: Annotated[bool, typer.Option("--local", help="Judge on this machine instead of the fleet.")] = False,
    device: options.Device = None,
    lane: Annotated[str, typer.Option(help="auto, cpu, gpu, or gpu.<model>.")] = "auto",
    backend: options.Backend = None,
    judging: options.Judging,
    as_json: options.Json = False,
) -> None:
    """Judge published kernels again and compare the speedups with the claims. Run it again to resume."""
    from kqueue import claims as published
    from kqueue.profiles import Protocol

    if profile is not None and profile not in list(Protocol):
        raise InvalidRequest(f"--profile {profile}: use one of {', '.join(Protocol)}")
    if device is not None and not local:
        raise InvalidRequest("--device: give --local too. Without it the fleet judges, on a --lane")
    given = published.read(claims, problems)
    own = Protocol(profile) if profile else given.profile
    tree = {**judging.tree(), "profiles": [str(own)]}
    tasks = [_task(claim, backend, lane, tree) for claim in given.claims]
    log = _Log(out / "verdicts.jsonl")
    log.fill(tasks)
    todo = [task for task in tasks if task.request is not None and not task.is_settled]
    if len(todo) < len(tasks):
        say(f"{len(tasks) - len(todo)} of {len(tasks)} have a verdict or a reason already")
    try:
        with progress(len(todo), quiet=as_json) as advance:
            for task in _by_judge(todo, device) if local else _by_fleet(todo, log, out.resolve().name):
                if task.outcome is not None:
                    log.add(task)
                advance(str(task.outcome.category) if task.outcome else "")
    finally:
        # After Ctrl-C, the report has the verdicts so far.
        ruled = [task.ruled() for task in tasks]
        _Report(claims.name, given, str(own), tasks, ruled).write(out)
    emit(ruled, lambda rows: _print(rows, out), as_json=as_json)
    if left := [task.claim.name for task in tasks if not (task.refusal or task.is_settled)]:
        say(f"no verdict on {len(left)} of {len(tasks)}, such as {left[0]}: run the same command again")
        raise typer.Exit(_INCOMPLETE)


@dataclass(slots=True)
class _Task:
    """A claim with its request and its result.

    Attributes:
        request: None if the claim cannot be judged at all, for the reason ``refusal``.
        fruitless: number of earlier evaluations that gave no result.
    """

    claim: Claim
    request: Request | None = None
    refusal: str = ""
    outcome: Result | None = None
    evaluation_id: str = ""
    device: str = ""
    fruitless: int = 0

    @property
    def digest(self) -> str:
        """The hash of the request and of the claim's name."""
        content = "" if self.request is None else self.request.model_dump_json()
        return sha256(f"{self.claim.name}\0{content}".encode()).hexdigest()

    @property
    def is_settled(self) -> bool:
        """True if judging again would give the same result: the outcome is the kernel's or the problem's."""
        from kqueue.categories import Blame

        return self.outcome is not None and self.outcome.blame not in {Blame.FLEET, Blame.NOBODY}

    def ruled(self) -> Ruled:
        """Return the claim with its ruling."""
        from kqueue.claims import Ruled, Ruling, rule

        if self.outcome is None:
            return Ruled(self.claim.name, Ruling.UNJUDGED, self.claim.speedup, why=self.refusal or "no verdict")
        return rule(self.claim, self.outcome, evaluation_id=self.evaluation_id)


def _task(claim: Claim, backend: str | None, lane: str, tree: Mapping[str, Any]) -> _Task:
    from kqueue.contract import parse_request
    from kqueue.judging import guess_backend

    try:
        known = claim.backend or backend or guess_backend(claim.kernel)
        named = {"problem": claim.problem, "kernel": claim.kernel, "problem_label": claim.name}
        return _Task(claim, parse_request({**named, "backend": known, "lane": lane, "settings": tree}))
    except InvalidRequest as error:
        return _Task(claim, refusal=str(error))


def _by_judge(todo: Sequence[_Task], device: str | None) -> Iterator[_Task]:
    """Judge on this machine. Yield each task with its outcome, or with the reason why there is none."""
    from kqueue.judging import LocalJudge

    with ExitStack() as stack:
        judge = LocalJudge(device)
        if todo:
            stack.enter_context(judge)
        for task in todo:
            assert task.request is not None
            task.device = judge.machine.environment.device
            try:
                task.outcome = judge(task.request)
            except JudgeUnavailable as error:
                task.refusal = str(error)
            yield task


def _by_fleet(todo: Sequence[_Task], log: _Log, batch: str) -> Iterator[_Task]:
    """Judge on the fleet. Yield each task as its verdict arrives, or with the reason why there is none."""
    from kqueue.client import Client

    waiting: dict[Any, _Task] = {}
    tickets: list[Any] = []
    refused: list[InvalidRequest] = []
    with Client() as client:
        for start in range(0, len(todo), _CHUNK):
            chunk = todo[start : start + _CHUNK]
            requests = [
                task.request.model_copy(update={"idempotency_key": log.key(task), "batch": batch})
                for task in chunk
                if task.request is not None
            ]
            for task, result in zip(chunk, client.submit_each(requests), strict=True):
                if isinstance(result, InvalidRequest):
                    task.refusal = str(result)
                    refused.append(result)
                    yield task
                else:
                    waiting[result.evaluation_id] = task
                    tickets.append(result)
        if refused and not tickets and not log:
            raise refused[0]
        try:
            for ticket, verdict in client.as_completed(tickets):
                task = waiting[ticket.evaluation_id]
                task.outcome, task.evaluation_id = verdict, str(ticket.evaluation_id)
                task.device = verdict.environment.device if verdict.environment else ""
                yield task
        except KeyboardInterrupt:
            say("the evaluations continue. Run the same command again to collect them")
            raise


class _Log:
    """The verdicts so far: a file of JSON lines, to which each verdict is appended when it arrives."""

    def __init__(self, file: Path) -> None:
        """Read the file if it exists, without a last line that an interrupted write left incomplete."""
        from kqueue.contract import Outcome

        self._file = file
        self._fields = set(Outcome.model_fields) - {"log"}
        self._records: dict[str, list[tuple[dict[str, Any], Outcome | None]]] = {}
        self._run = uuid4().hex
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            data = file.read_bytes() if file.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            records = [json.loads(line) for line in whole.splitlines()]
            if records:
                self._run = str(records[0]["run"])
                for record in records[1:]:
                    entry = (record, self._read(record["outcome"]))
                    self._records.setdefault(record["digest"], []).append(entry)
            if len(whole) < len(data):
                with file.open("r+b") as opened:
                    opened.truncate(len(whole))
            if not records:
                self._append({"run": self._run})
        except OSError as error:
            raise InvalidRequest(f"{file}: cannot be used: {error.strerror or error}: use another --out") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{file}: not verdicts of `kqueue rejudge`: {error!r}: use another --out") from None

    def __bool__(self) -> bool:
        """Return True if there is an outcome from an earlier run."""
        return bool(self._records)

    def fill(self, tasks: Iterable[_Task]) -> None:
        """Give tasks their recorded outcomes."""
        for task in tasks:
            for record, outcome in self._records.get(task.digest, []):
                task.outcome, task.evaluation_id, task.device = outcome, record["evaluation_id"], record["device"]
                task.fruitless += not task.is_settled

    def key(self, task: _Task) -> str:
        """Return the idempotency key of a task's next evaluation. An interrupted command finds the same one again."""
        return f"rejudge/{self._run}/{task.digest}/{task.fruitless}"

    def add(self, task: _Task) -> None:
        """Append a task's outcome."""
        assert task.outcome is not None
        outcome = task.outcome.model_dump(mode="json", include=self._fields)
        names = {"name": task.claim.name, "evaluation_id": task.evaluation_id, "device": task.device}
        self._append({"digest": task.digest, **names, "outcome": outcome})

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    @staticmethod
    def _read(fields: Mapping[str, Any]) -> Outcome | None:
        """Return a recorded outcome, or None if another version of kqueue wrote it."""
        from pydantic import ValidationError

        from kqueue.contract import Outcome

        try:
            return Outcome.model_validate(fields)
        except ValidationError:
            return None


@dataclass(frozen=True, slots=True)
class _Report:
    """The files about a set's claims."""

    name: str
    given: Claims
    profile: str
    tasks: Sequence[_Task]
    ruled: Sequence[Ruled]

    def write(self, out: Path) -> None:
        """Write the table, the picture and the report."""
        from kqueue.claims import Ruled

        columns = [field.name for field in fields(Ruled)]
        with (out / "claims.csv").open("w", newline="", encoding="utf-8", errors="replace") as file:
            rows = csv.writer(file)
            rows.writerow(columns)
            rows.writerows([cell(getattr(one, column)) for column in columns] for one in self.ruled)
        title = f"# {_cell(self.name)}: claims and measurements\n\n"
        (out / "claims.md").write_text(title + _table(self.ruled), encoding="utf-8", errors="replace")
        picture = self._draw(out / "claims.svg")
        (out / "report.md").write_text("\n".join(self._lines(picture)), encoding="utf-8", errors="replace")

    def _draw(self, file: Path) -> bool:
        from kqueue import charts
        from kqueue.claims import Ruling

        groups = [
            charts.Claimed(kind, [(one.claimed, one.speedup) for one in rows if one.claimed is not None])
            for kind in Ruling
            if (rows := [one for one in self.ruled if one.ruling is kind and one.claimed is not None])
        ]
        try:
            file.write_bytes(charts.render(charts.Claims(f"Claimed and measured: {self.name}", groups)))
        except ConfigError as error:
            say(error)
            return False
        return True

    def _lines(self, picture: bool) -> Iterator[str]:
        from kqueue.claims import Ruling

        devices = ", ".join(sorted({_cell(task.device) for task in self.tasks if task.device})) or "no device"
        yield f"# {_cell(self.name)}: published claims, judged again\n"
        yield (
            f"{len(self.ruled)} kernels ({self.given.format}), judged on {devices} by the profile `{self.profile}` and "
            "by the strict comparison. [All claims](claims.md), [as CSV](claims.csv).\n"
        )
        counts = Counter(one.ruling for one in self.ruled)
        yield _markdown(("result", "kernels"), [(kind, str(counts[kind])) for kind in Ruling])
        yield from self._figures()
        if picture:
            yield "![claimed against measured speedup](claims.svg)\n"
        for kind in Ruling:
            rows = [one for one in self.ruled if one.ruling is kind]
            if not rows:
                continue
            yield f"## {kind[0].upper()}{kind[1:]}\n"
            if kind is Ruling.STRICT:
                by_rule = groupby(sorted(rows, key=attrgetter("rule")), key=attrgetter("rule"))
                found = [(rule, [one.name for one in some]) for rule, some in by_rule]
                yield _markdown(("rule", "n", "kernels"), [(r, str(len(n)), ", ".join(n)) for r, n in found])
            yield _table(rows)
        if self.given.skipped:
            yield "## Entries without a claim\n"
            yield _markdown(("entry", "why"), self.given.skipped)

    def _figures(self) -> Iterator[str]:
        timed = [(one.claimed, one.speedup) for one in self.ruled if one.claimed and one.speedup]
        if timed:
            claimed, measured = zip(*timed, strict=True)
            claims, measurements = (sum(one > _FASTER for one in some) for some in (claimed, measured))
            yield (
                f"Of the {len(timed)} timed kernels, the median speedup claimed is {ratio(median(claimed))} and "
                f"measured {ratio(median(measured))}. Above {_FASTER}x are {claims} claims and {measurements} "
                "measurements.\n"
            )


def _table(rows: Iterable[Ruled]) -> str:
    columns = ("kernel", "claimed", "measured", "result", "why")
    return _markdown(
        columns,
        [(one.name, ratio(one.claimed), ratio(one.speedup) + _span(one), one.ruling, _why(one)) for one in rows],
    )


def _why(one: Ruled) -> str:
    return f"{one.rule}: {one.why}" if one.rule else one.why


def _span(one: Ruled) -> str:
    return "" if one.low == one.high else span((one.low, one.high))


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. Cells can have foreign text, which is escaped."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: str) -> str:
    text = one_line(value)
    shown = text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", shown)


def _print(rows: Sequence[Ruled], out: Path) -> None:
    from kqueue.claims import Ruling

    counts = Counter(one.ruling for one in rows)
    print_table(("result", "n"), ((kind, counts[kind]) for kind in Ruling))
    print(one_line(out / "report.md"))
