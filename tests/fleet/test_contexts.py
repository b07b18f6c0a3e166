"""The rate of CUDA contexts, with a driver that does nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from workers import contexts, doctor

#: The driver's functions, all of which return a status. ``{}`` is cuInit's.
DRIVER = "int cuInit(unsigned flags) {{ return {}; }}" + "".join(
    f" int cu{name}(void) {{{{ return 0; }}}}"
    for name in ("DeviceGet", "DevicePrimaryCtxRetain", "CtxSetCurrent", "MemAlloc_v2", "MemsetD8_v2", "CtxSynchronize")
)


@pytest.mark.parametrize(("status", "shown"), [(0, "a second, for all 2 GPUs"), (100, "CUDA error 100")])
def test_the_doctor_names_the_rate_or_the_driver_s_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, shown: str
) -> None:
    """Contexts are counted until the time is over, and an error of the driver ends the measurement."""
    command = ["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), "-x", "c", "-"]
    subprocess.run(command, input=DRIVER.format(status), text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setattr(contexts.rate, "__defaults__", (0.1,))
    monkeypatch.setattr(contexts, "_AT_ONCE", 2)
    [(_, result)] = doctor._contexts(["GPU-0", "GPU-1"])
    assert shown in result.detail, result
