"""`kqueue tune`: the best values for names in a kernel. `kqueue tournament`: the best three of many kernels.

`kqueue search` resumes, shows and lists such runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kqueue.cli import options, runs, sources
from kqueue.cli.connection import database
from kqueue.cli.render import make_bar, print_table, say, write_json
from kqueue.cli.sources import adapted, read_problem, read_source
from kqueue.errors import ConfigError, InvalidRequest
from kqueue.figures import milliseconds, ratio, speedup
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue.contract import Request
    from kqueue.contract import Result as Judged
    from kqueue.search.plan import TournamentPlan
    from kqueue.search.tuning import Configuration, Tuned
    from kqueue.tuning.halving import Result
    from kqueue.tuning.tournament import Place

#: Maximum number of configurations in the printed table.
_ROWS: Final = 40


def tune(
    kernel: Annotated[Path, typer.Argument(metavar="KERNEL", help="File with the kernel.")],
    problem: Annotated[
        str, typer.Option(metavar="FILE", help="The reference, or a stored problem's sha256:HASH.", show_default=False)
    ],
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=VALUES",
            help="A name in the kernel with values: BLOCK=64,128, BLOCK=16..64..16 or BLOCK=32..512..x2. Repeatable.",
            show_default=False,
        ),
    ],
    trials: Annotated[
        int | None, typer.Option(help="Maximum number of configurations, which Optuna chooses.", show_default="64")
    ] = None,
    finalists: Annotated[
        int | None, typer.Option(help="Number of configurations in the last comparison.", show_default="3")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Number of evaluations of each of them, and of the original.", show_default="5")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="inverse_runtime, speedup, bandwidth or module:function.")
    ] = "inverse_runtime",
    backend: options.Backend = None,
    gpu: Annotated[str, typer.Option(help="A GPU's model such as L40S, or any, auto, cpu.")] = "auto",
    url: options.Url = None,
    precision: options.Precision = None,
    checks: options.Checks = None,
    calls: Annotated[
        int | None,
        typer.Option("--calls", help="Number of timed calls in the last comparison. Earlier ones use fewer."),
    ] = None,
    settings: options.SettingsTree = None,
    assignments: options.Assignments = None,
    run_name: Annotated[str | None, typer.Option(help="The run's name.", show_default="from the problem's")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the winner and the pictures.", show_default="tune-NAME"),
    ] = None,
    verbose: runs.Verbose = False,
    as_json: runs.Json = False,
) -> None:
    """Find the best values for constants, macros, launch keywords and constructor arguments of a kernel.

    Exits with 1 if no correct kernel was found.
    """
    from kqueue.integrations.common import lane_of
    from kqueue.judging import guess_backend
    from kqueue.search.plan import TunePlan, make_plan
    from kqueue.tuning import space

    fields = adapted({**read_problem(problem), "kernel": read_source(kernel)})
    source = fields["kernel"]
    given = {"trials": trials, "finalists": finalists, "repeats": repeats}
    name = None if run_name is None else runs.checked(run_name)
    plan = make_plan(
        TunePlan,
        {
            **fields,
            "backend": guess_backend(source) if backend is None else backend,
            "lane": lane_of(gpu),
            "settings": options.settings_of(
                settings, assignments or (), precision=precision, checks=checks, calls=calls, no_timing=False
            ),
            "metrics": [metric],
            "url": url,
            "grid": space.parse(grid),
            **{name: value for name, value in given.items() if value is not None},
        },
    )
    with database("tune") as engine:
        name = name or runs.named(plan.problem_label, plan.algorithm)
        finish_tuning(runs.carry_out(engine, plan, name, verbose=verbose), out=out, as_json=as_json)


def finish_tuning(record: runs.Record, *, out: Path | None, as_json: bool) -> None:
    """Write the files of a completed run and print its results."""
    assert record.tuned is not None
    files = record.write(out or Path(f"tune-{record.run.name}"))
    if as_json:
        write_json(_fields(record, record.tuned) | {"files": [str(file) for file in files]})
    else:
        show_tuned(record, record.tuned)
        for file in files:
            typer.echo(clean(file))
    if record.tuned.winner is None:
        raise typer.Exit(1)


def show_tuned(record: runs.Record, tuned: Tuned) -> None:
    """Print the results of a run, with the winner if it is done."""
    _print_configurations(tuned, [name for name, _ in record.run.plan["grid"]])
    if record.state != "done":
        return
    typer.echo(clean(_summary(tuned)))
    record.show_duel()
    shares = ", ".join(f"{name} {share:.2f}" for name, share in record.importances.items())
    typer.echo(
        clean(f"importance: {shares or 'unknown, because there are too few correct configurations or equal scores'}")
    )


def _fields(record: runs.Record, tuned: Tuned) -> dict[str, Any]:
    original, winner = _original(tuned), tuned.winner
    return {
        "name": record.run.name,
        "id": record.run.id,
        "winner": winner
        and {
            "values": tuned.configurations[0].values,
            "beats_original": winner.beats,
            "compared": winner.compared,
            "gain": _gain(tuned.configurations[0], original),
        },
        "configurations": [
            {
                "values": one.values,
                "original": one.original,
                "calls": one.standing.calls,
                "final": one.standing.final,
                "gain": _gain(one, original),
                "category": one.category,
                "runtime_ms": one.middle.runtime_ms,
                "speedup": one.middle.speedup,
                "scores": [row.scores for row in one.rows],
                "proposals": [row.number for row in one.rows],
            }
            for one in tuned.configurations
        ],
        "duel": record.duel and record.duel.model_dump(mode="json"),
        "importances": record.importances,
        "judged": sum(one.category is not None for one in record.proposals),
    }


def _print_configurations(tuned: Tuned, names: Sequence[str]) -> None:
    original = _original(tuned)

    def cells(one: Configuration) -> tuple[object, ...]:
        won = tuned.winner is not None and one.standing.config == tuned.winner.config
        notes = [note for note, holds in (("winner", won), ("original", one.original)) if holds]
        gain = _gain(one, original)
        return (
            *one.values.values(),
            one.standing.calls,
            len(one.rows),
            one.category,
            _times(one),
            ratio(one.middle.speedup),
            "" if gain is None else f"{gain:.3g}x",
            ", ".join(notes),
        )

    head = (*names, "calls", "n", "verdict", "runtime ms", "speedup", "of original", "")
    print_table(head, map(cells, tuned.configurations[:_ROWS]))
    if len(tuned.configurations) > _ROWS:
        typer.echo(f"and {len(tuned.configurations) - _ROWS} more, which are not better. --json has all of them")


def _summary(tuned: Tuned) -> str:
    """Return a sentence on the winner."""
    winner, original = tuned.winner, _original(tuned)
    if winner is None:
        return "no correct kernel was found"
    best = tuned.configurations[0]
    values = " ".join(f"{name}={value}" for name, value in best.values.items())
    if not winner.compared and best.original:
        return f"no other configuration is known to be correct: the winner is the original kernel ({values})"
    if not winner.compared:
        why = "" if original is None or original.standing.right else f", which ended as {original.category}"
        return f"winner: {values}, {_times(best)} ms. It was not compared with the original kernel{why}"
    assert original is not None
    if not winner.beats:
        return f"no configuration beats the original kernel ({values}, {_times(original)} ms) reliably"
    gain = _gain(best, original)
    by = "" if gain is None else f", {gain:.3g}x"
    return f"winner: {values}, {_times(best)} ms{by}, compared with {_times(original)} ms of the original kernel"


def _original(tuned: Tuned) -> Configuration | None:
    return next((one for one in tuned.configurations if one.original), None)


def _gain(one: Configuration, original: Configuration | None) -> float | None:
    """Return the ratio of a configuration's score to the original's, if both were in the last comparison."""
    if original is None or not (one.standing.final and original.standing.final):
        return None
    mine, its = one.score, original.score
    return None if mine is None or its is None or its <= 0 else mine / its


def _times(one: Configuration) -> str:
    """Return the median time in ms, with the shortest and longest if there are several."""
    times = [row.runtime_ms for row in one.rows if row.runtime_ms is not None]
    middle = milliseconds(one.middle.runtime_ms)
    return f"{middle} ({milliseconds(min(times))} to {milliseconds(max(times))})" if len(times) > 1 else middle


#: Judges requests, and returns or yields the results in their order.
_Judge = Callable[[list["Request"]], Iterable["Judged | InvalidRequest"]]


def tournament(
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="File with the reference.")],
    kernels: Annotated[
        list[str], typer.Argument(metavar="KERNEL", help="Folders, files and globs, up to 500 kernels.")
    ],
    *,
    gpu_seconds: Annotated[float, typer.Option(help="Budget: seconds of exclusive use of the device.")] = 60.0,
    quote: Annotated[bool, typer.Option("--quote", help="Print the price, and stop.")] = False,
    backend: options.Backend = None,
    device: options.Device = None,
    fleet: options.Fleet = False,
    gpu: Annotated[str, typer.Option(help="With --fleet: a GPU's model such as L40S, or any, auto, cpu.")] = "auto",
    url: options.Url = None,
    precision: options.Precision = None,
    checks: options.Checks = None,
    calls: options.Calls = None,
    settings: options.SettingsTree = None,
    assignments: options.Assignments = None,
    run_name: Annotated[str | None, typer.Option(help="The run's name.", show_default="from the problem's")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the best kernels.", show_default="tournament-NAME"),
    ] = None,
    verbose: runs.Verbose = False,
    as_json: runs.Json = False,
) -> None:
    """Find the best three of up to 500 kernels within a budget, with their certainty.

    On this machine the same command with the same --out continues. Exits with 1 if no kernel passed.
    """
    from kqueue.client import connect
    from kqueue.integrations.common import lane_of
    from kqueue.search.plan import TournamentPlan, make_plan

    on_fleet = fleet or url is not None
    if device is not None and on_fleet:
        raise InvalidRequest("--device: a fleet's devices are chosen with --gpu")
    fields = sources.read_problem(problem)
    if "problem_label" not in fields and not on_fleet:
        raise InvalidRequest(f"{problem}: only a fleet has stored problems: give a file")
    tree = options.settings_of(settings, assignments, precision=precision, checks=checks, calls=calls)
    candidates = list(_candidates(kernels, backend, fields | {"settings": tree}))
    if not candidates:
        raise InvalidRequest("no kernel is left: give at least one valid kernel")
    plan = make_plan(
        TournamentPlan,
        {
            **fields,
            "kernel": candidates[0][2],
            "backend": candidates[0][1],
            "lane": lane_of(gpu) if on_fleet else "auto",
            "settings": tree,
            "candidates": candidates,
            "gpu_seconds": gpu_seconds,
            "url": url,
        },
    )
    name = runs.checked(run_name) if run_name else None
    if on_fleet:
        with connect(url) as client, nullcontext() if quote else database("tournament") as engine:
            _play(plan, client.evaluate_batch, None, only_quote=True)
            if engine is not None:
                name = name or runs.named(plan.problem_label, plan.algorithm)
                finish_tournament(runs.carry_out(engine, plan, name, verbose=verbose), out=out, as_json=as_json)
        return
    from kqueue.judging import LocalJudge

    folder = out or Path(f"tournament-{name or plan.problem_label}")
    with LocalJudge(device) as local:
        results = _play(plan, local.map, _Journal(folder, plan), only_quote=quote)
    if not quote:
        _finish_places(plan, plan.tournament().places(results), results, folder, as_json=as_json)


def _candidates(kernels: Sequence[str], backend: str | None, fields: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield label, backend and source of each valid kernel, equal sources once. Report all other files."""
    seen: dict[str, str] = {}
    for file in sources.find_kernels(kernels):
        try:
            request = options.of_file(file, backend, fields)
        except InvalidRequest as error:
            say(f"{file}: left out: {error}")
            continue
        if request.kernel in seen:
            say(f"{file}: left out, because it is equal to {seen[request.kernel]}")
            continue
        seen[request.kernel] = str(file)
        yield file.stem, request.backend, request.kernel


def _play(plan: TournamentPlan, judge: _Judge, journal: _Journal | None, *, only_quote: bool) -> list[Result]:
    """Run a tournament, or its beginning up to the quote, which is printed. Return the results."""
    from kqueue.categories import Blame
    from kqueue.tuning.halving import Result

    steps, results, quoted = plan.tournament(), list[Result](), False
    with make_bar() as bar:
        task = bar.add_task("device seconds", total=plan.gpu_seconds)
        while (batch := steps.next(results)) is not None:
            known = [journal and journal.known.get(entry) for entry in batch]
            new = [entry for entry, one in zip(batch, known, strict=True) if one is None]
            answers = iter(judge([plan.evaluation(entry) for entry in new]))
            for entry, one in zip(batch, known, strict=True):
                if (result := one) is None:
                    answer = next(answers)
                    if isinstance(answer, InvalidRequest):
                        raise answer
                    # Without a time, or if the machine or the problem failed, nothing is known about the kernel.
                    score = 0.0 if answer.blame is Blame.CANDIDATE else answer.speedup
                    result = Result(entry, answer.passed, score, answer.device_s)
                    if journal is not None:
                        journal.write(result, str(answer.category))
                results.append(result)
                spent = sum(each.device_s for each in results)
                bar.update(task, completed=spent, description=f"{len(results)} judged, device seconds")
            if not quoted and (quote := steps.quote(results)) is not None:
                fits = "all" if quote.kernels == len(plan.candidates) else f"{quote.kernels} of"
                say(
                    f"price: {quote.coarse_s:.3g} device seconds for the first time of a kernel, {quote.device_s:.3g} "
                    f"at most in total. The budget of {plan.gpu_seconds:g} is enough for {fits} "
                    f"{len(plan.candidates)} kernels"
                )
                if plan.gpu_seconds < quote.least_s:
                    raise InvalidRequest(f"--gpu-seconds {plan.gpu_seconds:g}: give at least {quote.least_s:.3g}")
                quoted = True
            if quoted and only_quote:
                return results
    return results


class _Journal:
    """The results of a tournament on this machine, in ``results.jsonl``, so that a later process can continue it."""

    def __init__(self, folder: Path, plan: TournamentPlan) -> None:
        """Read the journal in a folder."""
        from kqueue.tuning.halving import Entry, Result

        same = plan.model_dump_json(exclude={"gpu_seconds"})
        head = {"tournament": hashlib.sha256(same.encode()).hexdigest()}
        self.known: dict[Entry, Result] = {}
        self._file = folder / "results.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = self._file.read_text() if self._file.exists() else ""
            # A killed process can leave a part of a line.
            lines = (text[: text.rfind("\n") + 1] or json.dumps(head) + "\n").splitlines()
            self._file.write_text("".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise ConfigError(f"--out: {folder} cannot be written: {error.strerror or error}") from None
        if lines[0] != json.dumps(head):
            raise InvalidRequest(f"--out: {folder} has another tournament: choose another folder")
        try:
            for one in map(json.loads, lines[1:]):
                entry = Entry((str(one["kernel"]),), one["calls"], one["repeat"])
                if one["right"] or one["score"] is not None:  # a failure of the machine is tried again
                    self.known[entry] = Result(entry, one["right"], one["score"], one["device_s"])
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"{self._file} cannot be read: choose another folder with --out") from None

    def write(self, result: Result, category: str) -> None:
        entry = result.entry
        record = {"kernel": int(entry.config[0]), "calls": entry.calls, "repeat": entry.repeat, "category": category}
        record |= {"right": result.right, "score": result.score, "device_s": result.device_s}
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")


def finish_tournament(record: runs.Record, *, out: Path | None, as_json: bool) -> None:
    """Write the files of a completed tournament on a fleet, and print its results."""
    from kqueue.search.plan import TournamentPlan
    from kqueue.search.tuning import results_of

    assert isinstance(record.plan, TournamentPlan)
    folder = out or Path(f"tournament-{record.run.name}")
    _finish_places(record.plan, record.places, results_of(record.plan, record.proposals), folder, as_json=as_json)


def _finish_places(
    plan: TournamentPlan, places: Sequence[Place], results: Sequence[Result], folder: Path, *, as_json: bool
) -> None:
    """Write the best kernels, and print them."""
    from kqueue.search.results import write_sources

    files = write_sources(folder, [plan.candidates[one.kernel][2] for one in places])
    if as_json:
        best = [asdict(one) | {"kernel": plan.candidates[one.kernel][0]} for one in places]
        for one, place in zip(best, places, strict=True):
            one["lead"] = place.lead and place.lead.model_dump(mode="json")
        spent = {"device_s": sum(one.device_s for one in results), "judged": len(results)}
        write_json({"best": best, "kernels": len(plan.candidates), **spent, "files": list(map(str, files))})
    else:
        show_places(plan, places, results)
        for file in files:
            typer.echo(clean(file))
    if not places:
        raise typer.Exit(1)


def show_places(plan: TournamentPlan, places: Sequence[Place], results: Sequence[Result]) -> None:
    """Print the best kernels."""
    rows = (
        (
            number,
            plan.candidates[one.kernel][0],
            ratio(one.score),
            "passed" if one.full else "not yet",
            "" if one.lead is None else speedup(one.lead.ratio, one.lead.interval),
            "" if one.lead is None else _certainty(one),
        )
        for number, one in enumerate(places, 1)
    )
    print_table(("place", "kernel", "speedup", "in full", "faster than the next", "certainty"), rows)
    seen = {one.entry.config for one in results}
    spent = sum(one.device_s for one in results)
    unknown = {one.entry.config for one in results if one.score is None}
    typer.echo(
        f"{len(seen)} of {len(plan.candidates)} kernels were judged in {len(results)} evaluations, "
        f"{spent:.3g} device seconds of {plan.gpu_seconds:g}"
        + (f". {len(unknown)} had no result, because the machine or the problem failed" if unknown else "")
    )


def _certainty(place: Place) -> str:
    assert place.lead is not None
    if place.lead.reason == "equal":
        return "equal within 1 %"
    return "none" if place.lead.certainty is None else f"{100 * place.lead.certainty:.4g} %"
