"""A real fleet for the attacks: that of tests/fleet."""

from __future__ import annotations

from tests.fleet.conftest import fleet, services, start_fleet  # noqa: F401
