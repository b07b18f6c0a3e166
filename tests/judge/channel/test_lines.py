"""Checks of the files behind descriptors that a process sends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.judge.channel.lines import content


def test_a_files_beginning_and_end(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"first\n" + b"x" * 100 + b"\nlast\xff")
    with file.open("rb") as opened:
        opened.seek(50)
        assert content(opened.fileno(), 5) == "first"
        assert content(opened.fileno(), 5, at_end=True) == "last\ufffd"
        assert content(opened.fileno(), 1000).count("x") == 100


@pytest.mark.timeout(20)
def test_nothing_of_what_is_no_file(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    folder, written = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    try:
        assert [content(one, 10, at_end=True) for one in (reads, writes, folder, written)] == [""] * 4
    finally:
        for descriptor in (reads, writes, folder, written):
            os.close(descriptor)
    assert content(reads, 10) == ""
