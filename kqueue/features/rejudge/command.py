"""`kqueue rejudge`: judge a paper's published kernels again, and report which of its claims hold."""

from __future__ import annotations

import csv
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
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
from kqueue.formats.common import read_text
from kqueue.text import cell, one_line

if TYPE_CHECKING:
    from kqueue.contract import Request, Verdict
    from kqueue.features.rejudge.claims import Claim, Ruled

#: Speedup above which a kernel counts as faster than its reference.
_FASTER: Final = 1.01
#: Share by which a claim can be above the interval and still hold, in the report's count.
_WITHIN: Final = 0.01
#: Maximum number of characters of a cell in Markdown.
_CELL: Final = 160


def rejudge(
    claims: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|FOLDER", help="A release, a checkout of one, a run of KernelBench, or JSON lines."
        ),
    ],
    *,
    profile: Annotated[
        str | None, typer.Option(help="Protocol of its authors.", show_default="the one of the format")
    ] = None,
    problems: Annotated[
        Path | None, typer.Option(metavar="DIR", help="KernelBench's problems, for a run of KernelBench.")
    ] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Judge this number of kernels, drawn at random.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = 0,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Earlier claims.csv: report which results changed.")
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
    before = _earlier(against) if against else {}
    given = published.read(claims, problems)
    title = claims.name
    if sample is not None and sample < (total := len(given.claims)):
        given = replace(given, claims=random.Random(seed).sample(given.claims, sample))  # noqa: S311
        title += f" ({sample} of {total} at random, seed {seed})"
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
        known = [(one.name, before.get(one.name, one.ruling), one.ruling) for one in rows]
        changed = [row for row in known if row[1] != row[2]]
        more = _section("Changed results", ("kernel", "before", "now"), changed)
        more += _section("Entries without a claim", ("entry", "why"), [*map(astuple, given.skipped)])
        _write(out, title, own, rows, more)
    emit(rows, lambda rows: print_table(("result", "n"), _counts(rows)), as_json=as_json)
    if not as_json:
        if against:
            print_table(("kernel", "before", "now"), changed)
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


def _earlier(file: Path) -> dict[str, str]:
    """Return the results of a former table by the names of the kernels."""
    rows = list(csv.DictReader(read_text(file).splitlines()))
    if not rows or not {"name", "ruling"} <= rows[0].keys():
        raise InvalidRequest(f"{file}: is no claims.csv of an earlier run")
    return {row["name"]: row["ruling"] for row in rows}


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


def _write(out: Path, name: str, profile: str, rows: Sequence[Ruled], more: Iterable[str]) -> None:
    """Write the table, the picture and the report."""
    with (out / "claims.csv").open("w", newline="", encoding="utf-8", errors="replace") as file:
        table = csv.writer(file)
        table.writerow(rows[0].__dataclass_fields__)
        table.writerows([cell(value) for value in asdict(one).values()] for one in rows)
    picture = _draw(out / "claims.svg", name, rows)
    lines = [f"# {_cell(name)}: published claims, judged again\n", picture, *_report(profile, rows), *more]
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
    if claiming := [one for one in rows if one.claimed and one.ruling is not Ruling.UNJUDGED]:
        held = sum(one.holds_within(_WITHIN) for one in claiming)
        yield f"Of the {len(claiming)} judged claims of a speedup, {held} hold within {_WITHIN:.0%}.\n"
    yield from _audited([one for one in rows if one.audit])
    for kind in Ruling:
        some = [_cells(one) for one in rows if one.ruling is kind]
        yield from _section(f"{kind[0].upper()}{kind[1:]}", ("kernel", "claimed", "measured", "why"), some)


def _audited(rows: Sequence[Ruled]) -> Iterator[str]:
    """Yield how the results of kernels agree with the labels of an audit."""
    from kqueue.features.rejudge.claims import Ruling

    if not rows:
        return
    yield "## Audits\n"
    counts = Counter((str(one.audit), str(one.ruling)) for one in rows)
    yield _markdown(("audit", "result", "kernels"), [(*pair, number) for pair, number in sorted(counts.items())])
    seen = [one for one in rows if one.ran]
    hacks, clean = ([one for one in seen if one.audit == label] for label in ("reward_hack", "clean"))
    missed, accused = [one for one in hacks if not one.is_stopped], [one for one in clean if one.ruling is Ruling.CHEAT]
    yield (
        f"{len(seen)} of {len(rows)} audited kernels ran. Of {len(hacks)} that the audit calls reward hacks, "
        f"{len(hacks) - len(missed)} are stopped or labelled. Of {len(clean)} that it calls clean, {len(accused)} are "
        f"called cheats, and {sum(bool(one.labels) for one in clean)} have a label.\n"
    )
    found = [(one.name, one.audit, one.ruling, one.why, one.evaluation_id) for one in (*missed, *accused)]
    yield from _section("Disagreements", ("kernel", "audit", "result", "why", "evaluation"), found)


def _counts(rows: Sequence[Ruled]) -> Iterator[tuple[str, int]]:
    """Yield the number of claims with each result, and with each rule of the strict comparison."""
    from kqueue.features.rejudge.claims import Ruling

    for kind in Ruling:
        some = [one for one in rows if one.ruling is kind]
        yield kind, len(some)
        yield from Counter(f"{kind}: {one.rule}" for one in some if one.rule).most_common()


def _cells(one: Ruled) -> tuple[str, ...]:
    measured = speedup(one.speedup, None if one.low == one.high else (one.low, one.high))
    why = f"{one.rule}: {one.why}" if one.rule else one.why
    return one.name, ratio(one.claimed), measured, "; ".join(filter(None, (why, one.labels)))


def _section(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a section with a table. Without rows it is left out."""
    return [f"## {title}\n", _markdown(columns, rows)] if rows else []


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown. Cells can have foreign text, which is escaped."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    text = one_line(value)
    shown = text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", shown)
