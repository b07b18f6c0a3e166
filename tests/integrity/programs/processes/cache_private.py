"""Fills its own compiler caches with poison: a Triton entry, a stale build lock, a shared object.

The variables that name caches point into the candidate's own directory, so it poisons nobody but itself, and the
directory is gone before the next kernel. The kernel is right and passes.
"""

for variable in ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "HOME"):
    folder = os.environ[variable]
    assert folder.startswith(os.getcwd()), f"{variable} is shared: {folder}"
    assert "poison" not in os.listdir(folder), f"{variable} was not new"
    os.makedirs(f"{folder}/poison", exist_ok=True)
    for name in ("lock", "kernel.so", "kernel.json", "kernel.cubin"):
        with open(f"{folder}/poison/{name}", "wb") as file:
            file.write(b"\x7fELF")
