"""The checks of `kqueue doctor` for a worker's host: GPUs, torch, compilers and the sandbox.

`kqueue doctor` runs ``python -m workers.doctor`` as a separate process, because it imports torch, opens a CUDA context
on every GPU, and can hang or crash with the driver.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Final

from kqueue import folders, program
from kqueue.backends import Backend, installed, registered
from kqueue.config import Config, load
from kqueue.contract import gpu_model
from kqueue.doctor import Check, Result, State, report
from kqueue.text import one_line
from workers import contexts
from workers.judge.gpu.devices import devices
from workers.judge.host import toolchain, uids

#: Names of the capabilities by bit.
_CAPABILITIES: Final = """
    chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap linux_immutable net_bind_service
    net_broadcast net_admin net_raw ipc_lock ipc_owner sys_module sys_rawio sys_chroot sys_ptrace sys_pacct sys_admin
    sys_boot sys_nice sys_resource sys_time sys_tty_config mknod lease audit_write audit_control setfcap mac_override
    mac_admin syslog wake_alarm block_suspend audit_read perfmon bpf checkpoint_restore
"""
#: The capabilities that a root fleet needs to create candidates' directories, switch to their uids, and kill them.
_NEEDED: Final = frozenset({"chown", "kill", "setgid", "setuid"})
_GIB: Final = 1 << 30
#: Programs that examine a running kernel, with the commands that use them.
_EXAMINERS: Final = {"compute-sanitizer": "`kqueue sanitize`", "ncu": "`kqueue profile`"}
#: Deadline in seconds of the seal's test, which imports torch and initialises the GPU's driver.
_SEAL_S: Final = 90.0


def examine(config: Config, *, deep: bool = False) -> Iterator[Check]:
    """Run every check of a worker's parts. On a host without torch, stop after the GPUs.

    ``deep`` adds the judging of a kernel of every backend on every GPU (:mod:`workers.deep`), which takes minutes.
    """
    yield from report("gpu", _gpus(deep=deep))
    if importlib.util.find_spec("torch") is None:
        fix = "for a worker: install `kqueue[worker]`"
        yield Check("gpu", "torch", State.INFO, "not installed: this host is a client, not a worker", fix)
        return
    with ExitStack() as stack:
        uid = None
        if os.geteuid() == 0:
            # A uid that no fleet of this host uses: a fleet kills every process that runs under its uids.
            held = uids.hold(config.candidate_uid)
            stack.callback(held.release)
            uid = held.uid
        # This check forks, so it runs before torch, which can start threads.
        user = list(_user(uid))
        yield from report("gpu", _torch())
        yield from report("compilers", _compilers())
        yield from report("sandbox", chain(user, _seal(config, uid)))
    yield from report("sandbox", [("scratch", _scratch(config))])
    if deep:
        from workers.deep import judged

        yield from report("gpu", _contexts([gpu.uuid for gpu in devices()]))
        tools = {"nvcc": toolchain.program("nvcc"), "ninja": _ninja()}
        yield from report("judge", judged(config, {name for name, found in tools.items() if found}))


# GPUs ------------------------------------------------------------------------------------------------


def _gpus(*, deep: bool) -> Iterator[tuple[str, Result]]:
    try:
        import pynvml as nvml  # a part of kqueue[worker]
    except ImportError:
        yield "driver", Result("not checked: nvidia-ml-py is not installed (kqueue[worker])", state=State.INFO)
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield "driver", Result(f"no NVIDIA GPU ({error}): only the cpu lane", state=State.INFO)
        return
    try:
        yield "driver", Result(str(nvml.nvmlSystemGetDriverVersion()))
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                yield f"gpu {index}", _device(nvml, index, handle)
                if deep:
                    yield f"gpu {index} clocks", _clocks(nvml, handle)
            except nvml.NVMLError as error:
                yield f"gpu {index}", Result(str(error), "see `nvidia-smi`, and reset or drain the GPU", State.FAIL)
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, index: int, handle: Any) -> Result:
    from workers.judge.gpu import facts  # imports pynvml, which a client's host can lack

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = nvml.nvmlDeviceGetName(handle)
    detail = (
        f"{name} {nvml.nvmlDeviceGetUUID(handle)}, lane gpu.{gpu_model(name)}, sm_{major}{minor}, "
        f"{memory.free / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"
    )
    # The judge, the candidate, and evaluations in preparation all have contexts.
    if facts.ask(nvml.nvmlDeviceGetComputeMode, handle) not in {None, nvml.NVML_COMPUTEMODE_DEFAULT}:
        return Result(f"{detail}, compute mode is exclusive", f"run `nvidia-smi -i {index} -c DEFAULT`", State.FAIL)
    seen = facts.read(handle)
    detail += f", {seen['temperature_c']} C" if "temperature_c" in seen else ""
    ecc, rows = seen.get("uncorrected_ecc", {}), seen.get("remapped_rows", {})
    signs = {
        f"{ecc.get('volatile')} memory errors that ECC could not correct": ecc.get("volatile"),
        "a memory row remap is pending": rows.get("pending"),
        "a memory row remap has failed": rows.get("failed"),
    }
    if sick := ", ".join(sign for sign, present in signs.items() if present):
        fix = f"drain it (`kqueue gpu drain {index}`), then reset or reboot. Replace it if this comes back"
        return Result(f"{detail}, {sick}", fix)
    if slow := [reason for reason in seen.get("throttle", ()) if "Thermal" in reason or "Hw" in reason]:
        fix = "check cooling and power: kernels are not timed meanwhile"
        return Result(f"{detail}, slowed by {', '.join(slow)}", fix)
    if busy := len(seen.get("processes", ())):
        fix = "do not trust times taken during other work (a running fleet's own contexts count here)"
        return Result(f"{detail}, {busy} processes on it", fix)
    return Result(detail)


def _clocks(nvml: Any, handle: Any) -> Result:
    """Report a GPU's current and highest clocks."""
    from workers.judge.gpu import facts

    def clock(name: str, kind: int) -> str:
        asked = (
            facts.ask(ask, handle, kind) or "?" for ask in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
        )
        return "{} {} of {} MHz".format(name, *asked)

    clocks = [clock("SM", nvml.NVML_CLOCK_SM), clock("memory", nvml.NVML_CLOCK_MEM)]
    return Result(", ".join(clocks + facts.read(handle).get("throttle", [])))


def _contexts(gpus: list[str]) -> Iterator[tuple[str, Result]]:
    """Report how many CUDA contexts a second all GPUs together get, each of which serves one process."""
    try:
        if gpus:
            what = f"the driver makes {contexts.rate(gpus):.1f} a second, for all {len(gpus)} GPUs together"
            yield "contexts", Result(f"{what} (docs/operations.md#gpus-of-one-host)")
    except OSError as error:
        yield "contexts", Result(f"could not be made: {error}", "check the driver by `nvidia-smi`", State.WARN)


# torch -----------------------------------------------------------------------------------------------


def _torch() -> Iterator[tuple[str, Result]]:
    # Makes torch count devices without opening contexts, which the loop below does one by one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch
    except (ImportError, OSError) as error:
        yield "torch", Result(f"cannot be imported: {error}", "install torch again", State.FAIL)
        return
    built = torch.version.cuda
    if built is None and Path("/dev/nvidiactl").exists():
        fix = "install a CUDA build of torch (see pytorch.org), else only the cpu lane is served"
        yield "torch", Result(f"{torch.__version__}, a CPU build, on a host with a GPU", fix, State.FAIL)
    else:
        yield "torch", Result(f"{torch.__version__}, {f'CUDA {built}' if built else 'CPU build'}")
    for index in range(torch.cuda.device_count() if built else 0):
        yield f"cuda:{index}", _kernel_runs(torch, f"cuda:{index}")
    yield "triton", _triton()
    for backend in registered().values():
        if backend.distributions and not backend.triton:
            yield backend.name, _package(backend, built)


def _package(backend: Backend, cuda: str | None) -> Result:
    """Report the package of a backend. ``cuda`` is the version that torch was built for."""
    for name in backend.distributions:
        if version := installed(name):
            return Result(f"{name} {version}")
    package = backend.install.format(cuda=(cuda or "").partition(".")[0])
    fix = f"for kernels of backend {backend.name}: install `{package}`" if cuda else ""
    return Result("not installed", fix, State.INFO)


def _kernel_runs(torch: Any, device: str) -> Result:
    try:
        value = torch.arange(1024, device=device).sum().item()
    except (RuntimeError, AssertionError) as error:
        fix = "check that the driver is new enough for this build of torch, and that the device nodes are readable"
        return Result(f"torch cannot use it: {error}", fix, State.FAIL)
    return Result("a kernel ran") if value == 1023 * 512 else Result(f"computed {value}", state=State.FAIL)


def _triton() -> Result:
    version = installed("triton")
    if version is None:
        return Result("not installed", "for kernels of backend triton: install triton")
    try:
        import triton  # noqa: F401  # pyright: ignore[reportUnusedImport]  # the import is the check
    except (ImportError, OSError) as error:
        return Result(f"{version} cannot be imported: {error}", "install triton again", State.FAIL)
    return Result(version)


# compilers -------------------------------------------------------------------------------------------


def _compilers() -> Iterator[tuple[str, Result]]:
    yield "folders", _folders()
    gpu = Path("/dev/nvidiactl").exists()
    # Triton compiles its launcher, so on a GPU only plain torch works without a compiler.
    needed = State.FAIL if gpu else State.WARN
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    headers = f"for kernels that are compiled: install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    toolkit = "install the CUDA toolkit"
    for name, found, absent, fix in (
        ("c++", _version(compiler, 0), needed, "for kernels of backends cuda, cpp and triton: install g++"),
        ("python headers", header.is_file() and header.parent, needed, headers),
        ("ninja", _version(_ninja(), 0), State.WARN, "for kernels of backends cuda and cpp: install ninja"),
        ("nvcc", _version(toolchain.program("nvcc"), -1), State.WARN if gpu else State.INFO,
         f"for kernels of backend cuda: {toolkit} of torch's version, or set CUDA_HOME" if gpu else ""),
        *((name, _version(toolchain.program(name), -1), State.INFO, f"for {command}: {toolkit}" if gpu else "")
          for name, command in _EXAMINERS.items()),
    ):  # fmt: skip
        yield name, Result(str(found)) if found else Result("not found", fix, absent)


def _folders() -> Result:
    """Report the entries of PATH and of similar variables that are skipped."""
    entries = [
        (name, each) for name in folders.VARIABLES for each in os.environ.get(name, "").split(os.pathsep) if each
    ]
    faults = {f"{name} {one_line(each)[:80]} ({why})": 0 for name, each in entries if (why := folders.fault(each))}
    if not faults:
        return Result(f"all of {', '.join(folders.VARIABLES)} can be searched")
    more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
    fix = "if kernels need one of them, make it a folder that the fleet's user can enter"
    return Result(f"skipped: {'; '.join([*faults][:5])}{more}", fix, State.INFO)


def _ninja() -> str | None:
    return shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def _version(program: str | None, line: int) -> str | None:
    """Return a line of a program's ``--version`` output, or the error, and its path. None if there is no program."""
    if program is None:
        return None
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)
        shown = done.stdout.strip().splitlines() or [f"exited with status {done.returncode}"]
    except (OSError, subprocess.TimeoutExpired) as error:
        shown = [f"does not run: {error}"]
    return f"{shown[line]} at {program}"


# the sandbox -----------------------------------------------------------------------------------------


def _user(uid: int | None) -> Iterator[tuple[str, Result]]:
    if uid is None:
        fix = "run the worker as root (its container does), so that candidates get their own uids"
        yield "user", Result(f"uid {os.geteuid()}: candidates run as this user", fix)
    else:
        yield "user", Result(f"root: candidates get uids from {uid}")
        yield "capabilities", _capabilities()
        yield "candidate uid", _candidate(uid)


def _candidate(uid: int) -> Result:
    from workers.judge.sandbox import view

    blocked = ", ".join(map(str, view.unreadable()))
    if blocked and (refused := _in_child(view.rebuild)):
        detail = f"{blocked} is closed to other users, and mounting is refused ({os.strerror(refused)})"
        fix = "give the worker CAP_SYS_ADMIN, or install Python and kqueue where all users can read, such as /opt"
        return Result(f"candidates run as this user: {detail}", fix)

    def start() -> None:
        view.rebuild()
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.chdir("/")
        os.execv(sys.executable, [*program.PYTHON, "torch.version"])  # noqa: S606

    if failed := _in_child(start):
        fix = "give the worker CAP_SETUID and CAP_SETGID, or do not run it as root"
        return Result(f"the interpreter does not start as {uid} ({failed})", fix, State.FAIL)
    return Result(f"the interpreter starts as {uid}" + (f", in a private view of {blocked}" if blocked else ""))


def _seal(config: Config, uid: int | None) -> Iterator[tuple[str, Result]]:
    """Try every measure of the seal like a fork server, and report the level that they reach."""
    from workers.judge.sandbox.level import MEASURES, Level, lacking, reached

    gpus = devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", gpus[0].uuid if gpus else "")
    command = [*program.PYTHON, "workers.judge.sandbox.self_check", "" if uid is None else str(uid), visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SEAL_S, check=True)
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        yield "isolation", Result(f"could not be tried: {error}", "see the worker's log", State.FAIL)
        return
    wanted = lacking(found, Level.STRONG)
    for name, fix in MEASURES.items():
        reason = str(found[name])
        remedy = "" if reason.startswith("not used") else fix
        absent = Result(reason, remedy, State.WARN if name in wanted else State.INFO)
        yield name, Result("works") if found[name] is True else absent
    minimum, level = Level(config.isolation), reached(found)
    if missing := ", ".join(lacking(found, minimum)):
        fix = f"give the worker {missing} (see their lines), or set KQUEUE_ISOLATION={level}"
        detail = f"{level}, below KQUEUE_ISOLATION={minimum}: workers do not start"
        yield "isolation", Result(detail, fix, State.FAIL)
        return
    beyond = next((f"; for {other}: {', '.join(names)}" for other in Level if (names := lacking(found, other))), "")
    yield "isolation", Result(f"{level}{beyond}")


def _in_child(call: Callable[[], None]) -> int:
    """Run ``call`` in a forked child, so that its effects end with it. Return 0, or its errno or exit code."""
    child = os.fork()
    if child == 0:
        code = 255
        try:
            call()
            code = 0
        except OSError as error:
            code = error.errno or 255
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _capabilities() -> Result:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    mask = int(line.split()[1], 16)
    held = [name for bit, name in enumerate(_CAPABILITIES.split()) if mask >> bit & 1]
    if names := ", ".join(f"CAP_{name.upper()}" for name in sorted(_NEEDED.difference(held))):
        return Result(f"without {names}", f"give the container {names}", State.FAIL)
    return Result(" ".join(held))


def _scratch(config: Config) -> Result:
    from workers.judge.sandbox import view

    directory = config.scratch.resolve()
    there = next(part for part in (directory, *directory.parents) if os.access(part, os.F_OK))
    free = shutil.disk_usage(there).free
    # A compiled kernel is a library that is mapped as executable.
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        fix = "mount it with exec, or set KQUEUE_SCRATCH to another directory"
        return Result(f"{directory} is on a file system mounted noexec", fix, State.FAIL)
    if os.geteuid() == 0 and (blocked := view.obstacle(there)) is not None:
        fix = f"`chmod o+x {blocked}`, or set KQUEUE_SCRATCH to a directory that all users can enter"
        return Result(f"{directory} is behind {blocked}", fix, State.FAIL)
    if not os.access(there, os.W_OK | os.X_OK):
        return Result(f"{there} is not writable", "set KQUEUE_SCRATCH to a writable directory", State.FAIL)
    if free < 4 * _GIB:
        fix = "free some, or set KQUEUE_SCRATCH to another disk"
        return Result(f"{directory}: {free / _GIB:.1f} GiB free", fix)
    return Result(f"{directory}: {free / _GIB:.0f} GiB free")


def main() -> None:
    """Print every check as a line of JSON when it ends. ``--deep`` adds the long checks."""
    for check in examine(load(), deep="--deep" in sys.argv[1:]):
        sys.stdout.write(json.dumps(check.to_json()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
