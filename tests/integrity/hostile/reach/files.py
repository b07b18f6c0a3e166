"""Reads files that are closed to it: the host's passwords, root's home, a file that everybody may read.

Landlock leaves it system folders, the packages and its own directory. Links are followed and refused like the files
they name. It answers honestly and passes; what it could read would be in an exception's message.
"""


def attack():
    for path in ("/etc/shadow", "/root/.ssh/id_rsa", "/root/.bash_history", "/tmp/kqueue-outside/secret"):
        refused(path, lambda: open(path).read())
        link = f"link-{os.urandom(4).hex()}"
        os.symlink(path, link)
        refused(f"{path} by a link", lambda: open(link).read())
    for folder in ("/root", "/tmp/kqueue-outside", "/home", "/var/lib"):
        refused(f"the folder {folder}", lambda: os.listdir(folder))
        refused(f"a file in {folder}", lambda: open(f"{folder}/kqueue-planted", "w"))
