"""Looks into the directories of other slots and kernels.

Sources, caches and files of a kernel that runs beside this one, or ran before, would save a lot of thinking.
"""


def attack():
    here = os.getcwd()
    for folder in (os.path.dirname(here), os.path.dirname(os.path.dirname(here))):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        others = [name for name in names if name != os.path.basename(here) and name != os.path.basename(folder)]
        if folder != "/" and folder != "/tmp":
            raise RuntimeError(f"ATTACK SUCCEEDED: sees {folder}: {others}")
