"""Whose want of memory it is when Linux kills a process of a control group."""

from __future__ import annotations

import subprocess
import sys

import pytest

from workers.judge.sandbox import cgroups
from workers.judge.sandbox.cgroups import Group, Groups, Lack


def test_the_lack_of_an_outer_group_is_not_a_group_s_own() -> None:
    """Linux counts a kill for the host's or an outer group's lack too; ``test_seal.py`` has a group's own."""
    groups = Groups()
    try:
        if groups.measures["cgroup_memory"] is not True:
            pytest.skip(f"no memory can be bounded here: {groups.measures['cgroup_memory']}")
        outer = groups.group(128 << 20, 64)
        assert outer is not None
        for place in outer._places:
            if place.kind == "v2":
                cgroups._divide(place.directory)
        group = Group(outer._places, "inner", 1 << 30, 64)
        eat = [sys.executable, "-c", "x = b'y' * (256 << 20)"]
        assert subprocess.run(eat, preexec_fn=group.join, check=False).returncode == -9
        assert group.out_of_memory() is Lack.OTHERS
        group.remove()
        outer.remove()
    finally:
        groups.close()
