"""The plan of a run: all of its options. It is recorded with the run, so that a resumed run is the same.

Of runs whose steps are batches, also the entries to judge, their results, and the numbers of calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kqueue.contract import BackendName, Request, Settings, parse_request
from kqueue.errors import ConfigError, InvalidRequest

#: Maximum number of proposals in a step. They are recorded by one statement, which has at most 65,535 values.
_STEP_PROPOSALS: Final = 10_000
#: Factor between two rungs: the calls grow by it, and the number of configurations shrinks by it.
_RATIO: Final = 3
#: Fewest timed calls that the contract allows.
_FEWEST_CALLS: Final = 5
#: A value for each name, in the order of the names. Empty for the original kernel.
Config = tuple[str, ...]
ORIGINAL: Final[Config] = ()


class Algorithm(StrEnum):
    """The algorithms that choose parents for the next proposals. The names are from Trace's PrioritySearch."""

    PS = "PS"
    """The kernels with the best scores."""
    PS_SUMMARIZER = "PS_Summarizer"
    """The kernels with the best scores. Proposers also receive the failures and improvements so far."""
    PS_EPSNET = "PS_epsNet"
    """The best of each region of similar kernels. A region without an improvement waits for the other regions."""
    PS_EPSNET_SUMMARIZER = "PS_epsNet_Summarizer"
    """Regions, and proposers also receive the failures and improvements so far."""

    @property
    def summarizes(self) -> bool:
        """True if proposers receive a summary of failures."""
        return self in {Algorithm.PS_SUMMARIZER, Algorithm.PS_EPSNET_SUMMARIZER}

    @property
    def spreads(self) -> bool:
        """True if kernels are chosen by regions."""
        return self in {Algorithm.PS_EPSNET, Algorithm.PS_EPSNET_SUMMARIZER}


class Task(BaseModel):
    """The options of any run: a problem, a kernel to start from, and the settings of evaluations."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    problem: str
    """Source of the reference."""
    problem_label: str | None = None
    kernel: str
    """The kernel to start from."""
    backend: BackendName
    lane: str = "auto"
    settings: Settings = Settings()
    metrics: Annotated[tuple[str, ...], Field(min_length=1)] = ("inverse_runtime",)
    url: str | None = None
    """The fleet's address over HTTP. None for the fleet of this database."""

    @property
    def duels(self) -> bool:
        """True if the winner and the start fight a duel, because the one metric prefers the faster of two kernels."""
        return self.metrics in {("inverse_runtime",), ("speedup",), ("bandwidth",)}

    def request(self, kernel: str, **fields: Any) -> Request:
        """Return the request to judge ``kernel``, with further fields of :class:`~kqueue.contract.Request`."""
        own: dict[str, Any] = {
            "problem": self.problem,
            "problem_label": self.problem_label,
            "backend": self.backend,
            "lane": self.lane,
            "settings": self.settings,
        }
        return parse_request({**own, "kernel": kernel, **fields})

    def check(self) -> None:
        """Raise InvalidRequest if a run cannot begin with these options."""

    def require(self) -> None:
        """Raise ConfigError if a package that the run needs is not installed."""

    def to_repeat(self) -> list[str]:
        """Return the options that must be repeated to resume a run.

        Any user who can search can change the record of any run. The run's plan can make this process execute a
        command, import a function, read a folder, or send secrets to a fleet or to a model, whose name can be an
        address.
        """
        options = [] if self.url is None else ["--url", self.url]
        for metric in self.metrics:
            if ":" in metric:
                options += ["--metric", metric]
        return options


class Plan(Task):
    """The plan of a search."""

    algorithm: Algorithm = Algorithm.PS
    num_steps: Annotated[int, Field(ge=1, le=100_000)] = 50
    num_candidates: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of parents in a step."""
    num_proposals: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of proposals from each parent."""
    num_threads: Annotated[int, Field(ge=1, le=1000)] = 20
    """Number of proposals that are written and judged at once."""
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Maximum share of differing lines between similar kernels."""
    proposer: Literal["model", "command", "recorded"]
    given: str
    """The model's name, the command line, or the folder."""
    answer_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Maximum seconds for one answer."""
    log_frequency: Annotated[int, Field(ge=1)] = 1
    """Number of steps between two reports."""
    test_frequency: Annotated[int, Field(ge=0)] = 0
    """Number of steps between two tests of the best kernel. 0 for none."""
    use_wandb: bool = False
    project_name: str = "kqueue"

    def require(self) -> None:
        if self.use_wandb:
            load_wandb()

    def to_repeat(self) -> list[str]:
        option = {"model": "--model", "command": "--proposer", "recorded": "--recorded"}[self.proposer]
        return [option, self.given, *super().to_repeat()]

    @field_validator("num_proposals")
    @classmethod
    def _fits_a_step(cls, value: int, info: ValidationInfo) -> int:
        candidates = info.data.get("num_candidates", 1)
        if candidates * value > _STEP_PROPOSALS:
            raise ValueError(
                f"--num-candidates times it is {candidates * value}, and a step has at most {_STEP_PROPOSALS}"
            )
        return value


_TaskT = TypeVar("_TaskT", bound=Task)


def make_plan(kind: type[_TaskT], fields: Mapping[str, Any]) -> _TaskT:
    """Return the plan of a run. Its InvalidRequest names a wrong field as an option, and never repeats a source."""
    try:
        plan = kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest("; ".join(_complaint(fault) for fault in error.errors())) from None
    plan.request(plan.kernel)
    plan.check()
    return plan


def load_wandb() -> Any:
    """Return the module ``wandb``, or raise ConfigError if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(f"--use-wandb needs wandb ({error}): pip install 'kqueue[search]'") from None


def _complaint(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    option = name if "." in name else f"--{name.replace('_', '-')}"
    shown = repr(fault["input"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{option}: {message}" + (f", not {shown}" if len(shown) <= 80 else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """An evaluation to run next. ``repeat`` is 0 on the rungs, or its number in the last comparison, from 1."""

    config: Config
    calls: int
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an entry. A higher score is better, and None is unknown."""

    entry: Entry
    right: bool
    score: float | None
    device_s: float = 0.0


def rungs_of(calls: int, number: int) -> list[int]:
    """Return the numbers of timed calls of at most ``number`` rungs and of the last comparison, the fewest first."""
    counts = {max(_FEWEST_CALLS, calls // _RATIO**rung) for rung in range(1, number + 1)}
    return [*sorted(count for count in counts if count < calls), calls]


def promoted(best: Sequence[Config], least: int) -> Sequence[Config]:
    """Return the best third of configurations, the best first, but at least ``least``."""
    return best[: max(least, -(-len(best) // _RATIO))]


def ranked(results: Iterable[Result]) -> list[Config]:
    """Return the configurations, except the original, that passed each time, the best median score first.

    Unknown scores do not count, and a configuration without a known one is left out.
    """
    by_config: dict[Config, list[Result]] = {}
    for one in results:
        by_config.setdefault(one.entry.config, []).append(one)
    medians = {
        config: median_low(scores)
        for config, mine in by_config.items()
        if config != ORIGINAL
        and all(one.right or one.score is None for one in mine)
        and (scores := [one.score for one in mine if one.score is not None])
    }
    return sorted(medians, key=lambda config: -medians[config])
