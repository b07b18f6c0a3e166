"""Loads ``examples/gallery.py``, which is not in an installed package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))

import gallery as gallery
