"""`kqueue tournament`: the best three of many kernels. `kqueue search` resumes, shows and lists such runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kqueue.cli import options, sources
from kqueue.cli.connection import database
from kqueue.cli.render import make_bar, print_table, say, write_json
from kqueue.errors import InvalidRequest
from kqueue.features.search import runs
from kqueue.figures import ratio, speedup
from kqueue.text import clean

if TYPE_CHECKING:
    from kqueue.contract import Request
    from kqueue.contract import Result as Judged
    from kqueue.features.search.plan import Entry, Result
    from kqueue.features.tournament.tournament import Place, TournamentPlan
    from kqueue.store.searches import Proposal

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
    judging: options.Timed,
    run_name: Annotated[str | None, typer.Option(help="The run's name.", show_default="from the problem's")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the best kernels.", show_default="tournament-NAME")
    ] = None,
    verbose: runs.Verbose = False,
    as_json: runs.Json = False,
) -> None:
    """Find the best three of up to 500 kernels within a budget, with their certainty.

    On this machine the same command with the same --out continues. Exits with 1 if no kernel passed.
    """
    from kqueue.client import connect
    from kqueue.features.search.plan import make_plan
    from kqueue.features.tournament.tournament import TournamentPlan
    from kqueue.integrations.common import lane_of

    on_fleet = fleet or url is not None
    if device is not None and on_fleet:
        raise InvalidRequest("--device: a fleet's devices are chosen with --gpu")
    fields = sources.read_problem(problem)
    if "problem_label" not in fields and not on_fleet:
        raise InvalidRequest(f"{problem}: only a fleet has stored problems: give a file")
    tree = judging.tree()
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
                runs.carry_out(engine, plan, name, verbose=verbose).finish(out, as_json=as_json)
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
    from kqueue.features.search.plan import Result

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
        from kqueue.features.search.plan import Entry, Result
        from kqueue.features.search.results import writing

        same = plan.model_dump_json(exclude={"gpu_seconds"})
        head = {"tournament": hashlib.sha256(same.encode()).hexdigest()}
        self.known: dict[Entry, Result] = {}
        self._file = folder / "results.jsonl"
        with writing(folder):
            text = self._file.read_text() if self._file.exists() else ""
            # A killed process can leave a part of a line.
            lines = (text[: text.rfind("\n") + 1] or json.dumps(head) + "\n").splitlines()
            self._file.write_text("".join(f"{line}\n" for line in lines))
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


class TournamentRecord(runs.Record):
    """A recorded tournament."""

    plan_type = "kqueue.features.tournament.tournament:TournamentPlan"
    engine = "kqueue.features.tournament.tournament:TournamentRun"
    proposer = "files"
    line = staticmethod(runs.batch_line)

    @property
    def _results(self) -> list[Result]:
        from kqueue.features.search.run import results_of

        return results_of(self.plan, self.proposals)

    @cached_property
    def places(self) -> Sequence[Place]:
        """The best kernels."""
        return self.plan.tournament().places(self._results)

    @cached_property
    def best(self) -> Sequence[Proposal]:
        """The last proposals of the best kernels."""
        from kqueue.features.search.run import best_of, settled
        from kqueue.features.tournament.tournament import latest_of

        latest = [self.proposals[latest_of(self.proposals, one.kernel)] for one in self.places]
        return latest or best_of(settled(self.proposals, self.steps))

    def show(self) -> None:
        _show_places(self.plan, self.places, self._results)

    def finish(self, out: Path | None, *, as_json: bool) -> None:
        folder = out or Path(f"tournament-{self.run.name}")
        _finish_places(self.plan, self.places, self._results, folder, as_json=as_json)


def _finish_places(
    plan: TournamentPlan, places: Sequence[Place], results: Sequence[Result], folder: Path, *, as_json: bool
) -> None:
    """Write the best kernels, and print them."""
    from kqueue.features.search.results import write_sources

    files = write_sources(folder, [plan.candidates[one.kernel][2] for one in places])
    if as_json:
        best = [asdict(one) | {"kernel": plan.candidates[one.kernel][0]} for one in places]
        for one, place in zip(best, places, strict=True):
            one["lead"] = place.lead and place.lead.model_dump(mode="json")
        spent = {"device_s": sum(one.device_s for one in results), "judged": len(results)}
        write_json({"best": best, "kernels": len(plan.candidates), **spent, "files": list(map(str, files))})
    else:
        _show_places(plan, places, results)
        for file in files:
            typer.echo(clean(file))
    if not places:
        raise typer.Exit(1)


def _show_places(plan: TournamentPlan, places: Sequence[Place], results: Sequence[Result]) -> None:
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
