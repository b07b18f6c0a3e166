"""Leaves a tree that is hard to remove: links out of it, loops, pipes, closed and very deep directories, odd names.

A sweeper that follows a link removes what lies behind it; one that recurses dies of the depth; one that opens a pipe
waits for ever. (The link leads to the slot's own scratch directory, so that little would be lost.) Here links are
removed and not followed, beside the next evaluation. The kernel is right and passes.
"""

here = os.getcwd()
shutil.rmtree(os.environ["TMPDIR"])
os.symlink(os.path.dirname(here), os.environ["TMPDIR"])
os.symlink("..", "up")
os.symlink("loop", "loop")
os.mkfifo("pipe")
os.link("kernel.py", "twin.py")
for name in ("-rf", "--", "* ?", "new\nline", "\x1b[2J", "$(id)"):
    os.makedirs(name)
os.makedirs("closed/inside")
open("closed/inside/file", "w").close()
os.chmod("closed/inside", 0)
os.chmod("closed", 0)
for _ in range(600):
    os.mkdir("d")
    os.chdir("d")
os.chdir(here)
