"""Receipts without a fleet: another project's tool, stored ones, changed bytes, wrong statements, new judgements."""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as Fields
from securesystemslib.exceptions import VerificationError

from kqueue import receipts
from kqueue.categories import Category
from kqueue.contract import Outcome, Verdict, parse_request
from kqueue.errors import ConfigError
from kqueue.evidence import Environment
from kqueue.features.receipts import checks
from kqueue.store.reports import Detail
from tests.cli.command import Cli
from tests.samples import ended, request_fields

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[2] / "docs"
#: Receipts that version 0.2.0 wrote, and the key that signed them. They are never written again.
STORED = {name: (FOLDER / f"version1{name}.json").read_bytes() for name in ("", "-shapes")}
KEY = "25631b2225d7193c0ef8d471f0fec7eef6e1d26965c397cbd29c0fe319c98902"
MINE = Ed25519PrivateKey.generate()
Document = dict[str, Any]


def results(content: bytes, known: tuple[str, ...] | None = None) -> dict[str, bool | None]:
    """Return the result of each statement."""
    return {check.name: check.holds for check in checks.verify(content, known)[0]}


def forged(change: Callable[[Document], object], name: str = "", *, first: bool = True) -> bytes:
    """Return a stored receipt with a change, signed by another key, in its own first form or in an envelope."""
    document = json.loads(STORED[name] if first else checks.renamed(STORED[name]))
    del document["signature"]
    document["public_key"] = receipts.public_key(MINE)
    if not first:
        del document["schema"]
        document["kernel_source_hash"] = receipts.sha256(document["kernel"])
    change(document)
    if not first:
        return receipts.enclose(document, MINE.sign(receipts.signable(document)))
    line = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    document["signature"] = MINE.sign(line).hex()
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"


#: A stored receipt's content in an envelope.
ENVELOPE = forged(lambda _: None, first=False)


@pytest.mark.parametrize("name", STORED)
def test_a_receipt_of_the_first_version_verifies(name: str) -> None:
    """All statements of a stored receipt hold in every later version, by the key that signed it."""
    assert set(results(STORED[name], (KEY,)).values()) == {True}
    assert results(STORED[name])["key"] is None
    assert results(STORED[name], ("0" * 64,))["key"] is False
    assert set(results(forged(lambda _: None, name), (receipts.public_key(MINE),)).values()) == {True}
    assert results(forged(lambda _: None, name), (KEY,)) | {"key": True} == results(STORED[name], (KEY,))
    assert checks.renamed(b'{"owner":"canary","phase":"canary"}') == b'{"owner":"canary","phase":"self_test"}'


def issued(number: int) -> bytes:
    """Return a receipt as a fleet signs it, of another kernel and mostly another category for each number."""
    stored, category = (
        Verdict.load(json.loads(checks.renamed(STORED[""]))["verdict"]),
        [*Category][number % len(Category)],
    )
    request = parse_request(request_fields(number))
    outcome = dict(stored if category is Category.PASSED else ended(category))
    given = {
        "owner": "ada", "batch": "duel-7", "settings": request.settings.model_dump(mode="json"),
        **{name: getattr(request, name) for name in ("problem", "problem_hash", "kernel", "kernel_hash")},
    }  # fmt: skip
    detail = Detail(**dict.fromkeys(one.name for one in fields(Detail)) | given)
    verdict = Verdict.model_validate(dict(stored) | outcome | {"backend": request.backend})
    return receipts.issue(MINE, detail, verdict, sources=number % 2 == 0)


def edited(tree: Any) -> Iterator[None]:
    """Change each value of a document for one step."""
    for name, value in [*tree.items()] if isinstance(tree, dict) else [*enumerate(tree)]:
        if value and isinstance(value, dict | list):
            yield from edited(value)
        else:
            tree[name] = f"{value}x"
            yield
            tree[name] = value


def test_another_projects_tool_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented lines accept each receipt and none of which a field was changed. The schema describes it."""
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "export.md").read_text(), re.DOTALL)
    [lines] = [compile(one, "export.md", "exec") for one in examples if "securesystemslib" in one]
    schema = jsonschema.Draft202012Validator(json.loads((DOCS / "schemas" / "receipt.json").read_text()))
    monkeypatch.chdir(tmp_path)
    public = receipts.public_key(MINE)
    Path("keys.json").write_text(json.dumps({"keys": [{"key_id": receipts.key_id(public), "public_key": public}]}))

    def read(content: bytes) -> Any:
        Path("receipt.json").write_bytes(content)
        exec(lines, found := {})
        return found["statement"]

    for content in map(issued, range(50)):
        statement = read(content)
        Statement.copy_from_pb(json_format.ParseDict(statement, Fields())).validate()
        schema.validate(statement["predicate"])
        assert statement["predicateType"] == schema.schema["$id"]
        assert False not in results(content, (public,)).values()
    envelope, statement = json.loads(issued(0)), read(issued(0))
    assert statement["subject"][2]["digest"]["sha256"] == receipts.sha256(statement["predicate"]["kernel"])
    payloads = [b64encode(receipts.canonical(statement)).decode() for _ in edited(statement)]
    changed = [receipts.canonical(envelope | {"payload": one}) + b"\n" for one in payloads]
    changed += [receipts.canonical(envelope) + b"\n" for _ in edited(envelope)]
    assert len(changed) >= 100
    for content in changed:
        with pytest.raises((VerificationError, ValueError)):
            read(content)
        assert False in results(content).values(), content


@given(
    st.sampled_from([*STORED, "envelope"]),
    *(st.integers(min_value=0), st.integers(1, 255), st.sampled_from(["flip", "cut", "add"])),
)
def test_every_changed_byte_fails(name: str, place: int, by: int, how: str) -> None:
    """A receipt with one byte changed, removed or added does not verify."""
    content = STORED.get(name, ENVELOPE)
    place %= len(content)
    middle = {"flip": bytes([content[place] ^ by]), "cut": b"", "add": bytes([by, content[place]])}[how]
    assert False in results(content[:place] + middle + content[place + 1 :]).values()


def test_another_spelling_fails() -> None:
    """White space, escapes and upper-case digits, which change no value, fail too."""
    content = STORED[""]
    document = json.loads(content)
    for again in (
        *(content + b"\n", content[:-1], b" " + content, content.replace(b":", b": ", 1)),
        *(content.replace(b"a", b"\\u0061", 1), content.replace(b"60.0", b"6e1", 1)),
        *(json.dumps(document, indent=1).encode(), content.replace(b"{", b'{"owner":"ada",', 1)),
    ):
        assert results(again) == {"form": False}, again[:80]
    for name in ("signature", "public_key"):
        again = json.dumps(document | {name: document[name].upper()}, sort_keys=True, separators=(",", ":"))
        assert False in results(again.encode() + b"\n").values()


def test_another_envelope_fails() -> None:
    """An envelope with other members, signatures, white space or statements than its form's is no receipt."""
    envelope = json.loads(ENVELOPE)
    statement, [one] = b64decode(envelope["payload"]), envelope["signatures"]
    others = (statement + b" ", statement.replace(b"receipt:2", b"receipt:3"), statement.replace(b"Statement/v1", b""))
    for change in (
        *({"payload": b64encode(other).decode()} for other in (*others, b"[]", b"{}", b"\xff")),
        *({"payload": envelope["payload"] + end} for end in ("\n", "=", "é")),
        *({"signatures": signatures} for signatures in ([], [one, one], [one | {"keyid": "0"}], [7], None)),
        *({"more": 1}, {"payload": 7}, {"payloadType": "text/plain"}),
    ):
        assert results(receipts.canonical(envelope | change) + b"\n") == {"form": False}, change
    assert results(forged(lambda one: one.update(schema="kqueue.receipt/2"))) == {"form": False}


def verdict(**fields: Any) -> Callable[[Document], object]:
    """Return a change of the verdict."""
    return lambda document: document["verdict"].update(fields)


def of_runtime(**fields: Any) -> Callable[[Document], object]:
    """Return a change of the kernel's measurement."""
    return lambda document: document["verdict"]["runtime"].update(fields)


def of_row(index: int = 0, **fields: Any) -> Callable[[Document], object]:
    """Return a change of a shape's result."""
    return lambda document: document["verdict"]["evidence"]["shapes"]["rows"][index].update(fields)


#: Wrong contents that are signed correctly, and the statement that fails.
WRONG: list[tuple[str, Callable[[Document], object], str]] = [
    ("", verdict(blame="candidate"), "category"),
    ("", verdict(correctness=False), "category"),
    ("", verdict(category="wrong_values", blame="candidate", correctness=False), "category"),
    ("", verdict(speedup=99.0), "speedup"),
    ("", verdict(speedup=10**400), "speedup"),
    ("", verdict(runtime_ms=0.001), "speedup"),
    ("", of_runtime(median_ms=0.001), "times"),
    ("", of_runtime(samples_ms=[]), "times"),
    ("", of_runtime(count=7), "times"),
    ("-shapes", of_row(runtime_ms=0.001), "times"),
    ("-shapes", of_row(weight=9.0), "times"),
    ("-shapes", of_row(runtime_samples_ms=[1.0]), "times"),
    ("-shapes", lambda one: [row.update(weight=0.0) for row in one["verdict"]["evidence"]["shapes"]["rows"]], "times"),
    ("", lambda one: one.update(kernel=one["kernel"] + "#"), "sources"),
    ("", lambda one: one.update(problem=f"sha256:{one['problem_hash']}"), "sources"),
    ("", lambda one: one.update(problem_hash="0" * 64), "sources"),
    ("", lambda one: one.update(problem_hash="0" * 64, public_problem_hash="0" * 64), "sources"),
    ("", lambda one: one.update(kernel_hash="0" * 64), "sources"),
    ("", lambda one: one.update(kernel_source_hash="0" * 64), "sources"),
    ("-shapes", lambda one: one.update(public_problem_hash="0" * 64), "sources"),
    ("-shapes", of_row(name="held in", index=2), "sources"),
    ("", verdict(environment=None), "complete"),
    ("", lambda one: one.pop("settings"), "complete"),
    ("", lambda one: one.update(more=1), "complete"),
    ("", lambda one: one.update(verdict=7), "complete"),
    ("", lambda one: one.update(public_key="0" * 64), "signature"),
]


@pytest.mark.parametrize(("name", "change", "wrong"), WRONG)
@pytest.mark.parametrize("first", [True, False])
def test_a_wrong_statement_fails(name: str, change: Callable[[Document], object], wrong: str, first: bool) -> None:
    """A receipt that contradicts itself fails at that statement, although its signature is right."""
    found = results(forged(change, name, first=first))
    assert found[wrong] is False, found
    assert {check for check, holds in found.items() if holds is False} <= {wrong, "speedup"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tolerance": {"atol": 1e9, "rtol": 0.0}}, 'tolerance={"atol": 1000000000.0, "rtol": 0.0}'),
        ({"tolerances": [{"atol": 1e9, "rtol": 0.0}]}, 'tolerances=[{"atol": 1000000000.0, "rtol": 0.0}]'),
        ({"comparison": "kernelbench", "seed": 7}, 'seed=7, comparison="kernelbench"'),
        ({"checks": 1, "policies": {"buffers": "allow"}, "timing": {"cold_l2": False}}, "checks=1"),
        ({"policies": {"findings": "reject"}, "timing": 7}, ""),
    ],
)
def test_other_rules_are_said_first(settings: Document, words: str) -> None:
    """A verdict by other rules than the problem's is no result by these, and that is the first statement."""
    first, *others = checks.verify(forged(lambda one: one["settings"].update(settings)), None)[0]
    assert (first.name, first.holds, words in first.detail) == ("rules", None if words else True, True)
    assert {"comparison", "tolerance", "labels"} <= {check.name for check in others}


def test_labels_and_purpose_are_statements() -> None:
    """A label by which a verdict means little is no statement that holds, and a trial is named as one."""

    def change(one: Document) -> None:
        one["purpose"] = "duel"
        one["verdict"]["evidence"]["comparison"] |= {"precision_downgrade": True, "strict_correct": False}

    found = {check.name: check for check in checks.verify(forged(change), None)[0]}
    assert (found["purpose"].detail, found["labels"].holds) == ("a trial of: duel", None)
    assert found["labels"].detail.endswith("the strict comparison refuses it")


def test_unknown_parts() -> None:
    """A receipt cannot show the statements for which it has no content, and other versions' evidence is ignored."""
    assert results(forged(lambda one: one.update(problem=None, kernel=None)))["sources"] is None
    assert results(forged(of_runtime(samples_ms=None)))["times"] is None
    newer = forged(lambda one: one["verdict"]["evidence"].update(weather="rain"))
    assert set(results(newer, (receipts.public_key(MINE),)).values()) == {True}
    emptied = forged(lambda one: one["verdict"]["evidence"].update(emptied_at="2026-01-01T00:00:00Z"))
    assert results(emptied)["complete"] is None
    for junk in (b"", b"[]", b'"schema"', b"{}", b"\xff", b"[" * 100_000, b'{"schema":NaN}', b"1" * 10_000):
        assert results(junk) == {"form": False}


def nested(depth: int) -> Any:
    """Return lists in each other."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("place", ["settings", "owner", "verdict", "facts", "evidence", "more"])
@pytest.mark.parametrize("depth", [1, 50, 200, 700])
def test_any_depth_is_answered(place: str, depth: int) -> None:
    """A document nested anywhere, signed correctly, is checked or refused without an exception."""

    def change(document: Document) -> None:
        inner = document["verdict"] if place in ("facts", "evidence") else document
        inner[place] = {"a": nested(depth)} if place != "owner" else nested(depth)

    assert False in results(forged(change), (KEY,)).values()


@pytest.mark.parametrize(
    "content",
    [
        b"0" * (checks.MAX_BYTES + 1),
        STORED[""] + b" " * checks.MAX_BYTES,
        b'{"schema":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        STORED[""].replace(b'"owner":', b'"owner":"eve","owner":', 1),
        STORED[""].replace(b'"owner":', b'"owner":NaN,"other":', 1),
        STORED[""].replace(b'"owner":', b'"owner":-Infinity,"other":', 1),
        STORED[""].replace(b'"owner":', b'"owner":1e999,"other":', 1),
        STORED[""].replace(b'"owner":', b'"owner":' + b"9" * 5000 + b',"other":', 1),
        STORED[""].replace(b'"owner":', b'"owner":"\\ud800","other":', 1),
    ],
    ids=["large", "padded", "deep list", "deep object", "twice", "NaN", "infinity", "overflow", "digits", "surrogate"],
)
def test_any_text_is_answered(content: bytes) -> None:
    """A text of any size and form is refused without an exception."""
    assert False in results(content, (KEY,)).values()


def agreement(now: Outcome | None = None, *, device: str = "a CPU", whole: bool = True) -> list[bool | None]:
    """Return whether category, runtime and speedup of the stored receipt agree with an outcome, by default its own."""
    then = Verdict.load(json.loads(checks.renamed(STORED[""]))["verdict"])
    same = Outcome(category=then.category, runtime=then.runtime, baseline=then.baseline)
    where = Environment(device=device, torch="2", python="3", host="here")
    return [check.holds for check in checks.compare(then, now or same, where, whole=whole)]


def test_a_new_judgement_is_compared() -> None:
    """Times agree within their intervals, and only times of one device, clock and set of shapes are compared."""
    runtime = Verdict.load(json.loads(checks.renamed(STORED[""]))["verdict"]).runtime
    assert runtime is not None
    slow = {name: getattr(runtime, name) * 9 for name in ("median_ms", "low_ms", "high_ms")}
    slower = Outcome(category=Category.PASSED, runtime=runtime.model_copy(update=slow))
    other = Outcome(category=Category.PASSED, runtime=runtime.model_copy(update={"basis": "gpu_clock"}))
    assert agreement() == [True, True, True]
    assert agreement(slower) == [True, False, None]
    assert agreement(other) == [True, None, None]
    assert agreement(slower, device="an H100") == [True, None, None]
    assert agreement(slower, whole=False) == [True, None, None]
    assert agreement(ended(Category.WRONG_VALUES)) == [False, None, None]


def test_keys_are_created_once_and_bad_files_are_refused(tmp_path: Path) -> None:
    """A key's file is private and never overwritten, and other content is an error that repeats nothing of it."""
    path = tmp_path / "receipts.pem"
    receipts.create_key(path)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        receipts.create_key(path)
    assert (path.read_bytes(), path.stat().st_mode & 0o777, len(receipts.load_keys(path))) == (before, 0o600, 1)
    assert receipts.load_keys(None) == receipts.load_keys(tmp_path / "none") == []
    for content in (before + b"secret", before.replace(b"M", b"-"), b"secret", before[:-30]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="KQUEUE_RECEIPT_KEY") as caught:
            receipts.load_keys(path)
        assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be written"):
        receipts.create_key(tmp_path / "none" / "receipts.pem")


def test_the_command_verifies(tmp_path: Path) -> None:
    """It prints each statement, ends with status 1 if one fails, and demands the key of a fleet."""
    cli = Cli(tmp_path, {"KQUEUE_HOME": str(tmp_path / "home")})
    (tmp_path / "good.json").write_bytes(STORED[""])
    (tmp_path / "bad.json").write_bytes(STORED[""].replace(b'"passed"', b'"Passed"'))
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"public_key": KEY}]}))
    (tmp_path / "mine.json").write_bytes(forged(lambda _: None))
    for name in ("good.json", "mine.json"):
        found = cli("verify", name)
        assert (found.returncode, "any key can sign" in found.stderr) == (2, True), found.stderr
        assert cli("verify", name, "--key", KEY).returncode == (name == "mine.json")
    assert "none of the given keys" in cli("verify", "mine.json", "--key", "keys.json").stdout
    assert "none of the given keys" in cli("replay", "mine.json", "--key", KEY).stdout
    assert cli("verify", "-", "--key", KEY, stdin=STORED[""]).returncode == 0
    rows = [json.loads(line) for line in cli("verify", "good.json", "--key", "keys.json", "--json").stdout.splitlines()]
    assert {row["holds"] for row in rows} == {True}
    failed = cli("verify", "bad.json", "--key", KEY)
    assert (failed.returncode, "failed: signature, complete" in failed.stderr) == (1, True), failed.stderr
    assert cli("verify", "good.json", "--key", "good.json").returncode == 2
    assert cli("replay", "bad.json").returncode == 1
    assert "Is a directory" in cli("verify", ".", "--key", KEY).stderr
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", 1 << 30)
    for file, words in {
        "none.json": "No such file",
        "pipe": "not a regular file",
        "/dev/zero": "not a regular file",
        "loop": "symbolic links",
        "huge": "larger than",
    }.items():
        for arguments in (("verify", file, "--key", KEY), ("replay", file), ("verify", "good.json", "--key", file)):
            refused = cli(*arguments)
            assert (refused.returncode, words in refused.stderr) == (2, True), (arguments, refused.stderr)


@pytest.mark.slow("judges a kernel")
def test_the_command_judges_again(tmp_path: Path) -> None:
    """A replay uses the receipt's sources or equal files, and compares outcomes of different devices."""
    cli = Cli(tmp_path, {"KQUEUE_SCRATCH": str(tmp_path / "scratch")})
    settings = {"checks": 1, "timing": {"purpose": "check"}}
    receipt = forged(lambda one: one.update(problem=None, settings=one["settings"] | settings), first=False)
    (tmp_path / "receipt.json").write_bytes(receipt)
    given = json.loads(STORED[""])
    cli.write("problem.py", given["problem"])
    cli.write("kernel.py", given["kernel"])
    assert "give them with --problem and --kernel" in cli("replay", "receipt.json").stderr
    other = cli("replay", "receipt.json", "--problem", "kernel.py")
    assert (other.returncode, "not the judged problem" in other.stderr) == (2, True), other.stderr
    done = cli("replay", "receipt.json", "--problem", "problem.py", "--json")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["holds"] for line in done.stdout.splitlines()][-3:] == [True, None, None]


def test_several_receipts_on_a_kernel_are_compared(tmp_path: Path) -> None:
    """A folder shows how often, by how many keys and on which devices a kernel was judged, and what differs."""
    cli, folder = Cli(tmp_path, {"KQUEUE_HOME": str(tmp_path / "home")}), tmp_path / "receipts"
    (folder / "more").mkdir(parents=True)
    assert "has no receipts" in cli("replay", "receipts").stderr

    def add(name: str, *, factor: float = 1.0, **environment: str) -> None:
        def change(one: Document) -> None:
            held, times = one["verdict"], one["verdict"]["runtime"]
            held["evaluation_id"] = f"00000000-0000-4000-8000-{len([*folder.rglob('*.json')]):012}"
            held["environment"] |= environment
            for member in ("median_ms", "low_ms", "high_ms", "q1_ms", "q3_ms", "min_ms"):
                times |= {member: factor * times[member]} if member in times else {}
            times["samples_ms"] = [factor * one for one in times["samples_ms"]]
            held["runtime_ms"] *= factor
            held["speedup"] /= factor

        (folder / name).write_bytes(forged(change, first=False))

    (folder / "stored.json").write_bytes(STORED[""])
    (folder / "more" / "copy.json").write_bytes(STORED[""])
    (folder / "other.json").write_text("{}")
    done = cli("replay", "receipts")
    assert (done.returncode, "judged 1 time by 1 key on 1 model of CPU\n" in done.stdout) == (0, True), done.stdout
    add("b.json", torch="2.99")
    add("c.json", device="another CPU")
    add("d.json", factor=1.001)
    done = cli("replay", "receipts", "--json")
    [row] = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, row["judged"], row["keys"], len(row["devices"]), row["times_agree"]) == (0, 4, 2, 2, True)
    assert row["spread"] == pytest.approx(0.001)
    assert any(line.startswith("torch: ") and line.endswith("2.99 (1)") for line in row["differs"])
    add("e.json", factor=2.0)
    add("f.json")
    (folder / "f.json").write_bytes((folder / "f.json").read_bytes().replace(b'"keyid":"', b'"keyid":"0'))
    done = cli("replay", "receipts")
    assert (done.returncode, "f.json does not count: form" in done.stderr) == (1, True), done.stderr
    assert "judged 5 times by 2 keys on 2 models of CPU, times differ by 100.0 %" in done.stdout
    assert "times on" in done.stdout
    assert "c.json does not count: key" in cli("replay", "receipts", "--key", KEY).stderr
