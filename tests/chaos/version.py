"""Another version of kqueue: a copy of its packages with another version number and a newer schema."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from kqueue import program
from kqueue.store import schema

_ROOT = Path(__file__).parents[2]
_PACKAGES = ("kqueue", "workers", "migrations")
_MIGRATION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "9000", "{before}", None, None


def upgrade() -> None:
    op.add_column("evaluations", sa.Column("later", sa.Text(), nullable=True))
    op.add_column("workers", sa.Column("later", sa.Text(), server_default="later", nullable=False))


def downgrade() -> None:
    op.drop_column("workers", "later")
    op.drop_column("evaluations", "later")
"""


def add_later(migrations: Path) -> None:
    """Add a later version's migration to a copy of the folder of migrations."""
    (migrations / "versions" / f"{OtherVersion.REVISION}_later.py").write_text(_MIGRATION.format(before=schema.head()))


def know_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process migrate with a copy of the migrations and a later version's."""
    copy = shutil.copytree(_ROOT / "migrations", folder / "migrations")
    add_later(copy)
    monkeypatch.setattr(program, "folder", lambda _: copy)


class OtherVersion:
    """A newer kqueue in a separate folder that is world-readable for sealed processes."""

    #: Its version, and its schema.
    NAME = "9.9"
    REVISION = "9000"

    def __init__(self, folder: Path) -> None:
        """Copy the packages into an empty folder and change the files that a release changes."""
        for package in _PACKAGES:
            shutil.copytree(_ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        told = folder / f"kqueue-{self.NAME}.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kqueue\nVersion: {self.NAME}\n")
        # The backends, because this folder hides the installed version's.
        (told / "entry_points.txt").write_text(metadata.distribution("kqueue").read_text("entry_points.txt") or "")
        add_later(folder / "migrations")
        # Any change of the judge's code makes another judge, which does not reuse the older one's verdicts.
        with (folder / "workers" / "judge" / "api.py").open("a") as code:
            code.write(f"\n#: Of version {self.NAME}.\n")
        self._folder = folder

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables with which Python imports this version."""
        return {"PYTHONPATH": os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])}

    def kqueue(self, *words: str, environment: Mapping[str, str]) -> str:
        """Run a command of this version and return its output."""
        command = [sys.executable, "-P", "-m", "kqueue", *words]
        variables = {**os.environ, **environment, **self.variables}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout
