"""Stage ``prepare``: static checks, which need no device, and the worker's environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from kqueue.backends import PYTEST
from kqueue.contract import TREE_LINE, Phase, Policy, Request, named_tree
from workers.judge.gpu import environment
from workers.judge.pipeline import grades, pytest_run, static, tools
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.context import Context
from workers.judge.pipeline.evidence import Fields

#: Characters of a tree's list of files that are evidence.
_NAMED_CHARACTERS: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Prepared:
    """Result of static checks that found no fault."""

    #: Key of the environment that measurements depend on.
    environment_hash: str


def prepare(context: Context) -> Prepared:
    """Check the sources of the kernel and the problem, and this worker's tools."""
    request = context.request
    context.steps.enter(Phase.PREPARE)
    pytest_run.check(request)
    if request.backend != PYTEST:
        _read_sources(context)
    tools.require(request.backend)
    environment_hash = context.backend.environment(environment.facts(context.slot))
    context.device.begin()
    return Prepared(environment_hash)


def _trees(request: Request) -> Iterator[Fields]:
    """Yield the fields of a :class:`kqueue.evidence.EvidentTree` for each source. The candidate checks the hashes."""
    for of, source in (("kernel", request.kernel), ("problem", request.problem)):
        if (tree := named_tree(source)) is not None:
            listed, _, _ = request.tree_of(source).removeprefix(TREE_LINE).partition("\n\n")
            lines, sizes = listed.split("\n"), accumulate(len(line) + 1 for line in listed.split("\n"))
            shown = [line for line, size in zip(lines, sizes, strict=True) if size <= _NAMED_CHARACTERS]
            yield {"of": of, "hash": tree.hash, "files": len(lines), "named": shown}


def _read_sources(context: Context) -> None:
    request, policy = context.request, context.settings.policies.findings
    static.check_problem(request.problem)
    context.evidence.calls = static.calls(request.problem)
    if context.evidence.calls and context.pass_ is not None:
        raise invalid_problem("CALLS and gradients cannot be combined: state one of them")
    given, own = context.settings.given_tolerance, static.tolerance(request.problem)
    if tolerance := given or own:
        by = {"by": "settings" if given else "problem"}
        listed = [one and one.model_dump(exclude_defaults=True) | by for one in grades.each(tolerance)]
        both = (None, listed) if isinstance(tolerance, tuple) else (listed[0], None)
        context.evidence.tolerance, context.evidence.tolerances = both
    fenced = [context.fence] if context.fence is not None else []
    context.evidence.findings = fenced or None
    context.evidence.trees = [*_trees(request)] or None
    static.check(request.kernel)
    context.evidence.program = static.program_of(request.kernel)
    if policy is not Policy.ALLOW:
        findings = context.evidence.findings = fenced + static.findings(request.kernel, request.backend)
        static.enforce(findings, policy)
