"""Stage ``prepare``: static checks, which need no device, and the worker's environment."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final, Literal

from kqueue.backends import PYTEST
from kqueue.contract import TREE_LINE, Phase, Policy, Request, named_tree
from kqueue.evidence import EvidentTree, GivenTolerance
from workers.judge.gpu import environment
from workers.judge.pipeline import grades, pytest_run, static, tools
from workers.judge.pipeline.blame import invalid_problem
from workers.judge.pipeline.context import Context

#: Characters of a tree's list of files that are evidence.
_NAMED_CHARACTERS: Final = 16 << 10


def prepare(context: Context) -> None:
    """Check the sources of the kernel and the problem, and this worker's tools."""
    request = context.request
    context.steps.enter(Phase.PREPARE)
    pytest_run.check(request)
    if request.backend != PYTEST:
        _read_problem(context)
        _read_kernel(context)
    if context.earlier is None:
        tools.require(request.backend)
        context.environment_hash = context.backend.environment(environment.facts(context.slot))
        context.device.begin()


def _trees(request: Request) -> Iterator[EvidentTree]:
    """Yield the tree of each source that names one. The candidate checks the hashes."""
    sources: tuple[tuple[Literal["kernel", "problem"], str], ...] = (
        ("kernel", request.kernel),
        ("problem", request.problem),
    )
    for of, source in sources:
        if (tree := named_tree(source)) is not None:
            listed, _, _ = request.tree_of(source).removeprefix(TREE_LINE).partition("\n\n")
            lines, sizes = listed.split("\n"), accumulate(len(line) + 1 for line in listed.split("\n"))
            shown = tuple(line for line, size in zip(lines, sizes, strict=True) if size <= _NAMED_CHARACTERS)
            yield EvidentTree(of=of, hash=tree.hash, files=len(lines), named=shown)


def _read_problem(context: Context) -> None:
    request = context.request
    static.check_problem(request.problem)
    context.evidence.calls = static.calls(request.problem)
    if context.evidence.calls and context.pass_ is not None:
        raise invalid_problem("CALLS and gradients cannot be combined: state one of them")
    alone = {
        "gradients": context.pass_ is not None,
        "CALLS": context.evidence.calls,
        "check()": static.check_bound(request.problem),
    }
    if (clashes := [name for name, is_stated in alone.items() if is_stated]) and static.world(request.problem):
        raise invalid_problem(f"WORLD and {clashes[0]} cannot be combined: state one of them")
    given, own = context.settings.given_tolerance, static.tolerance(request.problem)
    if tolerance := given or own:
        by = "settings" if given else "problem"
        parts = [one and one.model_dump(exclude_defaults=True) for one in grades.each(tolerance)]
        listed = tuple(None if one is None else GivenTolerance(**one, by=by) for one in parts)
        if isinstance(tolerance, tuple):
            context.evidence.tolerances = listed
        else:
            [context.evidence.tolerance] = listed
    context.evidence.trees = tuple(_trees(request)) or None


def _read_kernel(context: Context) -> None:
    request, policy, evidence = context.request, context.settings.policies.findings, context.evidence
    if (earlier := context.earlier) is not None:
        evidence.findings, evidence.program = earlier.evidence.findings, earlier.evidence.program
        return
    fenced = () if context.fence is None else (context.fence,)
    evidence.findings = fenced or None
    static.check(request.kernel)
    evidence.program = static.program_of(request.kernel)
    if policy is not Policy.ALLOW:
        findings = evidence.findings = (*fenced, *static.findings(request.kernel, request.backend))
        static.enforce(findings, policy)
