"""`kqueue effect`: how much faster a kernel makes a model, and by how much it changes the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kqueue.cli import options, sources
from kqueue.cli.judge import where
from kqueue.cli.render import make_bar, say, write_json
from kqueue.text import clean


def effect(
    kernel: Annotated[Path, typer.Argument(metavar="KERNEL", help="File with the kernel.")],
    *,
    problem: Annotated[str, typer.Option("--problem", "-p", metavar="FILE", help="File with the reference.")],
    model: Annotated[str, typer.Option(metavar="NAME|FILE", help="Recipe: llama, mixture, vision, or a file.")],
    rounds: Annotated[int, typer.Option(min=1, max=40, help="Number of times that each model is timed.")] = 3,
    operator: Annotated[str, typer.Option(metavar="PATH", help="Function to replace, instead of modules.")] = "",
    backend: options.Backend = None,
    device: options.Device = None,
    fleet: options.Fleet = False,
    url: options.Url = None,
    lane: Annotated[str | None, typer.Option(help="With --fleet: auto, cpu, gpu, or gpu.<model>.")] = None,
    judging: options.Timed,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Measure how much faster a kernel makes a model, and its drift. Exit with 1 if it fails alone or in the model."""
    from kqueue.categories import Blame
    from kqueue.client import connect
    from kqueue.features.effect.effects import Plan
    from kqueue.features.effect.effects import effect as measure

    on_fleet = options.on_fleet(fleet=fleet, url=url, device=device, lane=lane)
    tree = sources.merged({"precision": "bf16"}, judging.tree())
    fields: dict[str, Any] = {**sources.read_problem(problem), "settings": tree, "priority": "batch"}
    if lane is not None:
        fields["lane"] = lane
    plan = Plan.of(options.of_file(kernel, backend, fields), model, rounds, operator)
    with make_bar(quiet=as_json) as bar:
        task = bar.add_task("waiting", total=1 + len(plan.workloads) * (2 + 3 * rounds))

        def report(what: str) -> None:
            bar.update(task, advance=1, description=what)

        if on_fleet:
            with connect(url) as client:
                found = measure(client.evaluate_batch, plan, report)
        else:
            from kqueue.config import load
            from kqueue.judging import LocalJudge

            with LocalJudge(device, config=load(preload=load().preload or "transformers.modeling_layers")) as local:
                if not as_json:
                    say(where(local.machine))
                found = measure(local.map, plan, report)
            for doubt in local.doubts:
                say(f"the GPU could be unfit: {doubt}")
    if as_json:
        write_json(found.model_dump(mode="json"))
    else:
        typer.echo(clean("\n".join(found.words())))
    if found.blame is not Blame.NONE or any(one.ended for one in found.workloads):
        raise typer.Exit(3 if found.blame is Blame.FLEET else 1)
