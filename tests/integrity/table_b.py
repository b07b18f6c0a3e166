"""Cheats on values, and on the processes around a kernel."""

from __future__ import annotations

from typing import Final

from tests.integrity.corpus import Program

TABLE: Final[list[Program]] = []
