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
from pathlib import Path
from typing import Any, Final

from kqueue.config import Config, load
from kqueue.contract import gpu_model
from kqueue.doctor import Check, State, installed
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
    yield from _gpus(deep=deep)
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
        yield from _torch()
        yield from _compilers()
        yield from user
        yield from _seal(config, uid)
    yield from _scratch(config)
    if deep:
        from workers.deep import judged

        tools = {"nvcc": toolchain.program("nvcc"), "ninja": _ninja()}
        yield from judged(config, {name for name, found in tools.items() if found})


# GPUs ------------------------------------------------------------------------------------------------


def _gpus(*, deep: bool) -> Iterator[Check]:
    try:
        import pynvml as nvml  # a part of kqueue[worker]
    except ImportError:
        yield Check("gpu", "driver", State.INFO, "not checked: nvidia-ml-py is not installed (kqueue[worker])")
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield Check("gpu", "driver", State.INFO, f"no NVIDIA GPU ({error}): only the cpu lane")
        return
    try:
        yield Check("gpu", "driver", State.OK, str(nvml.nvmlSystemGetDriverVersion()))
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                yield _device(nvml, index)
                if deep:
                    yield _clocks(nvml, index)
            except nvml.NVMLError as error:
                fix = "see `nvidia-smi`, and reset or drain the GPU"
                yield Check("gpu", f"gpu {index}", State.FAIL, str(error), fix)
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Check:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = nvml.nvmlDeviceGetName(handle)
    detail = (
        f"{name} {nvml.nvmlDeviceGetUUID(handle)}, lane gpu.{gpu_model(name)}, sm_{major}{minor}, "
        f"{memory.free / _GIB:.0f} of {memory.total / _GIB:.0f} GiB free"
    )
    # The judge, the candidate, and evaluations in preparation all have contexts.
    default = nvml.NVML_COMPUTEMODE_DEFAULT
    if _optional(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle), default) != default:
        fix = f"run `nvidia-smi -i {index} -c DEFAULT`"
        return Check("gpu", f"gpu {index}", State.FAIL, f"{detail}, compute mode is exclusive", fix)
    from workers.judge.gpu import facts  # imports pynvml, which a client's host can lack

    seen = facts.read(handle)
    detail += f", {seen['temperature_c']} C" if "temperature_c" in seen else ""
    if sick := _sick(seen):
        fix = f"drain it (`kqueue gpu drain {index}`), then reset or reboot. Replace it if this comes back"
        return Check("gpu", f"gpu {index}", State.WARN, f"{detail}, {sick}", fix)
    if slow := [reason for reason in seen.get("throttle", ()) if "Thermal" in reason or "Hw" in reason]:
        fix = "check cooling and power: kernels are not timed meanwhile"
        return Check("gpu", f"gpu {index}", State.WARN, f"{detail}, slowed by {', '.join(slow)}", fix)
    busy = len(seen.get("processes", ()))
    if busy:
        fix = "do not trust times taken during other work (a running fleet's own contexts count here)"
        return Check("gpu", f"gpu {index}", State.WARN, f"{detail}, {busy} processes on it", fix)
    return Check("gpu", f"gpu {index}", State.OK, detail)


def _clocks(nvml: Any, index: int) -> Check:
    """Report a GPU's current and highest clocks."""
    from workers.judge.gpu import facts

    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    clocks: list[str] = []
    for name, kind in (("SM", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
        now, most = (
            facts.ask(nvml.nvmlDeviceGetClockInfo, handle, kind),
            facts.ask(nvml.nvmlDeviceGetMaxClockInfo, handle, kind),
        )
        clocks.append(f"{name} {now or '?'} of {most or '?'} MHz")
    slowed = facts.read(handle).get("throttle", [])
    return Check("gpu", f"gpu {index} clocks", State.OK, ", ".join(clocks + slowed))


def _sick(seen: dict[str, Any]) -> str:
    """Return the signs of failing memory in a GPU's facts as one line, empty if there are none."""
    ecc, rows = seen.get("uncorrected_ecc", {}), seen.get("remapped_rows", {})
    signs = (
        (ecc.get("volatile"), f"{ecc.get('volatile')} memory errors that ECC could not correct"),
        (rows.get("pending"), "a memory row remap is pending"),
        (rows.get("failed"), "a memory row remap has failed"),
    )
    return ", ".join(sign for present, sign in signs if present)


def _optional(nvml: Any, ask: Callable[[], Any], unknown: Any) -> Any:
    """Return the driver's answer, or ``unknown`` if it does not support or permit the query."""
    try:
        return ask()
    except nvml.NVMLError:
        return unknown


# torch -----------------------------------------------------------------------------------------------


def _torch() -> Iterator[Check]:
    # Makes torch count devices without opening contexts, which the loop below does one by one.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("gpu", "torch", State.FAIL, f"cannot be imported: {error}", "install torch again")
        return
    built = torch.version.cuda
    node = Path("/dev/nvidiactl").exists()
    if built is None and node:
        fix = "install a CUDA build of torch (see pytorch.org), else only the cpu lane is served"
        yield Check("gpu", "torch", State.FAIL, f"{torch.__version__}, a CPU build, on a host with a GPU", fix)
    else:
        yield Check("gpu", "torch", State.OK, f"{torch.__version__}, {f'CUDA {built}' if built else 'CPU build'}")
    for index in range(torch.cuda.device_count() if built else 0):
        yield _kernel_runs(torch, index)
    yield _triton()
    if (cupy := _any_cupy()) is not None:
        yield Check("gpu", "cupy", State.OK, cupy)
    else:
        fix = f"for kernels of backend cupy: install `cupy-cuda{(built or '12').split('.')[0]}x`" if built else ""
        yield Check("gpu", "cupy", State.INFO, "not installed", fix)


def _kernel_runs(torch: Any, index: int) -> Check:
    name = f"cuda:{index}"
    try:
        value = torch.arange(1024, device=name).sum().item()
    except (RuntimeError, AssertionError) as error:
        fix = "check that the driver is new enough for this build of torch, and that the device nodes are readable"
        return Check("gpu", name, State.FAIL, f"torch cannot use it: {error}", fix)
    right = value == 1023 * 512
    return Check("gpu", name, State.OK if right else State.FAIL, "a kernel ran" if right else f"computed {value}")


def _triton() -> Check:
    version = installed("triton")
    if version is None:
        return Check("gpu", "triton", State.WARN, "not installed", "for kernels of backend triton: install triton")
    try:
        import triton  # noqa: F401  # pyright: ignore[reportUnusedImport]  # the import is the check
    except (ImportError, OSError) as error:
        return Check("gpu", "triton", State.FAIL, f"{version} cannot be imported: {error}", "install triton again")
    return Check("gpu", "triton", State.OK, version)


def _any_cupy() -> str | None:
    names = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
    return next((f"{name} {version}" for name in names if (version := installed(name))), None)


# compilers -------------------------------------------------------------------------------------------


def _compilers() -> Iterator[Check]:
    gpu = Path("/dev/nvidiactl").exists()

    def tool(name: str, found: str | None, absent: State, fix: str) -> Check:
        if found:
            return Check("compilers", name, State.OK, found)
        return Check("compilers", name, absent, "not found", fix)

    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    # Triton compiles its launcher, so on a GPU only plain torch works without a compiler.
    needed = State.FAIL if gpu else State.WARN
    fix = "for kernels of backends cuda, cpp and triton: install g++"
    yield tool("c++", compiler and f"{_output(compiler)[0]} at {compiler}", needed, fix)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    fix = f"for kernels that are compiled: install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    yield tool("python headers", str(header.parent) if header.is_file() else None, needed, fix)
    ninja = _ninja()
    fix = "for kernels of backends cuda and cpp: install ninja"
    yield tool("ninja", ninja and f"{_output(ninja)[0]} at {ninja}", State.WARN, fix)
    nvcc = toolchain.program("nvcc")
    fix = "for kernels of backend cuda: install the CUDA toolkit of torch's version, or set CUDA_HOME" if gpu else ""
    yield tool("nvcc", nvcc and f"{_output(nvcc)[-1]} at {nvcc}", State.WARN if gpu else State.INFO, fix)
    for name, command in _EXAMINERS.items():
        found = toolchain.program(name)
        fix = f"for {command}: install the CUDA toolkit" if gpu else ""
        yield tool(name, found and f"{_output(found)[-1]} at {found}", State.INFO, fix)


def _ninja() -> str | None:
    return shutil.which("ninja", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")


def _output(program: str) -> list[str]:
    """Return the lines of a program's ``--version`` output, or one line with the error."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"does not run: {error}"]
    return done.stdout.strip().splitlines() or [f"exited with status {done.returncode}"]


# the sandbox -----------------------------------------------------------------------------------------


def _user(uid: int | None) -> Iterator[Check]:
    if uid is None:
        fix = "run the worker as root (its container does), so that candidates get their own uids"
        yield Check("sandbox", "user", State.WARN, f"uid {os.geteuid()}: candidates run as this user", fix)
        return
    yield Check("sandbox", "user", State.OK, f"root: candidates get uids from {uid}")
    yield _capabilities()
    from workers.judge.sandbox import view

    blocked = ", ".join(map(str, view.unreadable()))
    refused = _in_child(view.rebuild) if blocked else 0
    if refused:
        detail = f"{blocked} is closed to other users, and mounting is refused ({os.strerror(refused)})"
        fix = "give the worker CAP_SYS_ADMIN, or install Python and kqueue where all users can read, such as /opt"
        yield Check("sandbox", "candidate uid", State.WARN, f"candidates run as this user: {detail}", fix)
        return

    def start() -> None:
        view.rebuild()
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.chdir("/")
        os.execv(sys.executable, [sys.executable, "-c", "import torch.version, kqueue, workers"])  # noqa: S606

    if failed := _in_child(start):
        fix = "give the worker CAP_SETUID and CAP_SETGID, or do not run it as root"
        yield Check("sandbox", "candidate uid", State.FAIL, f"the interpreter does not start as {uid} ({failed})", fix)
    else:
        around = f", in a private view of {blocked}" if blocked else ""
        yield Check("sandbox", "candidate uid", State.OK, f"the interpreter starts as {uid}{around}")


def _seal(config: Config, uid: int | None) -> Iterator[Check]:
    """Try every measure of the seal like a fork server, and report the level that they reach."""
    from workers.judge.sandbox.level import MEASURES, Level, lacking, reached

    gpus = devices()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", gpus[0].uuid if gpus else "")
    command = [sys.executable, "-m", "workers.judge.sandbox.self_check", "" if uid is None else str(uid), visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SEAL_S, check=True)
        found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        yield Check("sandbox", "isolation", State.FAIL, f"could not be tried: {error}", "see the worker's log")
        return
    wanted = lacking(found, Level.STRONG)
    for name, fix in MEASURES.items():
        if found[name] is True:
            yield Check("sandbox", name, State.OK, "works")
        else:
            yield Check("sandbox", name, State.WARN if name in wanted else State.INFO, str(found[name]), fix)
    minimum, level = Level(config.isolation), reached(found)
    missing = ", ".join(lacking(found, minimum))
    if missing:
        fix = f"give the worker {missing} (see their lines), or set KQUEUE_ISOLATION={level}"
        detail = f"{level}, below KQUEUE_ISOLATION={minimum}: workers do not start"
        yield Check("sandbox", "isolation", State.FAIL, detail, fix)
        return
    beyond = [other for other in Level if lacking(found, other)]
    more = f"; for {beyond[0]}: {', '.join(lacking(found, beyond[0]))}" if beyond else ""
    yield Check("sandbox", "isolation", State.OK, f"{level}{more}")


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


def _capabilities() -> Check:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    mask = int(line.split()[1], 16)
    held = [name for bit, name in enumerate(_CAPABILITIES.split()) if mask >> bit & 1]
    if lacking := sorted(_NEEDED.difference(held)):
        names = ", ".join(f"CAP_{name.upper()}" for name in lacking)
        return Check("sandbox", "capabilities", State.FAIL, f"without {names}", f"give the container {names}")
    return Check("sandbox", "capabilities", State.OK, " ".join(held))


def _scratch(config: Config) -> Iterator[Check]:
    from workers.judge.sandbox import view

    directory = config.scratch.resolve()
    there = next(part for part in (directory, *directory.parents) if part.exists())
    free = shutil.disk_usage(there).free
    # A compiled kernel is a library that is mapped as executable.
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        fix = "mount it with exec, or set KQUEUE_SCRATCH to another directory"
        yield Check("sandbox", "scratch", State.FAIL, f"{directory} is on a file system mounted noexec", fix)
    elif os.geteuid() == 0 and (blocked := view.obstacle(there)) is not None:
        fix = f"`chmod o+x {blocked}`, or set KQUEUE_SCRATCH to a directory that all users can enter"
        yield Check("sandbox", "scratch", State.FAIL, f"{directory} is behind {blocked}", fix)
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Check(
            "sandbox", "scratch", State.FAIL, f"{there} is not writable", "set KQUEUE_SCRATCH to a writable directory"
        )
    elif free < 4 * _GIB:
        fix = "free some, or set KQUEUE_SCRATCH to another disk"
        yield Check("sandbox", "scratch", State.WARN, f"{directory}: {free / _GIB:.1f} GiB free", fix)
    else:
        yield Check("sandbox", "scratch", State.OK, f"{directory}: {free / _GIB:.0f} GiB free")


def main() -> None:
    """Print every check as a line of JSON when it ends. ``--deep`` adds the long checks."""
    for check in examine(load(), deep="--deep" in sys.argv[1:]):
        sys.stdout.write(json.dumps(check.to_json()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
