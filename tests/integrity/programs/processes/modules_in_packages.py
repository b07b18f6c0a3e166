"""Plants a module in every directory from which Python imports.

sitecustomize.py, or a package that shadows another, is executed by whatever interpreter starts next. Here the
candidate may read what it runs on and write none of it. (What it plants is a name of no meaning, and is removed.)
"""


def attack():
    folders = {*sys.path, *site.getsitepackages(), sys.prefix, os.path.dirname(torch.__file__)}
    for folder in sorted(folders):
        if not folder or folder.startswith(os.getcwd()) or not os.path.isdir(folder):
            continue
        path = f"{folder}/kqueue_planted_{os.getpid()}.py"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        except OSError:
            continue
        os.unlink(path)
        raise RuntimeError(f"ATTACK SUCCEEDED: wrote to {folder}")
