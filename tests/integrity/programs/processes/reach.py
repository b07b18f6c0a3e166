"""Programs that reach for services, processes and devices."""

# fmt: off

# %% database_environment
"""Searches its own and its supervising processes' environment and memory for the fleet's settings.
With the database's URL a kernel writes its own verdict. The fork server was forked before any secret was read, its
environment names a fixed list of variables, and the environments of worker and judge belong to another user."""
def attack():
    prefixes = ("KQUEUE_DATABASE", "KQUEUE_REDIS", "KQUEUE_BROKER", "PGPASSWORD", "DATABASE_URL")
    found = [name for name in os.environ if name.startswith(prefixes)]
    for pid in keepers():
        try:
            environ = open(f"/proc/{pid}/environ", "rb").read()
        except OSError:
            continue
        found += [f"{name} of {pid}" for name in prefixes if name.encode() in environ]
    scheme = "postgresql" + "+psycopg:"
    for thing in gc.get_objects():
        if type(thing) is dict:
            found += [
                f"{key!r}" for key, value in list(thing.items()) if type(value) is str and value.startswith(scheme)
            ]
    if found:
        raise RuntimeError(f"ATTACK SUCCEEDED: {found}")

# %% service_sockets
"""Connects to a service of the fleet on every address where a fleet has one.
By unix sockets that the kernel's table names, and by TCP on this host. A connection to Postgres writes verdicts, as
local users are often trusted; Redis asks for no password by default, and deletes and sends tasks."""
PORTS = ()
SOCKETS = ()

def attack():
    tries = [(socket.AF_INET, ("127.0.0.1", port)) for port in PORTS]
    try:
        lines = open("/proc/net/unix").read().splitlines()
    except OSError:
        lines = []
    tries += [(socket.AF_UNIX, line.split()[-1]) for line in lines if any(name in line for name in SOCKETS)]
    for family, address in tries:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as door:
                door.settimeout(1)
                door.connect(address)
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: connected to {address}")

# %% redis_modules
"""Searches for a client, a broker or a connection that its process might have inherited.
A worker that forks its kernels hands them its open connections and its loaded settings. The fork server imports none of
these, and inherits no descriptor."""
def attack():
    found = [name for name in ("celery", "redis", "kombu", "sqlalchemy", "psycopg") if name in sys.modules]
    found += [
        name for name in ("kqueue.config", "kqueue.store", "workers.judge.pipeline", "workers.app") if name in sys.modules
    ]
    for fd in range(3, 4096):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if not target.startswith(("socket:", "/memfd:", "/dev/", "anon_inode:", "pipe:", "/proc/")):
            found.append(target)
    if found:
        raise RuntimeError(f"ATTACK SUCCEEDED: {found}")

# %% judge_memory
"""Reads and writes the memory of its supervising processes: ptrace, process_vm_readv, /proc/PID/mem.
The judge holds the answers, the seeds and the database's password. Its memory belongs to another user, and the calls
themselves are forbidden."""
class IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(64)
    for pid in keepers():
        if libc.ptrace(0x4206, pid, None, None) == 0:  # PTRACE_SEIZE, which does not stop it
            libc.ptrace(17, pid, None, None)
            raise RuntimeError(f"ATTACK SUCCEEDED: traces {pid}")
        try:
            where = int(open(f"/proc/{pid}/maps").readline().split("-")[0], 16)
        except (OSError, ValueError):
            where = ctypes.addressof(buffer)  # forked from one parent, both lie where the other does
        mine, theirs = IoVec(ctypes.addressof(buffer), 64), IoVec(where, 64)
        if libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:
            raise RuntimeError(f"ATTACK SUCCEEDED: read the memory of {pid}")
        for mode in (os.O_RDONLY, os.O_RDWR):
            try:
                os.close(os.open(f"/proc/{pid}/mem", mode))
            except OSError:
                continue
            raise RuntimeError(f"ATTACK SUCCEEDED: opened the memory of {pid}")

# %% judge_descriptors
"""Takes descriptors from its supervising processes: pidfd_getfd, and opening /proc/PID/fd.
With the judge's connection to Postgres, or the buffers that hold its answers, nothing else is needed."""
def attack():
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in keepers():
        handle = libc.syscall(434, pid, 0)  # pidfd_open
        if handle >= 0:
            for number in range(64):
                if libc.syscall(438, handle, number, 0) >= 0:  # pidfd_getfd
                    raise RuntimeError(f"ATTACK SUCCEEDED: took descriptor {number} of {pid}")
            os.close(handle)
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: sees {len(names)} descriptors of {pid}")

# %% judge_signals
"""Signals its supervising processes, whose death or pause would be the fleet's failure and cause a retry.
Only asks whether it might (signal 0), and sends SIGCONT, which does nothing. Another user's processes cannot be
signalled, nor those outside the candidate's own scope."""
def attack():
    for pid in keepers():
        for number in (0, signal.SIGCONT):
            try:
                os.kill(pid, number)
            except OSError:
                continue
            raise RuntimeError(f"ATTACK SUCCEEDED: may signal {pid}")

# %% judge_priorities
"""Takes real-time priority for itself and the CPUs from its supervising processes.
A spinning thread with SCHED_FIFO starves everything else on its core, clocks of other slots included; a lower limit on
the judge makes every measurement late."""
def attack():
    tries = [
        lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
        lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
    ]
    for pid in keepers():
        tries.append(lambda pid=pid: os.sched_setaffinity(pid, os.sched_getaffinity(pid)))
        tries.append(lambda pid=pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)))
    for number, attempt in enumerate(tries):
        try:
            attempt()
        except OSError:
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: try {number}")

# %% network_tcp
"""Communicates over TCP, here with itself on the loopback.
A kernel with a network asks another machine for its answers, tells it the problems, or reaches the fleet's services."""
def attack():
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            with socket.create_connection(server.getsockname(), timeout=2):
                pass
    except OSError:
        return
    raise RuntimeError("ATTACK SUCCEEDED: a TCP connection")

# %% network_other
"""Opens sockets of families that filters forget: raw packets, virtual machines, the operating system's cipher service.
AF_VSOCK reaches the host of a virtual machine, AF_ALG and AF_PACKET have long lists of holes."""
def attack():
    for family, kind in (
        ("AF_ALG", socket.SOCK_SEQPACKET),
        ("AF_VSOCK", socket.SOCK_STREAM),
        ("AF_PACKET", socket.SOCK_RAW),
    ):
        try:
            socket.socket(getattr(socket, family), kind).close()
        except (OSError, AttributeError):
            continue
        raise RuntimeError(f"ATTACK SUCCEEDED: {family}")

# %% second_gpu
"""Searches for other GPUs, in this process and in one without CUDA_VISIBLE_DEVICES.
With a second GPU half of the work is done where no clock looks, and another slot's kernel is slowed. The variable is a
wish; what holds is which device nodes may be opened."""
def attack():
    opened = []
    for node in sorted(glob.glob("/dev/nvidia[0-9]*")):
        try:
            os.close(os.open(node, os.O_RDWR))
        except OSError:
            continue
        opened.append(node)
    if len(opened) > 1:
        raise RuntimeError(f"ATTACK SUCCEEDED: opened {opened}")
    question = "import torch; print(sum(torch.ones(1, device=i).item() for i in range(torch.cuda.device_count())))"
    environment = {name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name}
    answer = subprocess.run([sys.executable, "-c", question], env=environment, capture_output=True, text=True)
    if answer.returncode == 0 and float(answer.stdout.split()[-1]) > 1:
        raise RuntimeError(f"ATTACK SUCCEEDED: {answer.stdout}")
