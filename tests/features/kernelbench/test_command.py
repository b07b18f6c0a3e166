"""`kqueue kernelbench` over folders of generations."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kqueue import Client
from kqueue.config import Config
from tests.cli.command import Cli, Done
from tests.integrations.sources import BROKEN_REFERENCE, REFERENCE, RIGHT, WRONG
from tests.waiting import until

FAST = ["--backend", "torch", "--lane", "cpu", "--checks", "1", "--calls", "5"]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Create problems 1 to 3 of level 1 in KernelBench's folders, and an empty run."""
    problems, run = tmp_path / "KernelBench", tmp_path / "runs" / "first"
    (problems / "level1").mkdir(parents=True)
    (problems / "level2").mkdir()
    run.mkdir(parents=True)
    for number, source in enumerate((REFERENCE, REFERENCE.replace("+ 1", "+ 2"), BROKEN_REFERENCE), 1):
        (problems / "level1" / f"{number}_Scale_and_shift.py").write_text(source)
    return problems, run


def put(run: Path, problem: int, sample: int, kernel: str, level: int = 1) -> Path:
    """Write a generation."""
    path = run / f"level_{level}_problem_{problem}_sample_{sample}_kernel.py"
    path.write_text(kernel)
    return path


def command(folders: tuple[Path, Path], *arguments: str) -> list[str]:
    """Return the command line for these folders."""
    problems, run = map(str, folders)
    return ["kernelbench", "--problems", problems, "--generations", run, *FAST, *arguments]


def judge(folders: tuple[Path, Path], *arguments: str) -> Done:
    """Run the command to its end."""
    return Cli(folders[1])(*command(folders, *arguments))


def scores(folders: tuple[Path, Path], *arguments: str, status: int = 0) -> dict[str, Any]:
    """Return the command's JSON output."""
    done = judge(folders, "--json", *arguments)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


def refused(folders: tuple[Path, Path], *arguments: str, told: str) -> None:
    """Assert that the command refuses the arguments with this message, and leaves no file."""
    before = [*folders[1].iterdir()]
    done = judge(folders, *arguments)
    assert (done.returncode, told in done.stderr) == (2, True), done.stderr
    assert [*folders[1].iterdir()] == before


def results(run: Path) -> dict[str, Any]:
    """Return the content of the results' file."""
    return json.loads((run / "eval_results.json").read_text())


def test_a_run(config: Config, folders: tuple[Path, Path]) -> None:
    """Results and scores have KernelBench's form, and a second run judges only new or changed kernels."""
    _, run = folders
    put(run, 1, 0, RIGHT)
    put(run, 1, 1, WRONG)
    put(run, 2, 0, RIGHT)
    put(run, 2, 1, "")
    (run / "notes.txt").write_text("not a kernel")
    first = scores(folders, "--k", "1,2,3", "--p", "0,1")
    assert (first["level"], first["evaluated"], first["left_out"], first["bad_files"]) == (1, 3, [], 0)
    assert (first["problems"], first["samples"], first["compiled"], first["correct"]) == (2, 4, 3, 1)
    assert {k: (one["value"], one["problems"]) for k, one in first["pass_at_k"].items()} == {
        "1": (0.25, 2), "2": (0.5, 2), "3": (None, 0),
    }  # fmt: skip
    assert first["fast_p"]["0.0"] == 0.5
    assert first["categories"] == {"passed": 1, "wrong_values": 2, "entry_point_missing": 1}

    rows = results(run)
    assert list(rows) == ["1", "2"]
    assert [row["sample_id"] for row in rows["1"]] == [0, 1]
    right, wrong = rows["1"]
    assert (right["compiled"], right["correctness"]) == (True, True)
    assert right["runtime_stats"].keys() == {"mean", "median", "std", "min", "max", "num_trials", "hardware", "device"}
    assert (wrong["correctness"], wrong["runtime"], wrong["runtime_stats"]) == (False, -1.0, {})
    assert wrong["metadata"]["correctness_issue"]
    assert rows["2"][1]["compiled"] is False
    kept = json.loads((run / "pass_at_k_results.json").read_text())
    assert kept["averages"] == {"avg_pass@1": 0.25, "avg_pass@2": 0.5, "avg_pass@3": None}
    assert kept["problems"]["1"] == {"total_samples": 2, "correct_samples": 1, "pass@1": 0.5, "pass@2": 1.0}

    put(run, 2, 0, RIGHT.replace("+ 1", "+ 2"))
    put(run, 1, 2, WRONG)
    second = scores(folders)
    assert (second["evaluated"], second["samples"], second["correct"]) == (2, 5, 2)
    again = results(run)
    assert again["1"][:2] == rows["1"]
    assert again["2"][0]["correctness"] is True
    shown = judge(folders, "--p", "0,2")
    assert shown.returncode == 0
    assert "5 samples of 2 problems (0 judged now), 4 compiled, 2 correct" in shown.stdout
    assert all(name in shown.stdout for name in ("pass@1", "fast_0", "fast_2", "wrong_values"))


def test_what_is_left_out(config: Config, folders: tuple[Path, Path]) -> None:
    """Kernels without a verdict have no result and are judged by the next run, and bad names are reported."""
    problems, run = folders
    broken = put(run, 3, 0, RIGHT)
    put(run, 1, 0, WRONG)
    (run / "kernel_7.py").write_text(RIGHT)
    put(run, 9, 0, RIGHT)
    (problems / "level1" / "2_Another.py").write_text(REFERENCE)
    put(run, 2, 0, RIGHT)
    for _ in range(2):
        done = judge(folders, "--json")
        assert (done.returncode, json.loads(done.stdout)["left_out"]) == (3, [broken.name])
        assert list(results(run)) == ["1"]
    for words in (
        f"{broken.name}: no result, reference_error: ",
        "kernel_7.py: not judged, because its name is not level_L_problem_P_sample_S_kernel.py",
        "problem_9_sample_0_kernel.py: not judged, because ",
        "problem 2 could be any of 2_Another.py, 2_Scale_and_shift.py",
    ):
        assert words in done.stderr
    (problems / "level1" / "3_Scale_and_shift.py").write_text(REFERENCE)
    found = scores(folders, status=2)  # the bad names are still there
    assert (found["evaluated"], found["left_out"], found["bad_files"], found["correct"]) == (1, [], 3, 1)


def test_an_interrupted_run_goes_on(kq: Client, folders: tuple[Path, Path]) -> None:
    """After Ctrl-C or a kill, the next run gets the verdicts of sent kernels and sends nothing twice."""
    run = folders[1].rename(folders[1].with_name("interrupted"))  # a separate batch
    folders = (folders[0], run)
    for sample in range(4):
        put(run, 1, sample, RIGHT if sample == 0 else f"{RIGHT}# until {run}/released {sample}\n")
    with Cli(run).start(*command(folders)) as running:
        until(lambda: (run / "eval_results.json").exists() and any(results(run).values()), 300, "a result")
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=300)
    assert (running.returncode, "Run the same command again" in told) == (130, True)
    assert len(results(run)["1"]) == 1
    (run / "released").touch()
    found = scores(folders)
    assert (found["samples"], found["correct"]) == (4, 4)
    assert len(kq.batch(run.name)) == 4


def test_other_settings_get_results_of_their_own(kq: Client, folders: tuple[Path, Path]) -> None:
    """The same folder with other settings gets an error that names the difference instead of the first results."""
    _, run = folders
    put(run, 1, 0, RIGHT)
    run = run.rename(run.with_name("settings"))
    folders = (folders[0], run)
    assert scores(folders)["evaluated"] == 1
    before = results(run)
    other = ("--checks", "2", "--precision", "bf16")
    refused(folders, *other, told="with precision fp32, not bf16; num_correct_trials 1, not 2: use another --out")
    assert results(run) == before
    assert (scores(folders, *other, "--out", str(run / "bf16.json"))["evaluated"], len(kq.batch("settings"))) == (1, 2)
    [row] = json.loads((run / "bf16.json").read_text())["1"]
    assert row["metadata"]["evaluation_id"] != before["1"][0]["metadata"]["evaluation_id"]
    assert (run / "bf16.pass_at_k_results.json").exists()
    # Each of the two continues from its results.
    assert scores(folders)["evaluated"] == scores(folders, *other, "--out", str(run / "bf16.json"))["evaluated"] == 0


def test_a_changed_problem_is_judged_anew(kq: Client, folders: tuple[Path, Path]) -> None:
    problems, run = folders
    put(run, 1, 0, RIGHT)
    assert scores(folders)["correct"] == 1
    (problems / "level1" / "1_Scale_and_shift.py").write_text(REFERENCE.replace("+ 1", "+ 2"))
    found = scores(folders)
    assert (found["evaluated"], found["samples"], found["correct"]) == (1, 1, 0)


def test_results_of_others_are_kept(config: Config, folders: tuple[Path, Path]) -> None:
    """Results of KernelBench's scripts, in either form, count and are not judged again."""
    _, run = folders
    put(run, 1, 0, RIGHT)
    put(run, 2, 0, RIGHT)
    theirs = {"sample_id": 0, "compiled": True, "correctness": True, "metadata": {}, "runtime": 2.0}
    theirs["runtime_stats"] = {}
    (run / "eval_results.json").write_text(json.dumps({"1": theirs, "2": [theirs | {"ref_runtime": 6.0}]}))
    found = scores(folders, "--p", "0,2")
    assert (found["evaluated"], found["samples"], found["correct"]) == (0, 2, 2)
    assert found["fast_p"] == {"0.0": 1.0, "2.0": 0.5}


def test_one_sample(config: Config, folders: tuple[Path, Path]) -> None:
    """Older readers get an object for each problem, which a later run reads too. Several samples are refused."""
    _, run = folders
    put(run, 1, 0, RIGHT)
    put(run, 2, 0, WRONG)
    scores(folders, "--one-sample")
    assert {problem: row["correctness"] for problem, row in results(run).items()} == {"1": True, "2": False}
    assert scores(folders, "--one-sample")["evaluated"] == 0
    put(run, 2, 1, RIGHT)
    refused(folders, "--one-sample", told="--one-sample: a problem has several samples")


def test_levels(config: Config, folders: tuple[Path, Path]) -> None:
    """A run has one level, and results of several levels are separate. Problems need no level."""
    problems, run = folders
    (problems / "level2" / "1_Other.py").write_text(REFERENCE)
    put(run, 1, 0, WRONG)
    put(run, 1, 0, WRONG, level=2)
    refused(folders, told="holds levels 1, 2: choose one with --level")
    assert scores(folders, "--level", "1")["level"] == 1
    refused(folders, "--level", "2", told="holds results of level 1: use another --out")
    assert scores(folders, "--level", "2", "--out", str(run / "level2.json"))["samples"] == 1
    assert json.loads((run / "level2.json").read_text())["1"][0]["metadata"]["level"] == 2
    flat, other = run.with_name("flat"), run.with_name("other")
    for folder in (flat, other):
        folder.mkdir()
    (flat / "7_Scale.py").write_text(REFERENCE)
    put(other, 7, 0, WRONG, level=3)
    assert scores((flat, other))["level"] == 3


def test_wrong_arguments_are_told(config: Config, folders: tuple[Path, Path]) -> None:
    """Wrong arguments are refused by their names before anything is judged."""
    put(folders[1], 1, 0, WRONG)
    put(folders[1], 1, 1, "")
    for arguments, told in (
        (["--k", "0"], "--k 0: give whole numbers from 1"),
        (["--k", "1,x"], "--k 1,x"),
        (["--p", "-1"], "--p -1: give numbers from 0"),
        (["--backend", "fortran"], "backend: 'fortran'"),
        (["--precision", "fp8"], "precision: 'fp8'"),
        (["--comparison", "none"], "comparison: "),
        (["--one-sample"], "a problem has several samples"),
        (["--checks", "0"], "num_correct_trials"),
        (["--level", "4"], "no level_L_problem_P_sample_S_kernel.py of level 4"),
        (["--problems", "/nowhere"], "--problems /nowhere: no such folder"),
        (["--generations", "/nowhere"], "--generations /nowhere: no such folder"),
        (["--out", "/proc/none/results.json"], "cannot be written"),
        (["--lane", "gpu.l40s", "--backend", "cuda"], "no live worker serves gpu.l40s"),
        (["--lane", "tpu", "--backend", "cuda"], "unknown lane"),
        (["--lane", "cpu", "--backend", "cuda"], "cuda kernel"),
    ):
        refused(folders, *arguments, told=told)


def test_a_broken_results_file_is_told(folders: tuple[Path, Path]) -> None:
    """A file that holds no results is not changed."""
    file = put(folders[1], 1, 0, WRONG).with_name("eval_results.json")
    for content in ("", "[]", '{"x": []}', '{"1": [{"sample_id": 0}]}', '{"1": 5}'):
        file.write_text(content)
        refused(folders, told="not a results file")
        assert file.read_text() == content
