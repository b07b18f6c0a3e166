"""A seccomp filter (BPF) of the system calls that a sealed process must not make.

The filter lists denied calls, because the calls that libraries need change with each version, but the calls that
kernels must not make do not. A denied call fails with EPERM instead of killing the process, because libraries have
fallbacks.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import signal
import socket
import struct
from dataclasses import dataclass
from typing import Final

from workers.judge.host import linux

# Numbers on x86-64 and aarch64, or None if the call does not exist there.
_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    # Sockets: a candidate only uses its channel, but Postgres and Redis can listen on a path. Creating a socket and
    # listening on it must stay allowed, because CUDA does so when it starts.
    "connect": (42, 203),
    "accept": (43, 202),
    "accept4": (288, 242),
    # Memory, descriptors and state of other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    # Parts of Linux with the most frequent vulnerabilities.
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "modify_ldt": (154, None),
    "vmsplice": (278, 75),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    # Objects that outlive their creator: System V objects and message queues.
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # The scheduler. The requested class is in memory, which a filter cannot read.
    "sched_setattr": (314, 274),
    # The host.
    "acct": (163, 89),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "uselib": (134, None),
    "vhangup": (153, 58),
}
#: Denied calls through which two processes of a tool connect.
_CONNECTING: Final = frozenset({"connect", "accept", "accept4"})
#: Families of sockets in a private network: local ones, IP, and questions to Linux about the network.
_IN_PRIVATE: Final = tuple(map(int, (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)))
#: Calls that fail as unknown (ENOSYS). A filter cannot read the flags of clone3. The C library then uses clone, whose
#: flags are readable.
_UNKNOWN: Final = {"clone3": (435, 435)}

_NEW_NAMESPACES: Final = 0x7E020000
_TIOCSTI, _TIOCSETD, _TIOCLINUX = 0x5412, 0x5423, 0x541C
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3
_REAL_TIME: Final = (1, 2, 6)  # SCHED_FIFO, SCHED_RR, SCHED_DEADLINE
_QUERY: Final = 0xFFFFFFFF

#: Calls that send a signal: the two numbers, and the index of the argument with the signal.
_SENDS: Final = {
    "kill": (62, 129, 1),
    "tkill": (200, 130, 1),
    "tgkill": (234, 131, 2),
    "rt_sigqueueinfo": (129, 138, 1),
    "rt_tgsigqueueinfo": (297, 240, 2),
}
_TIMER_CREATE, _FCNTL, _SETRLIMIT = (222, 107), (72, 25), (160, 164)
_F_SETSIG: Final = 10
_SET_MODE_FILTER: Final = 1
#: Without this flag, older kernels slow the process down to prevent side channels that do not matter for the seal.
_SPEC_ALLOW: Final = 1 << 2
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06  # BPF_LD|W|ABS, BPF_ALU|AND|K, BPF_RET|K
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45  # BPF_JMP with JEQ, JGE, JSET, each with K
_X32: Final = 0x40000000


@dataclass(frozen=True, slots=True)
class _Architecture:
    """A processor's constants: its audit architecture, its column in the table, and the numbers of filtered calls."""

    audit: int
    column: int
    seccomp: int
    clone: int
    socket: int
    socketpair: int
    sendto: int
    prlimit64: int
    setpriority: int
    ioprio_set: int
    sched_setaffinity: int
    sched_setparam: int
    sched_setscheduler: int
    move_pages: int
    ioctl: int
    personality: int
    prctl: int


_ARCHITECTURES: Final = {
    "x86_64": _Architecture(0xC000003E, 0, 317, 56, 41, 53, 44, 302, 141, 251, 203, 142, 144, 279, 16, 135, 157),
    "aarch64": _Architecture(0xC00000B7, 1, 277, 220, 198, 199, 206, 261, 140, 30, 122, 118, 119, 239, 29, 92, 167),
}


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


_REFUSE: Final = _step(_RETURN, _ERRNO | errno.EPERM)


def _argument(index: int, high: bool = False) -> bytes:
    return _step(_LOAD, 16 + 8 * index + 4 * high)


def _refuse_if(code: int, value: int) -> bytes:
    return _step(code, value, 0, 1) + _REFUSE


def _refuse_unless(*values: int) -> bytes:
    steps = [_step(_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
    return b"".join(steps) + _REFUSE


def program(machine: str, *, connects: bool = False, grouped: bool = False) -> bytes:
    """Return the filter for a processor of ``uname -m``, or raise KeyError for an unknown one.

    ``connects`` allows connections of local sockets, for processes that can reach only their own. ``grouped`` also
    allows sockets of the network, for processes with a private one.
    """
    arch = _ARCHITECTURES[machine]
    myself = _refuse_unless(0)  # 0 is the caller, and any other pid can be another process
    kinds = _refuse_unless(int(socket.SOCK_STREAM), int(socket.SOCK_SEQPACKET))
    unix = _argument(0) + _refuse_unless(int(socket.AF_UNIX)) + _argument(1) + _step(_AND, 0xF) + kinds
    conditions = {
        arch.clone: _argument(0) + _refuse_if(_ANY_BIT, _NEW_NAMESPACES),
        # No datagram sockets, because they could send to any path.
        arch.socket: unix,
        arch.socketpair: unix,
        arch.sendto: _argument(4) + _refuse_unless(0) + _argument(4, high=True) + _refuse_unless(0),
        # A candidate must not slow down other processes of the same user, such as the reference that is timed next to
        # it.
        arch.prlimit64: _argument(0) + myself,
        arch.sched_setaffinity: _argument(0) + myself,
        arch.sched_setparam: _argument(0) + myself,
        arch.move_pages: _argument(0) + myself,
        arch.setpriority: _argument(0) + _refuse_if(_EQUAL, _PRIO_USER) + _argument(1) + myself,
        arch.ioprio_set: _argument(0) + _refuse_if(_EQUAL, _IOPRIO_WHO_USER) + _argument(1) + myself,
        arch.sched_setscheduler: _argument(0)
        + myself
        + _argument(1)
        + _step(_AND, 0xFF)
        + b"".join(_refuse_if(_EQUAL, policy) for policy in _REAL_TIME),
        # These requests would type into a terminal.
        arch.ioctl: _argument(1)
        + b"".join(_refuse_if(_EQUAL, request) for request in (_TIOCSTI, _TIOCSETD, _TIOCLINUX)),
        arch.personality: _argument(0) + _refuse_unless(0, _QUERY),
        # The process dies with its parent, and must not disable that.
        arch.prctl: _argument(0)
        + _step(_EQUAL, linux.PR_SET_PDEATHSIG, 0, 3)
        + _argument(1)
        + _refuse_unless(int(signal.SIGKILL)),
    }
    if grouped:
        conditions[arch.socket] = _argument(0) + _refuse_unless(*_IN_PRIVATE)
        del conditions[arch.sendto]
    steps = _step(_LOAD, 4) + _refuse_unless(arch.audit) + _step(_LOAD, 0)
    if machine == "x86_64":
        steps += _refuse_if(_AT_LEAST, _X32)
    for name, numbers in _DENIED.items():
        if (number := numbers[arch.column]) is not None and not (connects and name in _CONNECTING):
            steps += _refuse_if(_EQUAL, number)
    for numbers in _UNKNOWN.values():
        steps += _step(_EQUAL, numbers[arch.column], 0, 1) + _step(_RETURN, _ERRNO | errno.ENOSYS)
    return steps + _allow_unless(conditions)


def no_signals_as_from_outside(machine: str) -> bytes:
    """Return a second filter, which stops a process from sending SIGKILL to itself or its children.

    It covers calls, timers, descriptors, the limit on CPU time, and the exit signal of a child. So an end by SIGKILL
    always comes from outside, and counts as a failure of the fleet. Raise KeyError for an unknown processor.
    """
    arch = _ARCHITECTURES[machine]
    refused = _refuse_if(_EQUAL, int(signal.SIGKILL))
    conditions = {numbers[arch.column]: _argument(numbers[2]) + refused for numbers in _SENDS.values()}
    a_value = b"".join(_argument(2, high) + _refuse_if(_ANY_BIT, 0xFFFFFFFF) for high in (False, True))
    conditions |= {
        _TIMER_CREATE[arch.column]: _REFUSE,
        _FCNTL[arch.column]: _argument(1) + _refuse_if(_EQUAL, _F_SETSIG),
        _SETRLIMIT[arch.column]: _argument(0) + _refuse_if(_EQUAL, resource.RLIMIT_CPU),
        arch.prlimit64: _argument(1) + _step(_EQUAL, resource.RLIMIT_CPU, 0, len(a_value) // 8) + a_value,
        arch.clone: _argument(0) + _step(_AND, 0xFF) + refused,
    }
    return _step(_LOAD, 0) + _allow_unless(conditions)


def _allow_unless(conditions: dict[int, bytes]) -> bytes:
    """Return the end of a filter, which allows everything except calls that match a condition."""
    allow = _step(_RETURN, _ALLOW)
    steps = b"".join(
        _step(_EQUAL, number, 0, len(condition) // 8 + 1) + condition + allow
        for number, condition in conditions.items()
    )
    return steps + allow


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def enforce(steps: bytes) -> None:
    """Apply a filter to the calling thread, which must have ``no_new_privs``, and its descendants."""
    filled = _Program(len(steps) // 8, steps)
    number = _ARCHITECTURES[platform.machine()].seccomp
    linux.syscall(number, _SET_MODE_FILTER, _SPEC_ALLOW, ctypes.byref(filled))
