"""Looks into the directories of other sealed processes: the candidate's, the builder's, another problem's.

They lie beside its own, under random names, in a folder that it may traverse and not list, and belong to other uids.
It passes.
"""


def attack():
    here = os.getcwd()
    beside = os.path.dirname(here)
    for folder in (beside, os.path.dirname(beside)):
        refused(f"the folder {folder}", lambda: os.listdir(folder))
        refused(f"a file in {folder}", lambda: open(f"{folder}/planted", "w"))
    refused("its own folder's name", lambda: os.rename(here, here + "-moved"))
