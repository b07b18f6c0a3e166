"""`kqueue check` on planted changes: `python benchmarks/check.py --out FILE [--seconds 240] [--lane cpu]`.

A generated repository has four operators in Triton. Its revisions are copies, slow-downs by 1 and 3 %, and 20 errors:
wrong masks, wrong tails, a missing synchronisation, lost precision. A fleet judges them until the seconds are over:
next is the cheapest of the operators that have the fewest rows so far. FILE gets a line of JSON for each row, with
seconds and device seconds, as soon as it is known. A second call continues where the lines end. On the CPU, where
Triton interprets, only errors are judged, with small sizes. The exit status is 1 if an error is not found.

`--clones FOLDER` plants in clones of public repositories instead. Each clone NAME has its operators in
`FOLDER/NAME.toml` or `examples/check/NAME.toml`, and its plants in `FOLDER/NAME.plants.toml`: tables `[[plant]]` with
`operator`, `kind`, and `edits`, a list of a file, a text in it, and the text instead. In the kind `slower`, `{k}` is
the number of programs for which one is added, and `{n}` is `{k}` + 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from kqueue.client import Client
from kqueue.config import load
from kqueue.contract import Request, Verdict
from kqueue.errors import WaitTimeout
from kqueue.features.check.run import Check, Row, State, sides
from kqueue.features.duel.duels import Duel, Match, duel
from kqueue.local.fleet import LocalFleet
from kqueue.trees import Clone

#: Rows that are judged at once, so that one compiles while the device times another, and seconds for the fleet's end.
_ROWS, _LEFT_S = 3, 20.0

#: Folder of the lists of operators of public repositories.
LISTS = Path(__file__).parents[1] / "examples" / "check"
HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"
GELU = (
    HEAD
    + """@triton.jit
def _gelu(x, y, n, BLOCK: tl.constexpr):
    at = (tl.program_id(0) % tl.cdiv(n, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(y + at, 0.5 * v * (1 + tl.erf(v * 0.7071067811865476)), mask=at < n)


def gelu(x):
    y, n = torch.empty_like(x), x.numel()
    programs = triton.cdiv(n, 1024)
    _gelu[(programs,)](x, y, n, BLOCK=1024)
    return y
"""
)
SOFTMAX = (
    HEAD
    + """@triton.jit
def _softmax(x, y, rows, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0) % rows, tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * columns + at, e / tl.sum(e, 0), mask=at < columns)


def softmax(x):
    y, (programs, columns) = torch.empty_like(x), x.shape
    _softmax[(programs,)](x, y, x.shape[0], columns, BLOCK=triton.next_power_of_2(columns))
    return y
"""
)
NORM = (
    HEAD
    + """@triton.jit
def _norm(x, w, y, rows, columns, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0) % rows, tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(v * v, 0) / columns + eps)
    weight = tl.load(w + at, mask=at < columns, other=0.0)
    tl.store(y + row * columns + at, v * scale * weight, mask=at < columns)


def norm(x, w):
    y, (programs, columns) = torch.empty_like(x), x.shape
    _norm[(programs,)](x, w, y, x.shape[0], columns, 1e-6, BLOCK=triton.next_power_of_2(columns))
    return y
"""
)
TOTAL = (
    HEAD
    + """@triton.jit
def _total(x, y, rows, columns, step, BLOCK: tl.constexpr):
    at = tl.program_id(0) % (rows * step)
    row, part = at // step, at % step
    column = part * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + column, mask=column < columns, other=0.0)
    tl.store(y + at, tl.sum(v.to(tl.float32), 0))


def total(x):
    rows, columns = x.shape
    step = triton.cdiv(columns, 512)
    parts = torch.empty(rows, step, device=x.device)
    programs = rows * step
    _total[(programs,)](x, parts, rows, columns, step, BLOCK=512)
    return parts.sum(1)
"""
)
SOURCES = {"gelu": GELU, "softmax": SOFTMAX, "norm": NORM, "total": TOTAL}
#: Errors of each operator: the kind, a part of its source, and the text instead.
ERRORS = {
    "gelu": [
        ("mask", "0.7071067811865476)), mask=at < n)", "0.7071067811865476)), mask=at < n - 1)"),
        ("tail", "programs = triton.cdiv(n, 1024)", "programs = max(1, n // 1024)"),
        ("mask", "mask=at < n, other=0.0)", "mask=at < n // 2, other=0.0)"),
        ("precision", ".to(tl.float32)", ".to(tl.float16).to(tl.float32)"),
        ("values", "tl.erf(v * 0.7071067811865476)", "tl.erf(v * 0.7)"),
    ],
    "softmax": [
        ("mask", 'other=float("-inf")', "other=0.0"),
        ("mask", "e / tl.sum(e, 0), mask=at < columns)", "e / tl.sum(e, 0), mask=at < columns - 1)"),
        ("tail", "BLOCK=triton.next_power_of_2(columns)", "BLOCK=max(1, triton.next_power_of_2(columns + 1) // 2)"),
        ("precision", ".to(tl.float32)", ".to(tl.float16).to(tl.float32)"),
        ("values", "v - tl.max(v, 0)", "v"),
    ],
    "norm": [
        ("tail", "/ columns + eps", "/ BLOCK + eps"),
        ("mask", "weight, mask=at < columns)", "weight, mask=at < columns - 1)"),
        ("mask", "w + at, mask=at < columns", "w + at, mask=at < columns // 2"),
        ("precision", ".to(tl.float32)", ".to(tl.bfloat16).to(tl.float32)"),
        ("values", "columns, 1e-6,", "columns, 1e-3,"),
    ],
    "total": [
        ("tail", "triton.cdiv(columns, 512)", "max(1, columns // 512)"),
        ("mask", "mask=column < columns, other=0.0", "mask=column < columns - 1, other=0.0"),
        ("precision", "v.to(tl.float32)", "v.to(tl.float16)"),
        ("synchronisation", "    _total[", "    with torch.cuda.stream(torch.cuda.Stream()):\n        _total["),
        ("memory", "programs = rows * step", "programs = rows * step - 1"),
    ],
}  # fmt: skip
REFERENCES = {
    "gelu": ("torch.nn.functional:gelu", ""), "softmax": ("torch:softmax", 'reference_call = "entry(x, -1)"\n'),
    "norm": ("torch.nn.functional:rms_norm", 'reference_call = "entry(x, (x.shape[-1],), w, 1e-6)"\n'),
    "total": ("torch:sum", 'reference_call = "entry(x, 1)"\n'),
}  # fmt: skip


#: A file, a text in it, and the text instead.
Edit = tuple[str, str, str]


class Repository:
    """A clone. ``errors`` are operators with the kinds and edits of errors, ``slower`` edits by operator."""

    def __init__(
        self, folder: Path, config: str, errors: list[tuple[str, str, list[Edit]]], slower: dict[str, list[Edit]]
    ) -> None:
        self.folder, self.config, self.errors, self.slower = folder, config, errors, slower
        self.base = self._git("rev-parse", "HEAD")
        for name, kind, edits in [*errors, *((name, "slower", edits) for name, edits in slower.items())]:
            for path, old, _ in edits:
                assert old in (folder / path).read_text(), (name, kind, path, old)

    def names(self) -> list[str]:
        """Return the operators with plants."""
        return sorted({*self.slower, *(name for name, _, _ in self.errors)})

    def _git(self, *words: str) -> str:
        return git(self.folder, *words)

    def planted(self, edits: Iterable[Edit]) -> str:
        """Return the revision that differs from base by some texts, or only by a note."""
        for path, old, new in edits:
            text = (self.folder / path).read_text()
            (self.folder / path).write_text(text.replace(old, new))
        (self.folder / "NOTES").write_text(str(time.time_ns()))
        revision = commit(self.folder)
        self._git("reset", "-q", "--hard", self.base)
        return revision

    def slowed(self, name: str, part: float) -> str:
        """Return the revision in which an operator does a part of its work twice."""
        k = round(1 / part) if part else 0
        filled = [(path, old, new.replace("{k}", str(k)).replace("{n}", str(k + 1)))
                  for path, old, new in self.slower[name]] if part else []  # fmt: skip
        return self.planted(filled)


def git(folder: Path, *words: str) -> str:
    """Run git on a clone, and return its output."""
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    """Commit all files, and return the revision."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "change")
    return git(folder, "rev-parse", "HEAD")


def generated(folder: Path, shape: tuple[int, int]) -> Repository:
    """Return the generated clone. ``shape`` is the size of all inputs."""
    (folder / "planted").mkdir(parents=True)
    rows, columns = shape
    lines: list[str] = []
    for name, (reference, call) in REFERENCES.items():
        inputs = 'x = ["m", "n"]' + (', w = ["n"]' if name == "norm" else "")
        lines.append(
            f'[[operator]]\nname = "{name}"\nimport = "planted.{name}:{name}"\nreference = "{reference}"\n{call}'
            f"inputs = {{ {inputs} }}\nshapes = [{{ m = {rows}, n = {columns} }}]\n"
        )
    (folder / "kqueue.toml").write_text("\n".join(lines))
    for name, source in SOURCES.items():
        (folder / "planted" / f"{name}.py").write_text(source)
    git(folder, "init", "-q")
    commit(folder)
    errors = [(name, kind, [(f"planted/{name}.py", old, new)])
              for name, listed in ERRORS.items() for kind, old, new in listed]  # fmt: skip
    grid = ("[(programs,)]", "[(programs + programs // {k},)]")
    return Repository(folder, "kqueue.toml", errors, {name: [(f"planted/{name}.py", *grid)] for name in SOURCES})


def cloned(folder: Path) -> Repository:
    """Return a clone of a public repository with its plants."""
    plants = tomllib.loads(folder.with_name(f"{folder.name}.plants.toml").read_text())["plant"]
    errors: list[tuple[str, str, list[Edit]]] = []
    slower: dict[str, list[Edit]] = {}
    for plant in plants:
        edits = [tuple(edit) for edit in plant["edits"]]
        if plant["kind"] == "slower":
            slower[plant["operator"]] = edits
        else:
            errors.append((plant["operator"], plant["kind"], edits))
    own = folder.with_name(f"{folder.name}.toml").absolute()
    return Repository(folder, str(own if own.exists() else LISTS / own.name), errors, slower)


class Judge:
    """A fleet that judges for one row until a moment, and counts device seconds. Then its calls raise WaitTimeout."""

    def __init__(self, fleet: Client, until: float) -> None:
        self.fleet, self.until, self.device_s = fleet, until, 0.0

    def __call__(self, request: Request) -> Verdict:
        [verdict] = self._judged([request])
        return verdict

    def fight(self, a: Request, b: Request) -> Duel:
        *_, end = duel(self._judged, Match.of(a, b, within=0.005))
        return end

    def _judged(self, requests: list[Request]) -> Iterator[Verdict]:
        tickets = self.fleet.submit_batch(requests)
        try:
            for ticket in tickets:
                verdict = ticket.wait(max(0.0, self.until - time.monotonic()))
                self.device_s += verdict.device_s
                if not verdict.passed:
                    print(f"  {verdict.kernel_label}: {verdict.category}: {verdict.message}", flush=True)
                yield verdict
        finally:  # a duel that is decided needs no further rounds
            for ticket in tickets:
                ticket.cancel()


class Operator:
    """An operator, and its plants in order: an error, a copy, slow-downs, the other errors, and copies again."""

    def __init__(self, repository: Repository, name: str, options: argparse.Namespace) -> None:
        self.repository, self.name, self.seconds, self.rows = repository, name, 0.0, 0
        errors = [(f"error: {kind}", edits) for of, kind, edits in repository.errors if of == name]
        errors = errors[: options.errors]
        if options.lane == "cpu":
            errors = [one for one in errors if "synchronisation" not in one[0]]
        timed = [("copy", 0.0), ("slower: 3%", 0.03), ("slower: 1%", 0.01)]
        self.timed = timed if name in repository.slower and options.lane != "cpu" else timed[:0]
        self.plants: Iterator[tuple[str, Any]] = chain(errors[:1], self.timed, errors[1:], cycle(self.timed))

    def next(self) -> tuple[str, str] | None:
        """Return the next plant and its revision."""
        self.rows += 1
        match next(self.plants, None):
            case None:
                return None
            case plant, float() as part:
                return plant, self.repository.slowed(self.name, part)
            case plant, edits:
                return plant, self.repository.planted(edits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1500.0)
    parser.add_argument("--lane", choices=["cpu", "gpu"], default="gpu")
    parser.add_argument("--slots", type=int, default=6, help="slots of the GPU (default 6)")
    parser.add_argument("--errors", type=int, default=20, help="number of errors of each operator, 0 to 20")
    parser.add_argument("--clones", type=Path, help="folder of clones of public repositories, with their plants")
    options = parser.parse_args()
    until, cpu = time.monotonic() + options.seconds - _LEFT_S, options.lane == "cpu"
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    place = Path(tempfile.mkdtemp(prefix="kqueue-check-"))
    place.chmod(0o711)  # candidates with separate uids must reach their scratch directories
    if options.clones is None:
        repositories = [generated(place / "clone", (8, 1024) if cpu else (16384, 4096))]
    else:
        repositories = [cloned(folder) for folder in sorted(options.clones.iterdir()) if folder.is_dir()]
    operators = [Operator(one, name, options) for one in repositories for name in one.names()]
    for row in rows:  # of an earlier call
        for operator in operators:
            if (operator.repository.folder.name, operator.name) == (row["repository"], row["operator"]):
                operator.next()
                operator.seconds = row["seconds"]
    lock = threading.Lock()
    slots = {"gpus": "none"} if cpu else {"slots_per_gpu": options.slots, "cpu_slots": 0}

    def work(fleet: Client) -> None:
        """Judge one row after another, always of the cheapest operator among those with the fewest rows."""
        while time.monotonic() < until:
            with lock:
                if not operators:
                    return
                operator = min(operators, key=lambda one: (one.rows, one.seconds))
                planted = operator.next()
                if planted is None:
                    operators.remove(operator)
                    continue
            began, judge, repository = time.monotonic(), Judge(fleet, until), operator.repository
            revisions = (repository.base, planted[1])
            timed = not planted[0].startswith("error")
            with tempfile.TemporaryDirectory(dir=place) as folder, suppress(WaitTimeout):
                both = sides(Clone(repository.folder), revisions, Path(folder), repository.config, [operator.name])
                plan = Check(*both, judge, judge.fight, timed=timed, batch="check-plants", lanes=(options.lane,))
                [row] = [task() for task in plan.tasks(None)]
                operator.seconds = time.monotonic() - began
                with lock, options.out.open("a") as out:
                    rows.append(_record(planted[0], repository, row, operator.seconds, judge.device_s))
                    print(json.dumps(rows[-1]), file=out, flush=True)
                print(*(rows[-1][key] for key in ("plant", "operator", "state", "words", "seconds")), flush=True)

    try:
        config = load(home=place / "home", scratch=place / "scratch", http_port=0, flower_port=0, **slots)
        with LocalFleet(config, durable=False) as running, running.client() as fleet:
            print(f"the fleet is up, {until - time.monotonic():.0f} s are left", flush=True)
            with ThreadPoolExecutor(_ROWS) as pool:
                for one in [pool.submit(work, fleet) for _ in range(_ROWS)]:
                    one.result()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return _summary(rows)


def _record(plant: str, repository: Repository, row: Row, seconds: float, device_s: float) -> dict[str, Any]:
    times = {"seconds": round(seconds, 1), "device_s": round(device_s, 1)}
    return {"plant": plant, "repository": repository.folder.name, "operator": row.operator, "state": row.state,
            "words": row.words, "speed": row.speed, "interval": row.interval, **times}  # fmt: skip


def _summary(rows: list[dict[str, Any]]) -> int:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault("error" if row["plant"].startswith("error") else row["plant"], []).append(row)
    for plant, some in groups.items():
        device_s = statistics.median(row["device_s"] for row in some)
        print(f"{plant}: {dict(Counter(str(row['state']) for row in some))}, median {device_s:.1f} device seconds")
        changes = sum("than base" in row["words"] for row in some)
        print(f"  of {len(some)}, {changes} report a change of speed")
    errors = groups.get("error", [])
    found = [row for row in errors if row["state"] == State.WRONG and not row["words"].startswith("base too")]
    for row in errors:
        if row not in found:
            print(f"not found: {row['repository']}, {row['operator']}, {row['plant']}: {row['state']}, {row['words']}")
    return int(len(found) < len(errors))


if __name__ == "__main__":
    sys.exit(main())
