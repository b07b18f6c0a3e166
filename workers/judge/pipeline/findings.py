"""Table of the static rules: the findings that a kernel's source can have."""

from __future__ import annotations

from typing import Final, Literal

Severity = Literal["note", "suspicious", "cheat"]

#: Severity and meaning of every rule.
RULES: Final[dict[str, tuple[Severity, str]]] = {
    "markdown_fence": ("note", "is a Markdown fence, so only the code inside it was judged"),
    "patched_clock": ("cheat", "replaces a clock, an event, a wait for the device or a benchmark's helper"),
    "patched_comparison": ("cheat", "replaces a function that compares tensors"),
    "patched_seed": ("cheat", "replaces a function that seeds or draws random numbers"),
    "planted_module": ("cheat", "replaces a known module by its own object"),
    "evaluator_import": ("cheat", "imports the evaluator's own modules"),
    "process_memory": ("cheat", "reads or writes a process's memory as a debugger does"),
    "interposed_clock": ("cheat", "defines a function of the CUDA runtime or of libc under its own name"),
    "patched_library": ("suspicious", "replaces a part of a library for the whole process"),
    "stack_walk": ("suspicious", "inspects its callers' frames"),
    "heap_walk": ("suspicious", "searches the objects of its process"),
    "native_memory": ("suspicious", "reads or writes addresses by ctypes, or changes the protection of memory"),
    "proc_files": ("suspicious", "reads the kernel's view of processes, shared memory or open files"),
    "network": ("suspicious", "uses the network"),
    "processes": ("suspicious", "starts or signals processes, or ends its own"),
    "descriptors": ("suspicious", "writes to or duplicates descriptors by number"),
    "files_in_forward": ("suspicious", "writes or loads files while it is called"),
    "threads_in_forward": ("suspicious", "starts threads or tasks while it is called"),
    "sleep_in_forward": ("suspicious", "sleeps or reads a clock while it is called"),
    "tensor_subclass": ("suspicious", "defines tensors whose operations run its own code, perhaps later"),
    "instance_override": ("suspicious", "changes the class or the dictionary of an object at run time"),
    "fallback": ("suspicious", "uses a library's answer if its own code raises"),
    "no_own_kernel": ("suspicious", "defines no kernel in the language that it claims"),
    "compiled_by_torch": ("suspicious", "claims a handwritten kernel, but torch's compiler writes it"),
    "pointer_key": ("suspicious", "caches by a tensor's address, identity or version, which later tensors can share"),
    "content_key": ("suspicious", "compares a call's inputs with stored tensors"),
    "call_count": ("suspicious", "counts its calls and treats some of them differently"),
    "unjoined_stream": ("suspicious", "works on its own stream, and nothing waits for it"),
    "host_callback": ("suspicious", "has the device call back into the host"),
    "shared_device_memory": ("suspicious", "shares device memory with other processes"),
    "persisting_l2": ("suspicious", "keeps data in the L2 cache beyond a call"),
    "seed_in_forward": ("suspicious", "seeds random numbers while it is called"),
    "rules_stopped": ("suspicious", "the source is so long or deep that the rules were stopped"),
    "registered_module": ("note", "registers a module under a name made at run time"),
    "shape_key": ("note", "caches by shape: workspaces and compiled code, or answers"),
    "seed": ("note", "seeds random numbers"),
    "cuda_graph": ("note", "records and replays CUDA graphs"),
    "global_flag": ("note", "changes a library's setting, such as the precision of products"),
    "torch_compile": ("note", "uses torch's compiler to write kernels"),
    "library_call": ("note", "uses a library's operator for a part of the work"),
    "dynamic_code": ("note", "executes code made at run time"),
    "ctypes": ("note", "calls native libraries by ctypes"),
    "guard_stopped": ("note", "kernelguard took too long on this source and was stopped"),
    "guard_skipped": ("note", "kernelguard was not run: the source is too long"),
}
