"""Commands that write kernels, and their input."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kqueue.errors import ProposerFailed
from kqueue.features.search.proposers import Command, Question
from kqueue.local.process import running
from tests.waiting import until

QUESTION = Question("run", 1, 1, "p", "torch", "k", {"speedup": 1.0}, "f", None, "prompt")


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_a_command_reads_json_and_writes_a_kernel() -> None:
    code = "import json, sys; q = json.load(sys.stdin); print(q['kernel'], q['scores'], q['summary'], len(q))"
    assert Command(python(code), answer_s=60).propose(QUESTION) == "k {'speedup': 1.0} None 10\n"

    # A command need not read even a long question.
    assert Command(python("print('mine')"), answer_s=60).propose(replace(QUESTION, problem="p" * 1_000_000)) == "mine\n"


def test_a_command_without_an_answer() -> None:
    for command, says in (
        (python("raise SystemExit('out of ideas')"), "ended with 1: out of ideas"),
        (python("pass"), "wrote nothing to stdout"),
        (python("import sys; sys.stdout.buffer.write(b'\\xff')"), "not UTF-8"),
        (python("import time; time.sleep(100)"), "gave no answer in 0.5 s"),
        ("/no/such/program", "No such file"),
    ):
        with pytest.raises(ProposerFailed, match=says):
            Command(command, answer_s=0.5 if "sleep" in command else 60).propose(QUESTION)


def test_closing_kills_the_command_and_what_it_started(tmp_path: Path) -> None:
    """No process of the command is left, and no new one starts."""
    code = (
        "import os, subprocess, sys, time;"
        " p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)']);"
        f" f = open({str(tmp_path / 'new')!r}, 'w'); f.write(f'{{os.getpid()}} {{p.pid}}'); f.close();"
        f" os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pids')!r}); time.sleep(100)"
    )
    command = Command(python(code), answer_s=100)
    failed: list[ProposerFailed] = []

    def ask() -> None:
        try:
            command.propose(QUESTION)
        except ProposerFailed as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    until((tmp_path / "pids").exists, what="the command")
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    before = time.monotonic()
    command.close()
    asking.join(60)
    assert time.monotonic() - before < 60
    assert failed
    until(lambda: not any(running(pid) for pid in pids), what="the end of what it started")
    with pytest.raises(ProposerFailed, match="over"):
        command.propose(QUESTION)
