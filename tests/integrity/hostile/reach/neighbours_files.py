"""Looks into the directories of other sealed processes: the candidate's, the builder's, another problem's.

They lie beside its own, under random names, in a folder that it may traverse and not list, and belong to other uids.
It passes.
"""

import os

import torch


def refused(what, attempt):
    """Do something that must be refused; if it is not, say so where nobody can overlook it."""
    try:
        found = attempt()
    except (OSError, ValueError):
        return
    raise RuntimeError(f"ATTACK SUCCEEDED: {what}: {str(found)[:200]}")


def attack():
    here = os.getcwd()
    beside = os.path.dirname(here)
    for folder in (beside, os.path.dirname(beside)):
        refused(f"the folder {folder}", lambda: os.listdir(folder))
        refused(f"a file in {folder}", lambda: open(f"{folder}/planted", "w"))
    refused("its own folder's name", lambda: os.rename(here, here + "-moved"))


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2 + 1


def get_inputs():
    return [torch.randn(16, 8)]


def get_init_inputs():
    return []


attack()
