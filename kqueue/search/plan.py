"""The plan of a search: all of its options. It is recorded with the run, so that a resumed run is the same search."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from kqueue.contract import BackendName, Request, Settings, parse_request
from kqueue.errors import InvalidRequest
from kqueue.tuning.halving import FINALISTS, MOST_TRIALS, REPEATS, TRIALS, Entry, Halving
from kqueue.tuning.space import Parameter, Space
from kqueue.tuning.tournament import FULL, MOST_KERNELS, Tournament

#: Maximum number of proposals in a step. They are recorded by one statement, which has at most 65,535 values.
_STEP_PROPOSALS: Final = 10_000


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

    @field_validator("num_proposals")
    @classmethod
    def _fits_a_step(cls, value: int, info: ValidationInfo) -> int:
        candidates = info.data.get("num_candidates", 1)
        if candidates * value > _STEP_PROPOSALS:
            raise ValueError(
                f"--num-candidates times it is {candidates * value}, and a step has at most {_STEP_PROPOSALS}"
            )
        return value


class TunePlan(Task):
    """The plan of a tuning run (:mod:`kqueue.tuning`). The last comparison uses the timed calls of its settings."""

    algorithm: Literal["tune"] = "tune"
    metrics: Annotated[tuple[str, ...], Field(min_length=1, max_length=1)] = ("inverse_runtime",)
    grid: Annotated[tuple[Parameter, ...], Field(min_length=1)]
    """Names of the kernel, each with its values to try."""
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = TRIALS
    """Maximum number of judged configurations, not counting the original kernel."""
    finalists: Annotated[int, Field(ge=1, le=100)] = FINALISTS
    """Number of configurations in the last comparison."""
    repeats: Annotated[int, Field(ge=2, le=50)] = REPEATS
    """Number of evaluations of each finalist."""

    def halving(self) -> Halving:
        """Return the steps of the run, or raise InvalidRequest if the kernel cannot have these names and values."""
        return Halving(
            Space(self.kernel, self.grid), self.settings.timing.calls, self.trials, self.finalists, self.repeats
        )


class TournamentPlan(Task):
    """The plan of a tournament (:mod:`kqueue.tuning.tournament`). The best kernels are judged with its settings."""

    algorithm: Literal["tournament"] = "tournament"
    metrics: Annotated[tuple[str, ...], Field(min_length=1, max_length=1)] = ("speedup",)
    candidates: Annotated[tuple[tuple[str, BackendName, str], ...], Field(min_length=1, max_length=MOST_KERNELS)]
    """Label, backend and source of each kernel. The sources differ."""
    gpu_seconds: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """Seconds of exclusive use of a device."""

    def tournament(self) -> Tournament:
        """Return the steps of the run."""
        return Tournament(len(self.candidates), self.settings.timing.calls, self.gpu_seconds)

    def evaluation(self, entry: Entry) -> Request:
        """Return the request for an entry: with one check, or in full."""
        label, backend, kernel = self.candidates[int(entry.config[0])]
        timing = self.settings.timing.model_copy(update={"calls": entry.calls})
        coarse = {} if entry.repeat == FULL else {"checks": 1}
        settings = self.settings.model_copy(update={"timing": timing, **coarse})
        return self.request(kernel, backend=backend, kernel_label=label, settings=settings)


#: The plan of any run.
AnyPlan = Plan | TunePlan | TournamentPlan
_TaskT = TypeVar("_TaskT", bound=Task)


def make_plan(kind: type[_TaskT], fields: Mapping[str, Any]) -> _TaskT:
    """Return the plan of a run. Its InvalidRequest names a wrong field as an option, and never repeats a source."""
    try:
        plan = kind.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequest("; ".join(_complaint(fault) for fault in error.errors())) from None
    plan.request(plan.kernel)
    if isinstance(plan, TunePlan):
        plan.halving()
    return plan


def read_plan(fields: Mapping[str, Any]) -> AnyPlan:
    """Return the plan from a run's record."""
    kinds: dict[Any, type[AnyPlan]] = {"tune": TunePlan, "tournament": TournamentPlan}
    return make_plan(kinds.get(fields.get("algorithm"), Plan), fields)


def _complaint(fault: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in fault["loc"])
    option = name if "." in name else f"--{name.replace('_', '-')}"
    shown = repr(fault["input"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{option}: {message}" + (f", not {shown}" if len(shown) <= 80 else "")
