"""The output of a run: its best kernels as files, the curve of its scores, and points at Weights & Biases."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kqueue import charts
from kqueue.errors import ConfigError
from kqueue.features.search.plan import Plan, Task, load_wandb
from kqueue.features.search.run import Watcher
from kqueue.store.searches import Proposal, Run, Step


def write_best(folder: Path, best: Sequence[Proposal]) -> list[Path]:
    """Write the best kernel as ``best.py``. Further kernels of the Pareto front are ``best-2.py`` and so on.

    Return the files. There are none if no kernel passed.
    """
    return write_sources(folder, [one.kernel or "" for one in best if one.category == "passed"])


def write_sources(folder: Path, sources: Sequence[str]) -> list[Path]:
    """Write sources of kernels as :func:`write_best` does."""
    files: list[Path] = []
    with writing(folder):
        for number, source in enumerate(sources, 1):
            files.append(folder / ("best.py" if number == 1 else f"best-{number}.py"))
            files[-1].write_bytes(source.encode())
    return files


def draw(folder: Path, name: str, chart: charts.Chart) -> list[Path]:
    """Draw a chart into files with a name. Return these files, a PNG and an SVG."""
    pictures = {
        folder / f"{name}.{form}": charts.render(chart, form=form) for form in (charts.Form.PNG, charts.Form.SVG)
    }
    with writing(folder):
        for file, picture in pictures.items():
            file.write_bytes(picture)
    return list(pictures)


def curve(runs: Mapping[str, tuple[Task, Sequence[Proposal], Sequence[Step]]]) -> charts.SearchCurve:
    """Return the chart of the scores of runs, and the best so far, over proposals. It shows each run's first metric."""
    metrics = dict.fromkeys(plan.metrics[0] for plan, _, _ in runs.values())
    curves: list[charts.Curve] = []
    for name, (plan, proposals, steps) in runs.items():
        metric = plan.metrics[0]
        tests = [(test["number"], test["scores"][metric]) for step in steps if (test := step.test) and test["scores"]]
        points = [(one.number, one.scores[metric]) for one in proposals if one.scores and metric in one.scores]
        curves.append(charts.Curve(name if len(metrics) == 1 else f"{name}, {metric}", points, tests))
    return charts.SearchCurve(", ".join(runs), next(iter(metrics)) if len(metrics) == 1 else "score", curves)


@contextmanager
def writing(folder: Path) -> Generator[None]:
    """Create a folder for the files written in the block. Raise :class:`ConfigError` if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"--out: {folder} cannot be written: {error.strerror or error}") from None


class WandbWatcher(Watcher):
    """A watcher that sends a point for each reported step to Weights & Biases."""

    def __init__(self, run: Run, plan: Plan) -> None:
        """Begin or resume the run of this name at Weights & Biases."""
        wandb = load_wandb()
        sources = {"problem", "kernel"}
        try:
            self._run: Any = wandb.init(
                project=plan.project_name,
                name=run.name,
                id=run.id.hex,
                resume="allow",
                config=plan.model_dump(mode="json", exclude=sources),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"--use-wandb: {error}. WANDB_MODE=offline needs no login") from None
        self._every = plan.log_frequency

    def step(self, step: Step, proposals: Mapping[int, Proposal]) -> None:
        """Send the best scores, the times of the best kernel, and counts."""
        if step.number % self._every:
            return
        ended = list(proposals.values())
        point: dict[str, Any] = {
            "proposals": len(ended) - 1,
            "judged": sum(one.category is not None for one in ended),
            "passed": sum(one.category == "passed" for one in ended),
        }
        if step.best is not None:
            best = proposals[step.best]
            point |= {f"best/{name}": score for name, score in (best.scores or {}).items()}
            point |= {"best/runtime_ms": best.runtime_ms, "best/number": best.number}
        if step.test is not None and step.test["scores"]:
            point |= {f"test/{name}": score for name, score in step.test["scores"].items()}
        self._run.log({name: value for name, value in point.items() if value is not None}, step=step.number)

    def finish(self) -> None:
        """Send the remaining points."""
        self._run.finish()
