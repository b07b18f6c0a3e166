"""`kqueue check` without a fleet, and trees in a sealed process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kqueue import trees
from kqueue.contract import Request, named_tree, parse_request
from kqueue.errors import InvalidRequest
from kqueue.judging import LocalJudge
from tests.cli.command import Cli
from tests.cli.machine import *  # noqa: F403
from tests.features.check.repositories import LIST, PARTS, TAIL, Repository
from tests.samples import RELU

pytestmark = pytest.mark.slow("starts a judge")

QUICK = ("--device", "cpu", "--no-timing", "--set", "checks=1")


@pytest.fixture
def repository(cli: Cli) -> Iterator[Repository]:
    """Yield a repository in whose clone the command runs."""
    made = Repository(cli.directory / "clone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cli, "directory", made.folder, raising=False)
        object.__setattr__(cli, "directory", made.folder)
        yield made


@pytest.mark.usefixtures("kept")
def test_a_check(cli: Cli, repository: Repository) -> None:
    """A drawn size shows a wrong tail, which is not head's fault if base has it. Uncommitted changes are named."""
    head = repository.commit({"src/mine/parts.py": TAIL})
    (repository.folder / "src/mine/parts.py").write_text("broken")
    done = cli("check", "--base", repository.base, *QUICK, "--markdown", "out.md", "--junit", "out.xml", "--json")
    assert done.returncode == 1, done.stderr
    assert "1 uncommitted change is not judged: src/mine/parts.py" in done.stderr
    found = json.loads(done.stdout)
    assert (found["base"], found["head"], found["status"]) == (repository.base, head, 1)
    [row] = found["rows"]
    assert re.match(r"wrong at n=\d+ \(right at m=4, n=32, and base is right at other sizes too\): ", row["words"])
    assert all("wrong at n=" in (repository.folder / name).read_text() for name in ("out.md", "out.xml"))
    same = ("check", "--base", repository.base, "--head", repository.base, *QUICK, "--junit", "no/out.xml")
    for options, status in (((), 3), (("--head", "HEAD"), 1)):
        done = cli(*same, *options)
        said = "kqueue: no/out.xml cannot be written: No such file or directory\n" in done.stderr
        assert (done.returncode, said, "scale[m=4" in done.stdout) == (status, True, True), done.stderr
    done = cli(*same[:-2])
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1].rpartition(": ")[2]) == (0, "1 right"), done.stderr
    assert (lines[1].split(), [line for line in lines if line.endswith(" ")]) == (["result", "operator", "message"], [])
    assert "1 of 1: scale[m=4, n=32, fp32]: right" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--base", "nowhere"), "the revision nowhere is not in"),
        (("--base", ""), "--base is empty"),
        (("--base", "0" * 40), "a new branch has no earlier one"),
        (("--base", "--help=x"), "the revision --help=x is not in"),
        (("--base", "HEAD", "--operator", "none"), "--operator none: kqueue.toml of head has scale"),
        (("--base", "HEAD", "--config", "none"), "none of head: No such file"),
        (("--base", "HEAD", "--lane", "cpu"), "--lane: only a fleet has lanes"),
        (("--base", "HEAD", "--fleet", "--device", "cpu"), "--device: a fleet's devices are chosen with --lane"),
        (("--base", "HEAD", "--qualify", "--device", "cpu"), "--qualify: the sanitizers need a GPU"),
        (("--base", "HEAD", "--qualify", "--url", "http://127.0.0.1:1"), "--qualify with --url: give a --lane"),
    ],
)
def test_bad_options(cli: Cli, repository: Repository, options: tuple[str, ...], words: str) -> None:
    """They end with status 2, and the message names the correction."""
    done = cli("check", *options)
    assert (done.returncode, repository.git("status", "--porcelain")) == (2, "")
    assert words in done.stderr


def test_outside_of_repositories(cli: Cli) -> None:
    """A check starts in a clone."""
    done = cli("check", "--base", "HEAD")
    assert done.returncode == 2
    assert "no Git repository: start in a clone" in done.stderr


def tree_of(folder: Path, files: dict[str, str]) -> trees.Tree:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return trees.pack(folder)


def request_of(tree: trees.Tree, answer: str, imports: str = "import mine", text: str = "") -> Request:
    kernel = f"{tree.line()}import torch\n{imports}\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n"
    return parse_request({"problem": RELU, "kernel": f"{kernel}        return {answer}\n", "backend": "torch",
                          "trees": [text or tree.text],
                          "settings": {"checks": 1, "timing": {"purpose": "check"}}})  # fmt: skip


#: Modules of a tree that would take the place of others.
HOSTILE = dict.fromkeys(
    ("torch/__init__.py", "workers/__init__.py", "kqueue/contract.py", "json.py", "colorsys.py", "numpy.py"),
    "raise SystemExit\n",
)
RELU_IN = {"mine/__init__.py": "import torch\nrelu = torch.relu\n"}
WRITE = "import mine\ntry:\n    open(mine.__file__, 'a')\nexcept PermissionError:\n    relu = mine.relu"


@pytest.mark.parametrize(
    ("files", "answer", "imports", "category", "words"),
    [
        (RELU_IN, "mine.relu(x)", "import mine", "passed", ""),
        (RELU_IN, "relu(x)", WRITE, "passed", ""),
        (RELU_IN | HOSTILE, "mine.relu(x)", "import colorsys, json, numpy, mine", "passed", ""),
        (RELU_IN | {"einops/notes.md": ""}, "mine.relu(x)", "import mine, einops.notes", "import_error",
         "commit the module below the tree's root"),
        ({"mine/__init__.py": "import gone_away"}, "x", "import mine", "import_error", "The seal hides all files but"),
    ],
    ids=["right", "read-only", "hostile", "no module", "a missing module"],
)  # fmt: skip
def test_a_tree_in_a_sealed_process(
    local: LocalJudge, tmp_path: Path, files: dict[str, str], answer: str, imports: str, category: str, words: str
) -> None:
    """Its modules are found before installed ones, but not in the place of the judge's, torch's or Python's."""
    tree = tree_of(tmp_path, files)
    outcome = local(request_of(tree, answer, imports))
    assert (outcome.category, words in outcome.message) == (category, True), outcome
    [told] = outcome.evidence.trees or ()
    assert (told.of, told.hash, told.files) == ("kernel", tree.name[7:], len(files))
    assert {line.partition(" ")[2] for line in told.named} == files.keys()


#: A library that a tree's compiler builds, and its call.
BUILT = RELU_IN | {"c/relu.c": "void relu(float *x, long n) { for (; n--; x++) if (*x < 0) *x = 0; }\n"}
CALLS = """import ctypes, mine, pathlib
library = ctypes.CDLL(str(pathlib.Path(mine.__file__).with_name("librelu.so")))
def relu(x):
    x = x.clone()
    library.relu(ctypes.c_void_p(x.data_ptr()), ctypes.c_long(x.numel()))
    return x"""
BUILD = ["cc", "-shared", "-fPIC", "c/relu.c", "-o", "mine/librelu.so"]
SHELL = " ".join(BUILD)


KERNEL = (
    f"# kqueue build {SHELL}\nimport torch\n{CALLS}\nclass ModelNew(torch.nn.Module):\n  forward = staticmethod(relu)\n"
)


@pytest.mark.usefixtures("kept")
def test_a_kernel_in_a_tree(cli: Cli, repository: Repository) -> None:
    """`--tree` gives a folder or a revision of it, and a duel's second one is B's. The file can name a build."""
    repository.commit({f"src/{name}": text for name, text in BUILT.items()})
    repository.commit({"src/c/relu.c": "wrong"})
    for name, text in {"p.py": RELU, "k.py": KERNEL}.items():
        (repository.folder / name).write_text(text)
    quick = ("--device", "cpu", "--set", "checks=1")
    done = cli("duel", "p.py", "k.py", "k.py", "--tree", "src@HEAD", "--tree", "src@HEAD~1", "--calls", "5", *quick)
    assert done.stdout.splitlines()[-1] == "B wins, because A ended as compile_error"
    for tree, status, words in (
        (".@HEAD~1:src/", 1, "c/relu.c: No such file"),
        ("gone@HEAD", 2, "gone is no folder"), ("src@gone", 2, "the revision gone is not in"),
        (f"src/c@{repository.base}", 2, "has no such folder"),
    ):  # fmt: skip
        done = cli("judge", "p.py", "k.py", "--tree", tree, "--no-timing", *quick)
        assert (done.returncode, words in done.stdout + done.stderr) == (status, True), (tree, done)


def built_request(tree: trees.Tree, build: list[str], *, of: str = "kernel", **settings: object) -> Request:
    request = request_of(tree, "relu(x)", CALLS)
    problem, kernel = request.problem, request.kernel.removeprefix(tree.line())
    if of == "problem":
        problem, kernel = (
            tree.line(build=build) + "import torch\nimport mine\n" + problem,
            tree.line(build=BUILD) + kernel,
        )
    else:
        kernel = tree.line(build=build) + kernel
    fields = {"problem": problem, "kernel": kernel, "backend": "torch", "trees": [tree.text]}
    return parse_request(fields | {"settings": request.settings.model_dump() | settings})


@pytest.mark.parametrize(
    ("build", "category", "words"),
    [
        (BUILD, "passed", ""),
        (["sh", "-c", f"{SHELL} && ln -s /etc/passwd c/out && mkfifo c/pipe && echo x > c/relu.c"], "passed", ""),
        (["sh", "-c", f"echo 'int x' >> c/relu.c; {SHELL}"], "compile_error", "c/relu.c:2:1: error: "),
        (["cc", "-c", "c/gone.c"], "compile_error", "c/gone.c: No such file or directory"),
        (["no-such-tool"], "compile_error", "no-such-tool: not found: the worker lacks this program"),
        (["truncate", "-s", "300M", "mine/librelu.so"], "compile_error", "wrote 1 files of 300.0 MiB, of which"),
        (["sleep", "600"], "compile_timeout", "(setting deadlines.compile_s)"),
    ],
)  # fmt: skip
def test_a_tree_is_built(local: LocalJudge, tmp_path: Path, build: list[str], category: str, words: str) -> None:
    """The kernel imports what the command writes. If the command fails, the verdict has its words."""
    deadlines = {"deadlines": {"compile_s": 1}} if build[0] == "sleep" else {}
    outcome = local(built_request(tree_of(tmp_path, BUILT), build, **deadlines))
    assert (outcome.category, words in outcome.message) == (category, True), outcome


@pytest.mark.parametrize(("build", "category"), [(BUILD, "passed"), (["false"], "reference_error")])
def test_the_tree_of_a_problem_is_built(local: LocalJudge, tmp_path: Path, build: list[str], category: str) -> None:
    """A failure of its build is the problem's."""
    outcome = local(built_request(tree_of(tmp_path, BUILT), build, of="problem"))
    assert (outcome.category, outcome.message.startswith("building its tree")) == (category, category != "passed")


def test_a_tree_decides_what_a_kernel_is(local: LocalJudge, tmp_path: Path) -> None:
    """Kernels of other trees are other programs. A tree with files that it does not list is refused."""
    one, other = tree_of(tmp_path / "a", RELU_IN), tree_of(tmp_path / "b", {**RELU_IN, "more.py": ""})
    requests = [*(request_of(tree, "mine.relu(x)") for tree in (one, other)), built_request(one, ["true"])]
    assert len({local(request).evidence.program for request in requests}) == len(requests)
    hidden = trees.Tree(one.text.partition("\n\n")[0] + "\n\n" + other.text.partition("\n\n")[2], one.files)
    outcome = local(request_of(hidden, "mine.relu(x)"))
    assert (outcome.category, "other files than it lists" in outcome.message) == ("import_error", True)
    request = request_of(one, "mine.relu(x)").model_copy(update={"trees": ()})
    with pytest.raises(InvalidRequest, match="only a fleet has stored trees"):
        local(request)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"trees": ["other"]}, "a tree is a text of kqueue.trees"),
        ({"kernel": "class ModelNew: ..."}, "neither the problem's nor the kernel's first line names one"),
        ({"kernel": "# kqueue tree sha256:00\nclass ModelNew: ..."}, "the kernel's first line names a tree as"),
        ({"kernel": f"# kqueue tree sha256:{'0' * 64} ../up\nclass ModelNew: ..."}, "first line names a tree as"),
        ({"kernel": f"# kqueue tree sha256:{'0' * 64}\n# kqueue build\n..."}, "second line names a build as"),
        ({"kernel": f"# kqueue tree sha256:{'0' * 64}\n# kqueue build cc 'a\n..."}, "second line names a build as"),
    ],
)
def test_a_malformed_request(tmp_path: Path, change: dict[str, object], words: str) -> None:
    """Trees are texts that the first lines of the sources name."""
    request = request_of(tree_of(tmp_path, RELU_IN), "x")
    with pytest.raises(InvalidRequest, match=words):
        parse_request(request.model_dump() | change)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: (root / "a").symlink_to("/etc/passwd"), "a in .* is a link to nothing or out of it"),
        (lambda root: (root / "a").symlink_to("gone"), "a in .* is a link to nothing or out of it"),
        (lambda root: (root / "a\tb").write_text(""), "is printable text: rename it"),
        (
            lambda root: [(root / str(n)).write_text("") for n in range(4)],
            "has 4 files, of which at most 3 can be sent",
        ),
        (lambda root: (root / "b.bin").write_bytes(bytes(range(256))), r"compressed, have 0.0 MiB.*are b.bin \("),
        (lambda root: None, "has no files to pack"),
    ],
    ids=["a link out", "a broken link", "a name", "files", "bytes", "empty"],
)
def test_a_tree_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make, words: str) -> None:
    """The refusal names the file and the limit."""
    monkeypatch.setattr(trees, "MAX_TREE_FILES", 3)
    monkeypatch.setattr(trees, "MAX_TREE_BYTES", 200)
    make(tmp_path)
    with pytest.raises(InvalidRequest, match=words):
        trees.pack(tmp_path)


def test_a_revision_is_packed_without_a_trace(tmp_path: Path) -> None:
    """The working tree and the index of a clone stay. Equal files give an equal tree."""
    made = Repository(tmp_path / "clone")
    made.commit({"src/mine/parts.py": TAIL})
    (made.folder / "src/mine/parts.py").write_text("unsaved")
    clone = trees.Clone(made.folder / "src")
    clone.unpack(made.base, tmp_path / "there")
    assert (tmp_path / "there/src/mine/parts.py").read_text() == PARTS
    assert clone.uncommitted() == ["src/mine/parts.py"]
    assert made.git("diff", "--cached", "--name-only") == ""
    one = trees.pack(tmp_path / "there")
    assert named_tree(one.line("src", ("cc", "a b", "$x")) + LIST) == (one.name[7:], "src", ("cc", "a b", "$x"))
    assert one.text == trees.pack(tmp_path / "there").text
