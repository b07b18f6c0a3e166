"""A clone of a small repository of operators."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIST = """
root = "src"
[[operator]]
name = "scale"
import = "mine.ops:scale"
reference = "torch:mul"
reference_call = "entry(x, 2)"
inputs = { x = ["m", "n"] }
shapes = [{ m = 4, n = 32 }]
"""
OPS = "from mine import parts\n\ndef scale(x):\n    return parts.twice(x)\n"
PARTS = "def twice(x):\n    return x * 2\n"
#: Wrong behind a multiple of 16.
TAIL = "def twice(x):\n    y = x.clone()\n    y[:, : x.shape[1] // 16 * 16] *= 2\n    return y\n"


class Repository:
    """A clone in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q")
        self.base = self.commit({"kqueue.toml": LIST, "src/mine/__init__.py": "", "src/mine/ops.py": OPS,
                                 "src/mine/parts.py": PARTS, "README.md": "Mine"})  # fmt: skip

    def git(self, *words: str) -> str:
        command = ["git", "-C", str(self.folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, files: dict[str, str | None]) -> str:
        """Write files, or remove those whose text is None, and return the revision."""
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink() if text is None else path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "change")
        return self.git("rev-parse", "HEAD")
