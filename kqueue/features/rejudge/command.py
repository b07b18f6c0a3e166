"""`kqueue rejudge`: judge a paper's published kernels again, and report which of its claims hold."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import typer

from kqueue.cli import options
from kqueue.cli.render import emit, print_table, progress, say
from kqueue.cli.sources import merged
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.features.kernelbench import resuming
from kqueue.figures import ratio, speedup
from kqueue.text import cell, one_line

if TYPE_CHECKING:
    from kqueue.contract import Request, Verdict
    from kqueue.features.rejudge.claims import Claim, Ruled
    from kqueue.formats import Refused

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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the report.")] = Path("rejudged"),
    lane: Annotated[str, typer.Option(help="auto, cpu, gpu, or gpu.<model>.")] = "auto",
    backend: options.Backend = None,
    judging: options.Judging,
    as_json: options.Json = False,
) -> None:
    """Judge published kernels again and compare the speedups with the claims. Run it again to resume."""
    from kqueue.client import connect
    from kqueue.features.rejudge import claims as published
    from kqueue.profiles import Protocol

    if profile is not None and profile not in list(Protocol):
        raise InvalidRequest(f"--profile {profile}: use one of {', '.join(Protocol)}")
    given = published.read(claims, problems)
    own = str(profile or given.profile)
    settings = merged({"timing": {"purpose": "publish"}}, judging.tree())
    common = {"lane": lane, "batch": out.resolve().name or None, "settings": {**settings, "profiles": [own]}}
    results: dict[str, Verdict | InvalidRequest] = {}
    todo: dict[str, Request] = {}
    for claim in given.claims:
        try:
            todo[claim.name] = _request(claim, backend, common)
        except InvalidRequest as error:
            results[claim.name] = error
    token = _token(out)
    try:
        with connect() as client, progress(len(todo), quiet=as_json) as advance:
            for name, result in resuming.judge(client, token, todo):
                results[name] = result
                advance("" if isinstance(result, InvalidRequest) else str(result.category))
    finally:
        # After Ctrl-C, the report has the verdicts so far.
        rows = [published.rule(claim, results.get(claim.name)) for claim in given.claims]
        _write(out, claims.name, own, rows, given.skipped)
    emit(rows, lambda rows: print_table(("result", "n"), _counts(rows)), as_json=as_json)
    if not as_json:
        print(one_line(out / "report.md"))
    if left := [row for row in rows if row.is_open]:
        say(f"no verdict on {len(left)} of {len(rows)}: run the same command again. {left[0].name}: {left[0].why}")
        raise typer.Exit(resuming.INCOMPLETE)


def _request(claim: Claim, backend: str | None, common: Mapping[str, Any]) -> Request:
    from kqueue.contract import parse_request
    from kqueue.judging import guess_backend

    known = claim.backend or backend or guess_backend(claim.kernel)
    labels = {"problem_label": claim.name, "kernel_label": claim.name}
    return parse_request({"problem": claim.reference, "kernel": claim.kernel, "backend": known, **labels, **common})


def _token(out: Path) -> str:
    """Return the prefix of a run's idempotency keys, from a file by which a resumed run finds its evaluations."""
    file = out / "rejudge.run"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_text(f"rejudge/{uuid4().hex}\n")
        return file.read_text().strip()
    except OSError as error:
        raise InvalidRequest(f"{file}: cannot be used: {error.strerror or error}: use another --out") from None


# report ----------------------------------------------------------------------------------------------


def _write(out: Path, name: str, profile: str, rows: Sequence[Ruled], skipped: Sequence[Refused]) -> None:
    """Write the table, the picture and the report."""
    with (out / "claims.csv").open("w", newline="", encoding="utf-8", errors="replace") as file:
        table = csv.writer(file)
        table.writerow(rows[0].__dataclass_fields__)
        table.writerows([cell(value) for value in asdict(one).values()] for one in rows)
    picture = _draw(out / "claims.svg", name, rows)
    lines = [f"# {_cell(name)}: published claims, judged again\n", picture, *_report(profile, rows)]
    if skipped:
        lines += ["## Entries without a claim\n", _markdown(("entry", "why"), map(astuple, skipped))]
    (out / "report.md").write_text("\n".join(lines), encoding="utf-8", errors="replace")


def _draw(file: Path, name: str, rows: Sequence[Ruled]) -> str:
    """Draw the picture, and return the reference to it. It is empty if matplotlib is not installed."""
    from kqueue import charts

    groups: dict[str, list[tuple[float, float]]] = {}
    for one in rows:
        if one.claimed and one.speedup:
            groups.setdefault(one.ruling, []).append((one.claimed, one.speedup))
    try:
        file.write_bytes(charts.render(charts.Claims(f"Claimed and measured: {name}", groups)))
    except ConfigError as error:
        say(error)
        return ""
    return f"![claimed against measured speedup]({file.name})\n"


def _report(profile: str, rows: Sequence[Ruled]) -> Iterator[str]:
    """Yield the parts of the report on the claims in Markdown."""
    from kqueue.features.rejudge.claims import Ruling

    devices = ", ".join(sorted({one.device for one in rows if one.device})) or "no device"
    yield (
        f"{len(rows)} kernels, judged on {_cell(devices)} by the profile `{profile}` and by the strict comparison. "
        "[The claims as CSV](claims.csv).\n"
    )
    yield _markdown(("result", "kernels"), _counts(rows))
    timed = [(one.claimed, one.speedup) for one in rows if one.claimed and one.speedup]
    if timed:
        claimed, measured = zip(*timed, strict=True)
        claims, measurements = (sum(one > _FASTER for one in some) for some in (claimed, measured))
        yield (
            f"Of the {len(timed)} timed kernels, the median speedup claimed is {ratio(median(claimed))} and measured "
            f"{ratio(median(measured))}. Above {_FASTER}x are {claims} claims and {measurements} measurements.\n"
        )
    for kind in Ruling:
        if some := [one for one in rows if one.ruling is kind]:
            yield f"## {kind[0].upper()}{kind[1:]}\n"
            yield _markdown(("kernel", "claimed", "measured", "why"), map(_cells, some))


def _counts(rows: Sequence[Ruled]) -> Iterator[tuple[str, int]]:
    """Yield the number of claims with each result, and with each rule of the strict comparison."""
    from kqueue.features.rejudge.claims import Ruling

    for kind in Ruling:
        some = [one for one in rows if one.ruling is kind]
        yield kind, len(some)
        yield from Counter(f"{kind}: {one.rule}" for one in some if one.rule).most_common()


def _cells(one: Ruled) -> tuple[str, ...]:
    measured = speedup(one.speedup, None if one.low == one.high else (one.low, one.high))
    return one.name, ratio(one.claimed), measured, f"{one.rule}: {one.why}" if one.rule else one.why


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown. Cells can have foreign text, which is escaped."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    text = one_line(value)
    shown = text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", shown)
