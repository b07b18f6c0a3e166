"""`kqueue sanitize` and `kqueue profile`: requests to the fleet, output and exit statuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from kqueue.contract import Request
from kqueue.evidence import Evidence, KernelProfile, Profile, Sanitized, SanitizerFinding
from kqueue.store import evaluations
from tests.cli.command import Cli, Judgement, judge
from tests.samples import passed
from tests.store.steps import change, count, lasting_worker

PROBLEM = "SIZE = 4096\nclass Model: ...\n"
KERNEL = "class ModelNew: ...  # mine\n"
FOUND = Sanitized(
    tool="memcheck",
    errors=2,
    findings=(SanitizerFinding(kind="Invalid __global__ read", kernel="\x1b[31mk", file="kernel.py", line=8, count=2),),
    seconds=2.0,
)
CLEAN = Sanitized(tool="racecheck", errors=0, seconds=2.0)
UNTOLD = Sanitized(tool="initcheck", error="it did not end within 300 s", seconds=300.0)


def profile(ms: float) -> Profile:
    kernel = KernelProfile(name="k", launches=1, duration_ms=ms, dram_gbs=1000.0, gflops=50.0)
    return Profile(by="ncu", kernels=(kernel,), peak_gbs=4000.0, peak_gflops=60_000.0, seconds=3.0)


@pytest.fixture
def gpu(engine: Engine) -> UUID:
    """Register a live worker of the lane `gpu` in the database."""
    return lasting_worker(engine, "gpu", "GPU-0")


def known(engine: Engine, gpu: UUID, evidence: Evidence, label: str = "mine") -> str:
    asked = Request(problem=PROBLEM, kernel=f"{KERNEL}# {label}\n", backend="triton", lane="gpu", kernel_label=label)
    [done] = evaluations.submit(engine, [asked])
    judge(engine, gpu, lambda _: passed(evidence=evidence))
    return str(done.evaluation_id)


def sources(engine: Engine, batch: str) -> list[tuple[str, bool]]:
    query = (
        "SELECT p.source, e.settings->'timing'->>'purpose' = 'check' FROM evaluations e"
        " JOIN problems p ON p.hash = e.problem_hash WHERE e.batch = :batch ORDER BY e.submitted_at"
    )
    with engine.connect() as connection:
        return [(source, bool(untimed)) for source, untimed in connection.execute(text(query), {"batch": batch})]


@pytest.mark.parametrize(("runs", "status"), [((CLEAN,), 0), ((FOUND, UNTOLD), 1), ((CLEAN, UNTOLD), 3), ((), 3)])
def test_an_evaluation_is_sanitised_by_the_fleet(
    cli: Cli, engine: Engine, gpu: UUID, judging: Callable[[Judgement], None], runs: tuple[Sanitized, ...], status: int
) -> None:
    """An id is enough, the input sizes are reduced, and the status reports findings."""
    identity = known(engine, gpu, Evidence())
    judging(lambda _: passed(evidence=Evidence(sanitized=runs)))
    done = cli("sanitize", identity[:13])
    assert done.returncode == status, done.stderr
    assert ("Invalid __global__ read in \\x1b[31mk at kernel.py:8, 2 times" in done.stdout) == (FOUND in runs)
    assert ("sizes were reduced" in done.stderr) == bool(runs)
    assert sources(engine, f"sanitize-{identity}") == [("SIZE = 128\nclass Model: ...\n", True)]


def test_a_profile_that_is_there_is_shown(cli: Cli, engine: Engine, gpu: UUID) -> None:
    """A stored profile is shown, or two are compared and drawn in one picture, without a new evaluation."""
    one = known(engine, gpu, Evidence(profile=profile(0.5)), "one")
    other = known(engine, gpu, Evidence(profile=profile(0.25)), "other")
    done = cli("profile", one, "--against", other, "--out", "roof.svg")
    assert done.returncode == 0, done.stderr
    assert "time on the GPU: 0.5 and 0.25 ms, 0.5x" in done.stdout
    assert "one: k: 25% of the roof" in (cli.directory / "roof.svg").read_text()
    drawn = cli("plot", one, "--kind", "roofline", "--out", "one.svg")
    assert drawn.returncode == 0, drawn.stderr
    # As if the profile had been requested with the evaluation.
    change(engine, "UPDATE evaluations SET settings = jsonb_set(settings, '{examine,profile}', 'true')")
    problem = Request(problem=PROBLEM, kernel="k", backend="triton", lane="gpu").problem_hash
    of_both = cli("plot", problem, "--kind", "roofline", "--out", "-")
    assert (of_both.returncode, "one: k: 25% of the roof" in of_both.stdout) == (0, True), of_both.stderr
    assert json.loads(cli("profile", one, "--json").stdout)["kernels"][0]["profile"]["kernels"][0]["duration_ms"] == 0.5
    assert count(engine, "evaluations") == 2


def test_a_kernel_is_profiled_once(cli: Cli, engine: Engine, gpu: UUID, judging: Callable[[Judgement], None]) -> None:
    """A profile uses the unchanged problem and is timed. Without counters the status is 3."""
    identity = known(engine, gpu, Evidence())
    judging(lambda _: passed(evidence=Evidence(profile=Profile(by="ncu", error="there is no GPU", seconds=0))))
    done = cli("profile", identity)
    assert done.returncode == 3, done.stderr
    assert "profile: there is no GPU" in done.stdout
    assert sources(engine, f"profile-{identity}") == [(PROBLEM, False)]
    with engine.connect() as connection:
        again = connection.scalar(text("SELECT id FROM evaluations WHERE batch LIKE 'profile-%'"))
    assert cli("profile", str(again)).returncode == 3
    assert len(sources(engine, f"profile-{again}")) == 1, "what tells nothing is no profile"


def test_what_cannot_be_examined(cli: Cli, engine: Engine, gpu: UUID, worker: UUID) -> None:
    """Bad arguments exit with 2. A timeout exits with 4 and cancels the evaluation."""
    identity = known(engine, gpu, Evidence())
    for arguments, said in (
        (("sanitize", identity, "--tool", "leakcheck"), "--tool leakcheck: use one of memcheck"),
        (("profile", identity, "--lane", "gpu"), "give --problem too"),
        (("sanitize", "mine.py", "--problem", "relu.py", "--lane", "cpu"), "another lane than cpu"),
        (("profile", identity, "--out", "roof.gif"), "must end in .svg or .png"),
    ):
        done = cli(*arguments)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert cli("sanitize", identity, "--timeout", "1").returncode == 4
    assert count(engine, "evaluations", "state <> 'done'") == 0
