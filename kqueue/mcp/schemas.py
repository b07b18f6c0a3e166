"""The arguments, answers and errors of tools. Agents read the descriptions of their fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal, ParamSpec, Self, TypeVar, cast, get_type_hints
from uuid import UUID

from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel, Field

from kqueue.contract import BackendName, Verdict
from kqueue.errors import AccessRefused, InvalidRequest, KqueueError, ServiceError, UnknownEvaluation
from kqueue.mcp.connection import Call
from kqueue.text import clean

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Maximum number of kernels of one submission and of evaluations of one wait.
MOST: Final = 100
#: Maximum number of rows of one list.
MOST_ROWS: Final = 50

ProblemSource = Annotated[
    str,
    Field(
        description="PyTorch source with `class Model`, `get_inputs()` and `get_init_inputs()`, or `sha256:` and the "
        "hash of a stored problem, which `problems` lists. At most 1 MiB."
    ),
]
KernelSource = Annotated[str, Field(description="Python source with `class ModelNew`. At most 1 MiB.")]
Language = Annotated[BackendName, Field(description="The kernel's language. `torch` is plain PyTorch.")]
LaneName = Annotated[
    str,
    Field(description="`auto` (a GPU if there is one, else the CPU), `gpu`, `gpu.<model>` like `gpu.h200`, or `cpu`."),
]
SettingsFields = Annotated[
    dict[str, Any] | None,
    Field(
        description='Settings such as {"precision": "bf16"} or {"timing": {"purpose": "check"}}. The resource '
        "kqueue://settings lists all. By default fp32, 5 input sets and 100 timed calls."
    ),
]
Label = Annotated[str | None, Field(description="A name that users see in lists.")]
PriorityName = Annotated[
    Literal["interactive", "batch"],
    Field(description="`interactive` is judged before all `batch` work. Some tokens allow `batch` only."),
]
Fresh = Annotated[bool, Field(description="Judge again, even if an equal evaluation has a verdict.")]
Timeout = Annotated[
    float,
    Field(ge=0, le=600, description="Seconds to wait. Then the evaluation continues, and `wait` returns its verdict."),
]
EvaluationId = Annotated[UUID, Field(description="The evaluation's id from `judge` or `submit`.")]
ProblemName = Annotated[str | None, Field(description="A problem's label, or the beginning of its hash.")]
RowLimit = Annotated[int, Field(ge=1, le=MOST_ROWS)]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """The arguments of all tools that submit kernels for a problem."""

    problem: ProblemSource
    lane: LaneName = "auto"
    settings: SettingsFields = None
    problem_label: Label = None

    def shared(self) -> dict[str, Any]:
        """Return the fields of requests that are the same for all kernels."""
        return given(**{one.name: getattr(self, one.name) for one in fields(Submission)})


class Judged(BaseModel):
    """One evaluation."""

    evaluation_id: str
    state: Annotated[str, Field(description="`done`, `queued`, `running`, or `open` for one of the last two.")]
    category: Annotated[str | None, Field(description="`passed` or the failure. Null without a verdict.")] = None
    blame: Annotated[str | None, Field(description="`none`, `candidate`, `problem`, `fleet` or `nobody`.")] = None
    passed: bool | None = None
    runtime_ms: float | None = None
    baseline_ms: Annotated[float | None, Field(description="The reference's time.")] = None
    speedup: float | None = None
    reused_from: Annotated[
        str | None, Field(description="The equal evaluation whose verdict was reused. Its times are not new.")
    ] = None

    @classmethod
    def of(cls, verdict: Verdict, **more: Any) -> Self:
        """Return the fields of a verdict. ``more`` has the fields of a subclass."""
        same = {name: getattr(verdict, name) for name in ("passed", "runtime_ms", "baseline_ms", "speedup")}
        return cls(
            evaluation_id=str(verdict.evaluation_id),
            state="done",
            category=verdict.category,
            blame=verdict.blame,
            reused_from=verdict.reused_from and str(verdict.reused_from),
            **same,
            **more,
        )


class Reported(Judged):
    """One evaluation with its report."""

    report: Annotated[str, Field(description="The same text as in the content.")]


class Waited(BaseModel):
    """Several evaluations, in the order of the ids."""

    done: int
    evaluations: list[Judged]


class Submitted(BaseModel):
    """The result of one kernel of a submission: either an id or an error."""

    evaluation_id: str | None
    error: Annotated[str | None, Field(description="The reason why it was refused.")]


class Submissions(BaseModel):
    """The results of the kernels, in the order of the kernels."""

    submitted: list[Submitted]


class Rows(BaseModel):
    """A list. Its labels come from other users."""

    rows: list[dict[str, Any]]
    cursor: Annotated[str | None, Field(description="Cursor of the next page, or null on the last page.")] = None


def flat(tool: Callable[[Call, _T], Awaitable[CallToolResult]]) -> Callable[..., Awaitable[CallToolResult]]:
    """Return a tool that takes each field of ``tool``'s dataclass of arguments as an argument, required ones first."""
    signature = inspect.signature(tool, eval_str=True)
    call, arguments = signature.parameters.values()
    kind = arguments.annotation
    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in sorted(fields(kind), key=lambda one: one.default is not MISSING)
    ]

    @functools.wraps(tool)
    async def wrapped(call: Call, **fields: Any) -> CallToolResult:
        return await tool(call, kind(**fields))

    cast("Any", wrapped).__signature__ = signature.replace(parameters=[call, *parameters])
    return wrapped


def with_advice(tool: Callable[_P, Awaitable[_T]]) -> Callable[_P, Awaitable[_T]]:
    """Return a tool whose errors contain advice to the agent."""

    @functools.wraps(tool)
    async def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await tool(*args, **kwargs)
        except KqueueError as error:
            raise ToolError(_advice(error)) from None

    return wrapped


def _advice(error: KqueueError) -> str:
    message = clean(error)
    match error:
        case AccessRefused():
            return f"{message}. This is about this session's token and not the kernel: report it to the user."
        case ServiceError():
            return f"{message}. This says nothing about the kernel. Nothing is lost: call again in a minute."
        case UnknownEvaluation():
            return "no evaluation has this id: use one that `judge` or `submit` returned."
        case InvalidRequest():
            return f"{message}. Nothing was submitted: correct it and call again."
        case _:
            return message


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def result(text: str, content: BaseModel) -> CallToolResult:
    """Return a tool's answer: a text for models, and structured content for programs."""
    return CallToolResult(
        content=[TextContent(type="text", text=text)], structured_content=content.model_dump(mode="json")
    )
