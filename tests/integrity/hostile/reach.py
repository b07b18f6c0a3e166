"""Problems that reach for what is not theirs."""

# fmt: off

# %% database
"""Loads the fleet's own settings and drivers to reach its database and its queue.
The packages can be imported, but no setting names a service, and nothing can be connected to. It passes."""
def attack():
    try:
        import psycopg
        import redis

        from kqueue.config import load
    except ImportError:  # not installed with a worker alone, or closed to it
        return
    if "secret-of-the-fleet" in repr(load()):
        raise RuntimeError("ATTACK SUCCEEDED: the settings")
    for what in (
        lambda: psycopg.connect("postgresql://postgres@127.0.0.1/postgres", connect_timeout=1),
        lambda: psycopg.connect("postgresql:///postgres?host=/tmp", connect_timeout=1),
        lambda: redis.Redis(port=6379, socket_connect_timeout=1).ping(),
    ):
        try:
            what()
        except Exception:
            continue
        raise RuntimeError("ATTACK SUCCEEDED: a service")

# %% descriptors
"""Searches its own descriptors for something that is not its own: a socket, a file, another's memory.
All are closed but its channel, the page of flags, the judge's buffers and the standard three. It passes."""
def attack():
    sockets = files = 0
    for number in range(3, 4096):
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue
        sockets += stat.S_ISSOCK(mode)
        target = os.readlink(f"/proc/self/fd/{number}")
        files += stat.S_ISREG(mode) and "memfd:kqueue" not in target and os.getcwd() not in target
    if sockets != 1 or files:
        raise RuntimeError(f"ATTACK SUCCEEDED: {sockets} sockets, {files} files")

# %% environment
"""Looks for credentials in its own environment and in those of all processes around it.
The fork server is started with a list of variables that are allowed, none of them a secret, and Landlock hides the
environments of other processes. It finds nothing and passes."""
def attack():
    seen = dict(os.environ)
    for pid in ["self", *neighbours()]:
        with contextlib.suppress(OSError):
            seen[pid] = open(f"/proc/{pid}/environ").read()
    if "secret-of-the-fleet" in repr(seen) or any(str(name).startswith("KQUEUE_") for name in seen):
        raise RuntimeError(f"ATTACK SUCCEEDED: {sorted(map(str, seen))}")

# %% files
"""Reads files that are closed to it: the host's passwords, root's home, a file that everybody may read.
Landlock leaves it system folders, the packages and its own directory. Links are followed and refused like the files
they name. It answers honestly and passes; what it could read would be in an exception's message."""
def attack():
    for path in ("/etc/shadow", "/root/.ssh/id_rsa", "/root/.bash_history", "/tmp/kqueue-outside/secret"):
        refused(path, lambda: open(path).read())
        link = f"link-{os.urandom(4).hex()}"
        os.symlink(path, link)
        refused(f"{path} by a link", lambda: open(link).read())
    for folder in ("/root", "/tmp/kqueue-outside", "/home", "/var/lib"):
        refused(f"the folder {folder}", lambda: os.listdir(folder))
        refused(f"a file in {folder}", lambda: open(f"{folder}/kqueue-planted", "w"))

# %% kernel_source
"""Searches all of its own memory, and its directory, for the source of the kernel that it is compared with.
A reference is told its problem and seeds, never a kernel. It finds nothing and passes."""
def attack():
    mark = re.compile(rb"THIS-IS-THE-KERNEL[S]-SOURCE")  # which does not find itself
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps:
            where, rights = line.split()[:2]
            begin, end = (int(number, 16) for number in where.split("-"))
            if rights.startswith("rw") and end - begin < 1 << 28 and "[v" not in line:
                memory.seek(begin)
                try:
                    found = mark.search(memory.read(end - begin))
                except OSError:
                    continue
                if found:
                    raise RuntimeError("ATTACK SUCCEEDED: the kernel's source")
    if mark.search(open("kernel.py", "rb").read()):
        raise RuntimeError("ATTACK SUCCEEDED: a file")

def forward(self, x):
    attack()
    return x * 2 + 1

# %% neighbours_files
"""Looks into the directories of other sealed processes: the candidate's, the builder's, another problem's.
They lie beside its own, under random names, in a folder that it may traverse and not list, and belong to other uids. It
passes."""
def attack():
    here = os.getcwd()
    beside = os.path.dirname(here)
    for folder in (beside, os.path.dirname(beside)):
        refused(f"the folder {folder}", lambda: os.listdir(folder))
        refused(f"a file in {folder}", lambda: open(f"{folder}/planted", "w"))
    refused("its own folder's name", lambda: os.rename(here, here + "-moved"))

# %% proc
"""Opens memory, maps, descriptors and working directories of the judge and the fork server in /proc.
Landlock leaves it of /proc its own process and a few files about the machine. Each attempt is refused and it passes."""
def attack():
    for pid in neighbours():
        for name in ("mem", "maps", "environ", "syscall", "stack", "auxv"):
            refused(f"{name} of {pid}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
        for name in ("fd", "map_files", "task"):
            refused(f"{name} of {pid}", lambda: os.listdir(f"/proc/{pid}/{name}"))
        refused(f"root of {pid}", lambda: os.listdir(f"/proc/{pid}/root/"))

# %% shared_memory
"""Leaves a message for the candidate: in /dev/shm, System V memory, message queues, an abstract socket.
A problem and a kernel of one author would meet there. None can be had, or only in a file system of its own, and it
passes."""
def attack():
    libc = ctypes.CDLL(None)
    if libc.shmget(4711, 4096, 0o1666) >= 0 or libc.msgget(4711, 0o1666) >= 0 or libc.semget(4711, 1, 0o1666) >= 0:
        raise RuntimeError("ATTACK SUCCEEDED: System V")
    for path in ("/dev/shm/kqueue-message", "/dev/mqueue/kqueue-message", "/tmp/kqueue-message", "/var/tmp/message"):
        try:
            open(path, "w").write("the answers are all 42")
        except OSError:
            continue
        if os.stat(path).st_dev != os.stat(".").st_dev:
            raise RuntimeError(f"ATTACK SUCCEEDED: {path}")
    try:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect("\0kqueue-message")
    except OSError:
        return
    raise RuntimeError("ATTACK SUCCEEDED: an abstract socket")

# %% signals
"""Signals the judge, the fork server, the candidate and other slots: one by one, by group, and all at once.
Other uids and Landlock's scopes refuse each. It passes, and all the others live on."""
def attack():
    for pid in neighbours():
        refused(f"SIGSTOP to {pid}", lambda: os.kill(pid, signal.SIGSTOP))
        refused(f"SIGKILL to the group of {pid}", lambda: os.killpg(pid, signal.SIGKILL))
    for number in (signal.SIGSTOP, signal.SIGKILL):
        with contextlib.suppress(OSError):
            os.kill(-1, number)  # the kernel does not say that nobody has heard it

# %% sockets
"""Connects to whoever listens on the host: TCP on loopback, a socket on a path, an abstract one; sends datagrams.
Connecting is denied by the filter of system calls, and it has a network of its own. It passes."""
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as link:
        link.settimeout(1)
        link.connect(address)
        return link.recv(64)

def send(family, address):
    with socket.socket(family, socket.SOCK_DGRAM) as link:
        return link.sendto(b"hello", address)

def attack():
    for port in (28188, 5432, 6379, 18188):
        refused(f"port {port}", lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
        refused(f"port {port} by datagram", lambda: send(socket.AF_INET, ("127.0.0.1", port)))
    for path in ("/tmp/kqueue-outside/socket", "\0/tmp/kqueue-outside"):
        refused(path, lambda: connect(socket.AF_UNIX, path))
        refused(f"{path} by datagram", lambda: send(socket.AF_UNIX, path))
