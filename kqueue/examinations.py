"""Examinations of one kernel: the requests to a fleet or a local judge, and the results as text.

A sanitizer slows a kernel down at least ten times, so the problem's sizes are reduced for it if that does not change
the kernel's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kqueue import shapes
from kqueue.charts import Roofline, Spot
from kqueue.contract import Examination, Request, Sanitizer, parse_request
from kqueue.evidence import Evidence, KernelProfile, Profile, Sanitized, SanitizerFinding

#: Maximum size in a small problem.
SMALL: Final = 128


def sanitizing(request: Request, tools: Sequence[Sanitizer], *, whole: bool = False) -> list[Request]:
    """Return the requests to sanitize a kernel, to be judged until one has the kernel's own category.

    The last one has the kernel's own sizes. One with small sizes precedes it, unless ``whole`` is True or the sizes are
    small already. Raise InvalidRequest for the lane ``cpu``.
    """
    request = _examined(request, Examination(sanitize=tuple(tools)), timing=request.settings.timing.off())
    small = request.model_copy(update={"problem": request.problem if whole else smaller(request.problem)})
    return [request] if small == request else [small, request]


def profiling(request: Request) -> list[Request]:
    """Return the one request to profile a kernel. Raise InvalidRequest for the lane ``cpu``."""
    return [_examined(request, Examination(profile=True))]


def _examined(request: Request, examination: Examination, **settings: Any) -> Request:
    changed = request.settings.model_copy(update={"examine": examination} | settings)
    return parse_request(dict(request) | {"settings": changed, "reuse": False})


def is_profiled(evidence: Evidence) -> bool:
    """Return True if there is a profile of a kernel."""
    return evidence.profile is not None and bool(evidence.profile.kernels)


def smaller(problem: str) -> str:
    """Return a problem with its sizes halved until they are at most 128. The name of a stored problem is unchanged."""
    numbers = shapes.sizes_of(problem)
    return shapes.with_sizes(problem, numbers, [_halved(number.value) for number in numbers])


def _halved(size: int) -> int:
    while size > SMALL:
        size //= 2
    return size


# As a picture and as text -----------------------------------------------------------------------------


def roofline(title: str, profiles: Mapping[str, Profile]) -> Roofline:
    """Return the roofline of profiles on one GPU, by the kernels' names. It is empty without counters."""
    with_peaks = [one for one in profiles.values() if one.peak_gbs is not None and one.peak_gflops is not None]
    spots = [
        Spot(f"{label}: {one.name}" if len(profiles) > 1 else one.name, one.gflops / one.dram_gbs, one.gflops)
        for label, profile in profiles.items()
        for one in profile.kernels
        if one.gflops and one.dram_gbs
    ]
    return Roofline(
        title,
        max((one.peak_gbs or 0.0 for one in with_peaks), default=0.0),
        max((one.peak_gflops or 0.0 for one in with_peaks), default=0.0),
        spots,
    )


def lines(evidence: Evidence) -> Iterator[str]:
    """Yield the tools' results as text. Clean it before it is shown, because it quotes the kernel."""
    for run in evidence.sanitized or ():
        yield from _of_run(run)
    if evidence.profile is not None:
        yield from _of_profile(evidence.profile)


def compared(first: Profile, second: Profile) -> Iterator[str]:
    """Yield the differences between the calls of two kernels, with the second's share of the first."""
    for name, unit, one, other in (
        ("time on the GPU", "ms", _sum(first, "duration_ms"), _sum(second, "duration_ms")),
        ("launches", "", _sum(first, "launches"), _sum(second, "launches")),
        ("memory traffic", "bytes", _sum(first, "dram_bytes"), _sum(second, "dram_bytes")),
        ("spills", "", _sum(first, "spills"), _sum(second, "spills")),
    ):
        if one is not None and other is not None:
            ratio = f", {other / one:.3g}x" if one > 0 else ""
            yield f"{name}: {one:.4g} and {other:.4g} {unit}".rstrip() + ratio


def _sum(profile: Profile, name: str) -> float | None:
    values = [getattr(kernel, name) for kernel in profile.kernels]
    return sum(values) if values and None not in values else None


def _of_run(run: Sanitized) -> Iterator[str]:
    locations = len(run.findings)
    took = f"{run.seconds:.1f} s"
    if run.findings:
        errors = "" if run.errors is None else f"{run.errors} errors "
        yield f"{run.tool}: {errors}at {locations} place{'s' if locations > 1 else ''} ({took})"
    elif run.error is None:
        yield f"{run.tool}: no findings ({took})"
    for finding in run.findings:
        yield from _of_finding(finding)
    if run.error is not None:
        yield f"{run.tool}: {'incomplete' if run.findings else 'no result'}: {run.error}"


def _of_finding(finding: SanitizerFinding) -> Iterator[str]:
    where = f" in {finding.kernel}" if finding.kernel else ""
    if finding.file:
        where += f" at {finding.file}" + ("" if finding.line is None else f":{finding.line}")
    yield f"  {finding.kind}{where}" + (f", {finding.count} times" if finding.count > 1 else "")
    details: list[str] = []
    if finding.thread is not None:
        details.append(f"thread {finding.thread}" + ("" if finding.block is None else f" of block {finding.block}"))
    if finding.address is not None:
        details.append(f"address {finding.address}")
    if finding.distance_bytes is not None and finding.allocation_bytes is not None:
        details.append(f"{_distance(finding.distance_bytes)} an allocation of {finding.allocation_bytes} bytes")
    if details:
        yield f"    the first: {', '.join(details)}"
    elif finding.detail:
        yield f"    {finding.detail}"


def _distance(distance_bytes: int) -> str:
    if distance_bytes == 0:
        return "begins within"
    far = abs(distance_bytes)
    return f"{far} byte{'' if far == 1 else 's'} {'after' if distance_bytes > 0 else 'before'}"


def _of_profile(profile: Profile) -> Iterator[str]:
    if not profile.kernels:
        yield f"profile: {profile.error or 'no kernel ran'}"
        return
    by = "Nsight Compute" if profile.by == "ncu" else "CUPTI, without counters"
    yield f"profile of one call, by {by} ({profile.seconds:.1f} s)"
    if profile.error is not None:
        yield f"  {profile.error}"
    for kernel in profile.kernels:
        yield from _of_kernel(kernel, profile)


def _of_kernel(kernel: KernelProfile, profile: Profile) -> Iterator[str]:
    launches = "" if kernel.launches == 1 else f", {kernel.launches} launches"
    shape = "" if kernel.grid is None or kernel.block is None else f", grid {kernel.grid} of {kernel.block} threads"
    yield f"  {kernel.name}: {kernel.duration_ms:.4g} ms{launches}{shape}"
    peaks = [
        (kernel.dram_bytes, "memory: {:.4g} bytes"),
        (kernel.dram_gbs, "{:.4g} GB/s"),
        (profile.peak_gbs if kernel.dram_gbs is not None else None, "peak {:.4g} GB/s"),
        (kernel.dram_share, "{:.0%} of it"),
        (kernel.l2_hits, "L2 had {:.0%} of accesses"),
    ]
    compute = [
        (kernel.gflops, "compute: {:.4g} GFLOP/s"),
        (profile.peak_gflops if kernel.gflops is not None else None, "peak {:.4g} GFLOP/s"),
        (kernel.compute_share, "busiest unit {:.0%}"),
        (kernel.tensor_share, "tensor cores {:.0%}"),
    ]
    limit = "" if kernel.occupancy_limit is None else f", limited by {kernel.occupancy_limit}"
    fill = [
        (kernel.occupancy, f"occupancy: {{:.0%}}{limit}"),
        (kernel.registers, "{} registers a thread"),
        (kernel.shared_bytes, "{} bytes of shared memory a block"),
        (kernel.spills, "{} spills"),
    ]
    for parts in (peaks, compute, fill):
        if values := [text.format(value) for value, text in parts if value is not None]:
            yield f"    {', '.join(values)}"
    if kernel.stalls:
        yield "    warps wait for: " + ", ".join(f"{stall.reason} {stall.share:.0%}" for stall in kernel.stalls)
    for line in kernel.lines:
        yield f"    {line.share:.0%} at {line.file}:{line.line}" + (f": {line.text}" if line.text else "")
