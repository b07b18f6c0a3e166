"""Commands with a URL and a token: their output is the same as with the database."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from kqueue import charts
from kqueue.categories import Category
from kqueue.config import load
from kqueue.contract import Request
from kqueue.local.servers import Valkey
from kqueue.states import Spent
from kqueue.store import evaluations, gpus, readable, searches, tokens, workers
from kqueue.store.budgets import Budget
from kqueue.store.engine import connect
from kqueue.store.tokens import Scope
from tests.cli.command import KERNEL, PROBLEM, Cli, Done, judge, submit
from tests.http.standin import Served
from tests.samples import ended, examined, timed
from tests.services import Server
from tests.store.steps import change

OUTCOMES = {
    "fast": timed(0.5),
    "slow": timed(2.0),
    "broken": ended(Category.WRONG_VALUES, log="line 1\nline 2\n"),
    "fault": ended(Category.REFERENCE_ERROR),
    "seen": examined("<kernel>"),
}
GPU = "GPU-00000000-0000-0000-0000-000000000000"


@dataclass
class Both:
    """One fleet, and commands that reach it by the database or over HTTP. ``names`` replace words of commands."""

    engine: Engine
    by_database: Cli
    over_http: Cli
    names: dict[str, str]


@pytest.fixture(scope="module")
def both(server: Server, valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """A fleet with verdicts of several kinds, a search, GPUs and a token with a budget."""
    home, url = tmp_path_factory.mktemp("fleet"), server.clone()
    config = load(database_url=url, redis_url=valkey.url, home=home, scratch=home, lease_s=3600, http_access_log=False)
    engine = connect(url, application="tests")
    served = Served(config)
    judging, busy, gpu = uuid4(), uuid4(), uuid4()
    for name, one, device in (("cpu-0@here", judging, "cpu"), ("cpu-1@here", busy, "cpu"), ("gpu-0@here", gpu, GPU)):
        workers.register(engine, id=one, name=name, host="here", pid=1, lanes=[device[:3].lower()], device=device)
    change(engine, "UPDATE workers SET heartbeat_at = now() + interval '1 hour'")
    gpus.register(engine, host="here", index=0, uuid=GPU, name="NVIDIA H200")
    gpus.see_memory(engine, GPU, booked_bytes=1 << 30, capacity_bytes=2 << 30, waiting=[("gpu-0", 1 << 20, 5.0)])
    gpus.drain(engine, GPU, reason="dust")
    token, secret = tokens.create(engine, "owner", (Scope.PROBLEMS,), budget=Budget(1000.0, 3600.0, Spent.REFUSE))
    ids = submit(engine, *OUTCOMES, batch="one")
    ids += submit(engine, "slow", "fast", batch="two", problem_label="again")
    change(engine, "UPDATE evaluations SET producer = :it WHERE batch = 'two'", it=f"token:{token.id}")
    judge(engine, judging, OUTCOMES.__getitem__)
    plan = {"problem": PROBLEM, "kernel": "class ModelNew: ...", "backend": "torch", "proposer": "recorded"}
    plan |= {"given": "x", "metrics": ["speedup"], "algorithm": "PS"}
    run = searches.create(engine, "run", plan)
    searches.begin_step(engine, run.id, 0, [{"number": n, "parent": None, "kernel": "k"} for n in range(3)], None)
    for number in range(3):
        searches.ended(engine, run.id, number, category="passed", scores={"speedup": 1.5 + number})
    searches.update_step(engine, run.id, 0, ended=True, best=2)
    searches.create(engine, "unreadable", {})
    running, queued = submit(engine, "running", "queued", batch="open")
    assert evaluations.claim(engine, running, worker_id=busy, lease_s=3600) is not None
    workers.note_steps(engine, {(running, 1): "alone_measure"})
    labels = (*OUTCOMES, "slow2", "fast2", "running", "queued")
    names = {label: str(one) for label, one in zip(labels, (*ids, running, queued), strict=True)}
    names["hash"] = Request(problem=PROBLEM, kernel="k", backend="torch", lane="cpu").problem_hash
    folders = [tmp_path_factory.mktemp(name) for name in ("database", "http")]
    nowhere = {"KQUEUE_HOME": str(folders[1] / "home"), "KQUEUE_DATABASE_URL": "", "KQUEUE_REDIS_URL": ""}
    remote = {**nowhere, "KQUEUE_URL": served.url, "KQUEUE_TOKEN": secret}
    yield Both(engine, Cli(folders[0], config.environment()), Cli(folders[1], remote), names)
    served.close()
    engine.dispose()
    server.drop(url)


#: Commands that only read, of all reports. A name in braces is an evaluation or a hash.
COMMANDS = (
    "show {broken} --log --source", "show {seen} --json", "show {queued}", "logs {running} --json", "show ffff",
    "diff {fast} {broken} --json", "results --json", "results --best", "results --state queued --where lane=cpu",
    "compare one two --json", "cost", "cancel --where lane=gpu", "top --once", "gpu list",
    "wait {fast} {broken} --json", "wait {queued} --timeout 0.1", "watch two {fast}",
    "plot {hash} --out -", "plot one --kind fast-p --out -", "plot run --out -", "search list",
    "search show run --json", "export out --json",
)  # fmt: skip
MORE = (
    "show {fast}", "show {fault} --json --source", "show {running}", "show {queued} --json", "show no-id",
    "logs {broken}", "diff {fast} {slow}", "results", "results --limit 2", "results --since 1h",
    "results --best --json", "results --where category=wrong_values --json", "results --state running --json",
    "results --problem again", "compare one two", "compare one nothing", "cost --json", "cost --by batch",
    "cost --by day --json", "cancel --batch nothing", "cancel ffff", "gpu list --json --host here", "wait --batch one",
    "wait --batch two", "wait --batch nothing",
    "wait {fault}", "watch one --json", "watch nothing", "watch open --timeout 0",
    "plot {hash} --kind roofline --out -", "plot one --out -",
    "plot {seen} --out -", "plot {fast} --kind roofline --out -", "plot nothing", "search list --json",
    "search show run", "search show run --proposal 1", "search show run --watch", "search list --limit 1",
    "search compare run unreadable --json", "search show unreadable", "search show nothing", "problems unshare ffffff",
    "export labelled --label as", "autopsy {fault}", "sanitize {queued}", "plot {hash} --kind leaderboard --out -",
)  # fmt: skip
#: Commands that need the database.
OPERATORS = (
    "token list", "audit", "probe list", "gpu drain 0", "db check", "sweep", "owner erase ada --yes",
    "search resume run", "open", "export out --owner ada", "problems share {hash} --owner ada",
)  # fmt: skip


def _plain(done: Done) -> tuple[int, str, list[str]]:
    """Return the end of a command. Durations, last digits and orders that differ between two calls are left out."""
    words = re.sub(r"\d\d:\d\d:\d\dZ|\b[\d.]+ ?s\b", "TIME", f"{done.stdout}\0{done.stderr}")
    words = re.sub(r"\d+\.\d{5,}", lambda one: f"{float(one[0]):.4f}", re.sub(" +", " ", words.replace("─", "")))
    out, _, err = words.partition("\0")
    return done.returncode, out, sorted(err.splitlines())


@pytest.mark.parametrize("commands", [COMMANDS, pytest.param(MORE, marks=pytest.mark.nightly)], ids=["some", "more"])
def test_every_command_says_the_same(both: Both, monkeypatch: pytest.MonkeyPatch, commands: tuple[str, ...]) -> None:
    """Output, messages and exit status are equal, with pages of two rows too."""
    for report, (ordered, _) in readable.PAGES.items():
        monkeypatch.setitem(readable.PAGES, report, (ordered, 2))
    # Drawing takes half a second.
    monkeypatch.setattr(charts, "render", lambda chart, **_: json.dumps(asdict(chart), default=str).encode())
    for command in commands:
        words = command.format(**both.names).split()
        assert _plain(both.over_http(*words)) == _plain(both.by_database(*words)), command


def test_the_status_leaves_out_redis(both: Both) -> None:
    """A holder of a token needs no Redis. All else is equal."""
    [here], [there] = (cli.told("status") for cli in (both.by_database, both.over_http))
    assert (here.pop("broker")["reachable"], there.pop("broker")) == (True, None)
    assert there == here
    texts = [cli("status").stdout for cli in (both.over_http, both.by_database)]
    assert ["redis" in text for text in texts] == [False, True]


def test_work_is_submitted_shared_and_cancelled(both: Both) -> None:
    """A URL and a token suffice for an evaluation's life, and for problems of the owner."""
    cli = both.over_http
    cli.write("relu.py", PROBLEM)
    cli.write("mine.py", KERNEL)
    submitted = cli.told("submit", "-p", "relu.py", "-k", "mine.py", "--lane", "cpu", "--batch", "mine")
    done = cli("cancel", "--batch", "mine")
    assert (done.returncode, done.stdout) == (0, "cancelled 1\n"), done.stderr
    assert cli("cancel", submitted[0]["id"]).stdout == "cancelled 0, 1 had a verdict already\n"
    shared = cli("problems", "share", both.names["hash"][:12], "--name", "mine", "--leaderboard")
    assert shared.stdout == f"shared sha256:{both.names['hash']} mine\n", shared.stderr
    assert cli("problems", "unshare", both.names["hash"]).returncode == 0
    again = cli("problems", "unshare", both.names["hash"])
    assert (again.returncode, "is not shared by this owner" in again.stderr) == (2, True), again.stderr


def test_what_needs_the_database_says_so(both: Both) -> None:
    """An operator's command ends with 3 and one line. So does a command without a token."""
    for command in OPERATORS:
        done = both.over_http(*command.format(**both.names).split())
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), command
        assert "this needs KQUEUE_DATABASE_URL" in done.stderr, command
    done = both.over_http("results", KQUEUE_TOKEN="")
    assert (done.returncode, "set KQUEUE_TOKEN" in done.stderr) == (3, True), done.stderr
