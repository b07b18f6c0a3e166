"""`kqueue submit`: accepted input, refusals and exit statuses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text

from kqueue.categories import Category
from kqueue.contract import MAX_SOURCE_BYTES
from tests.cli.command import KERNEL, PROBLEM, Cli, Judgement, judge
from tests.samples import ended, passed
from tests.waiting import until

MINE = ("submit", "-p", "relu.py", "mine.py", "-b", "torch")


def lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def stored(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT * FROM evaluations ORDER BY submitted_at, kernel_label")).all())


def test_options_become_the_evaluations_settings(cli: Cli, engine: Engine, worker: UUID) -> None:
    """--set overrides the settings of the file, and the short options override both."""
    cli.write("settings.json", '{"seed": 7, "deadlines": {"check_s": 9, "load_s": 8}, "timing": {"warmup": 3}}')
    [line] = cli.told(
        *("submit", "--problem", "relu.py", "--kernel", "mine.py", "--backend", "torch"),
        *("--settings", "settings.json", "--set", "deadlines.check_s=5", "--precision", "fp16", "--checks", "2"),
        *("--no-timing", "--calls", "50", "--batch", "b", "--idempotency-key", "k", "--queue-wait", "60"),
    )
    [row] = stored(engine)
    known = {"input": "mine.py", "id": str(row.id), "created": True, "problem_label": "relu", "kernel_label": "mine"}
    assert line == known | {"error": None, "verdict": None}
    assert (row.problem_label, row.kernel_label, row.lane, row.batch) == ("relu", "mine", "cpu", "b")
    settings = row.settings
    assert (settings["seed"], settings["precision"], settings["checks"]) == (7, "fp16", 2)
    assert (settings["deadlines"]["check_s"], settings["deadlines"]["load_s"]) == (5, 8)
    assert settings["timing"] | {"purpose": "check", "calls": 50, "warmup": 3} == settings["timing"]
    assert (row.expires_at - row.submitted_at).total_seconds() == 60


def test_a_stored_problem_is_named_by_its_hash(cli: Cli, engine: Engine, worker: UUID) -> None:
    """`--problem sha256:HASH` selects a stored problem, and the error names an unknown one."""
    kernel = ("--kernel", "mine.py", "--backend", "torch", "--json")
    assert cli("submit", "--problem", "relu.py", *kernel).returncode == 0
    [row] = stored(engine)
    assert cli("submit", "--problem", f"sha256:{row.problem_hash}", *kernel).returncode == 0
    assert [one.problem_hash for one in stored(engine)] == [row.problem_hash] * 2
    done = cli("submit", "--problem", f"sha256:{'0' * 64}", *kernel)
    assert (done.returncode, "unknown problem sha256:000" in done.stdout + done.stderr) == (2, True)


def test_the_same_key_again_gives_the_same_evaluation(cli: Cli, engine: Engine, worker: UUID) -> None:
    """An idempotency key returns the existing evaluation and a note, and refuses another kernel."""
    command = (*MINE, "--idempotency-key", "k")
    [first], [second] = cli.told(*command), cli.told(*command)
    assert (first["created"], second["created"], second["id"]) == (True, False, first["id"])
    cli.write("mine.py", KERNEL + "# changed\n")
    third = cli(*command)
    assert third.returncode == 2
    assert "mine.py: idempotency_key: 'k' was used for another problem, kernel or lane" in third.stderr
    assert len(stored(engine)) == 1


def test_folders_and_globs_and_bad_files_among_good_ones(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Each file is submitted once, and the error names a bad file without affecting the rest."""
    for name in ("ks/b.py", "ks/a.py", "deep/er/c.py"):
        cli.write(name, KERNEL + f"# {name}\n")
    large = "#" * (MAX_SOURCE_BYTES + 1)
    for name, source in {"latin": b"x = '\xe9'\n", "empty": " \n", "large": large, "nul": "x = '\0'\n"}.items():
        cli.write(f"bad/{name}.py", source)
    done = cli(
        *("submit", "--problem", "relu.py", "--backend", "torch", "--json", "--kernel", "ks", "--kernel", "ks/a.py"),
        *("--kernel", "deep/**/*.py", "--kernel", "bad", "missing.py"),
    )
    assert done.returncode == 2
    shown = lines(done.stdout)
    assert [line["input"] for line in shown] == [
        *("ks/a.py", "ks/b.py", "deep/er/c.py"),
        *("bad/empty.py", "bad/large.py", "bad/latin.py", "bad/nul.py", "missing.py"),
    ]
    assert [line["kernel_label"] for line in shown[:3]] == ["a", "b", "c"]
    assert [line["id"] is not None for line in shown] == [True] * 3 + [False] * 5
    assert sorted(str(row.id) for row in stored(engine)) == sorted(line["id"] for line in shown[:3])
    assert done.stderr.splitlines() == [
        "kqueue: bad/empty.py: the file is empty",
        f"kqueue: bad/large.py: larger than {MAX_SOURCE_BYTES} bytes, the limit for a source",
        "kqueue: bad/latin.py: not UTF-8 text (byte 0xe9 at offset 5): save it as UTF-8",
        "kqueue: bad/nul.py: kernel: the kernel's source holds a NUL character",
        "kqueue: missing.py: No such file or directory",
    ]


def test_a_bad_line_does_not_spoil_the_others(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Each line of JSON is independent, and errors have the line's number."""
    good = {"problem": PROBLEM, "kernel": KERNEL, "backend": "torch"}
    cli.write("lists/sub/own.py", KERNEL + "# own\n")
    cases: list[tuple[bytes, str | None]] = [
        (json.dumps(good).encode(), None),
        (b"{nonsense", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"kernel": "\xff"}', "not UTF-8 text (byte 0xff at offset 12)"),
        (json.dumps(good | {"backend": "fortran"}).encode(), "backend: Input should be 'cpp', 'cuda'"),
        (json.dumps(good | {"kernel": ""}).encode(), "kernel: the kernel's source is empty"),
        (json.dumps(good | {"kernel": "\ud800"}).encode(), "kernel: "),
        (json.dumps(good | {"colour": "red"}).encode(), "colour: there is no such field"),
        (json.dumps(good | {"settings": {"checks": 0}}).encode(), "settings.checks: "),
        (json.dumps(good | {"settings": 7}).encode(), "settings: "),
        (json.dumps(good | {"kernel_file": "x.py"}).encode(), "kernel and kernel_file are both given"),
        (b'{"kernel_file": 3, "backend": "torch"}', "kernel_file: give a path"),
        (b'{"kernel_file": "gone.py", "backend": "torch"}', "gone.py: No such file or directory"),
        (json.dumps(good | {"lane": "gpu"}).encode(), "no live worker serves gpu"),
        (json.dumps(good | {"lane": "tpu"}).encode(), "unknown lane 'tpu'"),
        (json.dumps(good | {"backend": "cuda"}).encode(), "no live worker serves gpu, which cuda kernels"),
        (json.dumps(good | {"backend": "cuda", "lane": "cpu"}).encode(), "cannot be judged on the lane cpu"),
        (b'{"kernel_file": "sub/own.py", "settings": {"checks": 3}}', None),
    ]
    file = cli.write("lists/all.jsonl", b"\n\n".join(line for line, _ in cases))
    done = cli("submit", "--jsonl", str(file), "--json", "--problem", "relu.py", "--set", "seed=1")
    assert done.returncode == 2
    shown = lines(done.stdout)
    assert [line["input"] for line in shown] == [f"line {2 * place + 1}" for place in range(len(cases))]
    for line, (raw, fault) in zip(shown, cases, strict=True):
        assert (line["id"] is None) == (fault is not None), (raw[:80], line)
        assert (fault or "") in (line["error"] or ""), (raw[:80], line)
    assert len(done.stderr.splitlines()) == len(cases) - 2
    own, inline = stored(engine)
    assert (own.kernel_label, own.problem_label, own.settings["checks"]) == ("own", "relu", 3)
    assert (inline.kernel_label, inline.problem_label, inline.settings["seed"]) == (None, None, 1)


def test_lines_come_from_stdin_too(cli: Cli, engine: Engine, worker: UUID) -> None:
    """`--jsonl -` reads stdin, and options are the defaults of each line."""
    line = json.dumps({"kernel": KERNEL, "kernel_label": "piped"}).encode()
    done = cli("submit", "--jsonl", "-", "--problem", "relu.py", "--backend", "torch", stdin=line)
    assert done.returncode == 0, done.stderr
    (row,) = stored(engine)
    assert (row.kernel_label, row.problem_label) == ("piped", "relu")
    assert str(row.id) in done.stdout


def test_a_command_that_cannot_be_meant_is_refused(cli: Cli, engine: Engine) -> None:
    """Bad arguments exit with 2 and one line that names the fix, and nothing is written."""
    for arguments, message in (
        (("-p", "relu.py", "-b", "torch"), "--kernel PATH or --jsonl FILE"),
        (("mine.py", "-b", "torch"), "--problem is missing"),
        (("mine.py", "-p", "gone.py", "-b", "torch"), "gone.py: No such file"),
        (("nothing-*.py", "-p", "relu.py", "-b", "torch"), "nothing-*.py: no file matches"),
        ((*MINE[1:], "-k", ""), "a kernel's name is empty"),
        ((*MINE[1:], "--settings", "{"), "--settings: not JSON"),
        ((*MINE[1:], "--settings", "gone.json"), "gone.json: No such file"),
        ((*MINE[1:], "--set", "checks"), "write name=value"),
        ((*MINE[1:], "--timeout", "3"), "--timeout: give --wait too"),
        ((*MINE[1:], "relu.py", "--idempotency-key", "k"), "names one evaluation"),
        (("mine.py", "--jsonl", "-"), "give only one of them"),
        (("--jsonl", "gone.jsonl"), "gone.jsonl: No such file"),
    ):
        done = cli("submit", *arguments)
        assert (done.returncode, len(done.stderr.splitlines()), message in done.stderr) == (2, 1, True), done.stderr
    assert stored(engine) == []


def test_waiting_tells_whether_all_passed(
    cli: Cli, engine: Engine, worker: UUID, judging: Callable[[Judgement], None]
) -> None:
    """With --wait the status is 0 only if every kernel passed, and lines keep the input's order."""
    cli.write("wrong.py", KERNEL + "# wrong\n")
    judging(lambda label: passed() if label == "mine" else ended(Category.WRONG_VALUES, message="off by \x1b[31mone"))
    command = ("submit", "--problem", "relu.py", "--backend", "torch", "--wait", "--timeout", "60")
    right = cli(*command, "mine.py")
    assert right.returncode == 0, right.stderr
    assert all(word in right.stdout for word in ("relu", "mine", "passed", "0.5", "2.00x"))
    both = cli(*command, "wrong.py", "mine.py", "--json")
    assert both.returncode == 1
    shown = lines(both.stdout)
    assert [line["kernel_label"] for line in shown] == ["wrong", "mine"]
    assert [line["verdict"]["category"] for line in shown] == ["wrong_values", "passed"]
    assert shown[1]["verdict"]["speedup"] == 2.0
    [same] = [one for one in cli.told("results") if one["evaluation_id"] == shown[1]["id"]]
    assert {name: value for name, value in shown[1].items() if name in same}.items() <= same.items()
    assert shown[1]["speedup"] == 2.0
    assert "\x1b" not in both.stdout


def test_a_reused_verdict_says_so(cli: Cli, engine: Engine, worker: UUID) -> None:
    """The table, JSON, `show` and `results` mark a reused verdict, and --fresh judges the kernel again."""
    command = ("submit", "--problem", "relu.py", "--backend", "torch", "mine.py", "--json")
    [asked] = lines(cli(*command, "--fresh").stdout)
    assert judge(engine, worker, lambda _: passed(), conditions="known") == 1
    [again] = lines(cli(*command, "--wait", "--timeout", "60").stdout)
    assert again["verdict"]["reused_from"] == asked["id"]
    assert [row.reuse for row in stored(engine)] == [False, True]
    named = f"reused from {asked['id'][:8]}"
    assert named in " ".join(cli(*command[:-1], "--wait", "--timeout", "60").stdout.split())
    assert f"from {asked['id']}, judged" in cli("show", again["id"]).stdout
    assert named in " ".join(cli("results").stdout.split())
    assert asked["id"] in cli("results", "--json").stdout


def test_an_interrupted_wait_names_the_command_that_goes_on(cli: Cli, worker: UUID, engine: Engine) -> None:
    """The command exits with 130 and names the command that waits for the same evaluation."""
    with cli.start(*MINE, "--wait") as process:

        def listens() -> object:
            with engine.connect() as connection:
                query = "SELECT 1 FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
                return connection.execute(text(query)).scalar()

        until(listens)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate()
    assert process.returncode == 130
    [row] = stored(engine)
    assert f"kqueue: the evaluation continues. `kqueue wait {row.id}` " in said


def test_a_lane_may_be_served_later(cli: Cli, engine: Engine) -> None:
    """Without a worker a submission is refused, except with --allow-idle-lane."""
    command = (*MINE, "--lane", "gpu.h200")
    refused = cli(*command)
    said = "no live worker serves gpu.h200: this fleet has no live worker" in refused.stderr
    assert (refused.returncode, said) == (2, True)
    assert stored(engine) == []
    assert cli(*command, "--allow-idle-lane").returncode == 0
    assert [row.lane for row in stored(engine)] == ["gpu.h200"]


def test_without_redis_nothing_is_lost(cli: Cli, engine: Engine, worker: UUID) -> None:
    """Without Redis the evaluation is accepted, and the sweeper sends it later."""
    done = cli(*MINE, KQUEUE_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stderr
    assert [(row.state, row.published_at is None) for row in stored(engine)] == [("queued", True)]
