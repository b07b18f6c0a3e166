"""Backends that other packages register, the validation of names, and the mapping of compilers' exceptions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kqueue.backends.cupy import use_torch_memory
from kqueue.contract import parse_request
from kqueue.errors import InvalidRequest
from tests.installing import install, run
from workers.judge.candidate import failures, harness
from workers.judge.channel.orders import Order
from workers.judge.channel.protocol import Tag
from workers.judge.channel.wire import Command
from workers.judge.pipeline.tools import missing

ENTRY = "from kqueue.backends import Backend\nMYLANG = Backend(\n    name='mylang', description='MyLang', {}\n)\n"
#: Each stands for a class of a package, named with its module, or with a base class of it.
RAISED = {
    "triton.compiler.errors.CompilationError": Tag.COMPILE,
    "triton.runtime.errors.OutOfResources": Tag.RESOURCES,
    "cupy.cuda.compiler.CompileException": Tag.COMPILE,
    "cupy.cuda.memory.OutOfMemoryError": Tag.GPU_MEMORY,
    "cuda.tile._exception.TypeCheckingError < cuda.tile._exception.TileError": Tag.COMPILE,
    "cutlass.base_dsl.common.DSLUserCodeError < cutlass.base_dsl.common.DSLBaseError": Tag.COMPILE,
    "cutlass.base_dsl.common.DSLCudaRuntimeError < cutlass.base_dsl.common.DSLBaseError": Tag.OTHER,
    "jax.errors.TracerBoolConversionError < jax.errors.JAXTypeError": Tag.COMPILE,
    "jax.errors.JaxRuntimeError": Tag.OTHER,
    "numba.cuda.core.errors.TypingError < numba.core.errors.NumbaError": Tag.COMPILE,
    "cuda.bindings.nvjitlink.nvJitLinkError": Tag.COMPILE,
    "cuda.bindings.nvvm.nvvmError": Tag.COMPILE,
    "cuda.core._utils.cuda_utils.NVRTCError < cuda.core._utils.cuda_utils.CUDAError": Tag.COMPILE,
    "cuda.core._utils.cuda_utils.CUDAError": Tag.OTHER,
    "tvm.error.InternalError < tvm.error.TVMError": Tag.COMPILE,
}


def test_another_package_adds_a_backend(tmp_path: Path) -> None:
    """Requests, the guess, caches, environments and provenance follow from its description alone."""
    fields = """modules=('mylang',), caches=('MYLANG_CACHE_DIR',), environment=(('MYLANG_QUIET', '1'),),
    kernel_decorators=('mylang_kernel',)"""
    install(tmp_path, "mylang", "third:MYLANG", ENTRY.format(fields))
    done = run(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "request": "mylang",
        "guess": "mylang",
        "cache": "/s/mylang_cache_dir",
        "quiet": "1",
        "own": ["gelu"],
    }


PROGRAM = """
import json
from kqueue.contract import parse_request
from kqueue.judging import guess_backend
from kqueue.folders import clean_environment
from workers.judge.pipeline import provenance
from workers.judge.sandbox.seal import private_directories

source = "import mylang\\n@mylang.mylang_kernel\\ndef gelu(x): ..."
print(json.dumps({
    "request": parse_request({"problem": "p", "kernel": "k", "backend": "mylang"}).backend,
    "guess": guess_backend(source),
    "cache": private_directories("/s")["MYLANG_CACHE_DIR"],
    "quiet": clean_environment({})["MYLANG_QUIET"],
    "own": list(provenance.own_kernels(provenance.nodes_of(source))),
}))
"""


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("cuda", "third:MYLANG", "the backend cuda (third:MYLANG) is not a kqueue.backends.Backend with this name"),
        ("mylang", "third:NAME", "the backend mylang (third:NAME) is not a kqueue.backends.Backend with this name"),
        ("mylang", "third:NONE", "the backend mylang (third:NONE) cannot be loaded: AttributeError"),
        ("cuda", "kqueue.backends.cuda:CUDA", "has the name of another backend: remove one of the packages"),
        ("pytest", "kqueue.backends:TESTS", "has the name of another backend: remove one of the packages"),
    ],
)
def test_a_registration_that_cannot_be_used_is_named(tmp_path: Path, name: str, value: str, error: str) -> None:
    """No package can replace a backend, and a wrong entry is an error, not a backend that is absent."""
    install(tmp_path, name, value, ENTRY.format("") + "NAME = 'mylang'\n")
    done = run(tmp_path, "from kqueue import backends; backends.registered()")
    assert f"kqueue.errors.ConfigError: the backend {name} ({value})" in done.stderr
    assert error in done.stderr


@pytest.mark.parametrize("name", ["fortran", "CUDA", "", 5, None, ["cuda"]])
def test_a_request_names_a_registered_backend(name: object) -> None:
    """The error of any other value lists the names."""
    with pytest.raises(InvalidRequest, match=r"^backend: Input should be 'cpp', 'cuda', .*'triton' or 'pytest'"):
        parse_request({"problem": "p", "kernel": "k", "backend": name})


@pytest.mark.parametrize("raised", RAISED)
def test_an_exception_of_a_package_is_known_by_its_name(raised: str) -> None:
    """The package can be missing here. A class is also known by its base class, and errors of launches stay apart."""
    kind: type[Exception] = Exception
    for name in reversed(raised.split(" < ")):
        module, _, own = name.rpartition(".")
        kind = type(own, (kind,), {"__module__": module})
    assert failures.tag_of(kind()) is RAISED[raised]


def test_memory_that_the_host_refuses_is_known_by_torch_s_words() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 48)
    assert failures.tag_of(raised.value) is Tag.HOST_MEMORY


def test_words_that_mean_nothing_to_a_reader_are_left_out() -> None:
    """The message lacks torch's advice to its user and the processes of others. The log has the whole text."""
    text = "Out of memory. GPU 0 has a total capacity of 139.80 GiB of which 11.06 GiB is free. Process 7 has 8.0 MiB "
    text += "memory in use. 8.00 GiB allowed. If reserved but unallocated memory is large try setting PYTORCH_X=1"
    text += "\nSearch for `cudaError' in https://a.b.\nCUDA kernel errors might be late.\nFor debugging consider "
    text += "passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n"
    assert failures.text_of(RuntimeError(text)) == "Out of memory. 8.00 GiB allowed."


def test_an_unchecked_launch_is_reported_with_the_name_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(cudaError=int, cudaGetErrorString={209: "no kernel image"}.get)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    assert "CUDA error 209 (no kernel image)" in str(harness.UncheckedLaunchError(209))


def test_the_number_of_a_compilers_error_is_not_cudas() -> None:
    """The same number of CUDA stands for exhausted GPU memory."""
    error = type("nvJitLinkError", (Exception,), {"__module__": "cuda.bindings.nvjitlink", "status": 2})()
    reply = failures.reply_to(Command(Order.RUN, 1, 0, None, ()), error, "", on_gpu=False)
    assert (reply.tag, reply.code) == (Tag.COMPILE, 0)


def test_a_module_within_a_package_is_not_imported_to_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package of the same top name does not count, and the judge imports none of them."""
    package = tmp_path / "cutlass"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing("cute") == ["the package cutlass.cute is not installed"]
    install(tmp_path, "none", "none:NONE", "", package="nvidia_cutlass_dsl")
    (tmp_path / "nvidia_cutlass_dsl-1.0.dist-info" / "entry_points.txt").unlink()
    assert missing("cute") == []


def test_cupy_allocates_from_torch() -> None:
    """Any other module named cupy is left alone."""
    taken: list[object] = []
    cuda = SimpleNamespace(
        PythonFunctionAllocator=lambda allocate, free: SimpleNamespace(malloc=(allocate, free)),
        get_current_stream=lambda: SimpleNamespace(ptr=7),
        set_allocator=taken.append,
    )
    torch = SimpleNamespace(cuda=SimpleNamespace(caching_allocator_alloc=lambda *given: given))
    use_torch_memory(SimpleNamespace(cuda=cuda), torch)
    use_torch_memory(SimpleNamespace(), torch)
    [(allocate, _)] = taken
    assert allocate(64, 0) == (64, 0, 7)
