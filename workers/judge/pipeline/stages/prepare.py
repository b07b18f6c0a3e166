"""Stage ``prepare``: static checks, which need no device, and the worker's environment."""

from __future__ import annotations

from dataclasses import dataclass

from kqueue.backends import PYTEST
from kqueue.contract import Phase, Policy
from kqueue.evidence import GivenTolerance
from workers.judge.gpu import environment
from workers.judge.pipeline import grades, pytest_run, static, tools
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.context import Context


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


def _read_sources(context: Context) -> None:
    request, policy = context.request, context.settings.policies.findings
    static.check_problem(request.problem)
    context.evidence.calls = static.calls(request.problem)
    if context.evidence.calls and context.pass_ is not None:
        raise invalid_problem("CALLS and gradients cannot be combined: state one of them")
    if context.pass_ is not None and static.world(request.problem):
        raise invalid_problem("WORLD and gradients cannot be combined: state one of them")
    given, own = context.settings.given_tolerance, static.tolerance(request.problem)
    if tolerance := given or own:
        by = "settings" if given else "problem"
        parts = [one and one.model_dump(exclude_defaults=True) for one in grades.each(tolerance)]
        listed = tuple(None if one is None else GivenTolerance(**one, by=by) for one in parts)
        if isinstance(tolerance, tuple):
            context.evidence.tolerances = listed
        else:
            [context.evidence.tolerance] = listed
    fenced = () if context.fence is None else (context.fence,)
    context.evidence.findings = fenced or None
    static.check(request.kernel)
    context.evidence.program = static.program_of(request.kernel)
    if policy is not Policy.ALLOW:
        findings = context.evidence.findings = (*fenced, *static.findings(request.kernel, request.backend))
        static.enforce(findings, policy)
