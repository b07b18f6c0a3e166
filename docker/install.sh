#!/bin/sh
# `install.sh EXTRAS [cpu]` installs the requirements of kqueue with these extras. With `cpu` it installs the CPU build
# of torch. `install.sh package` installs kqueue itself. It keeps suitable packages of the image, such as a GPU image's
# torch.
set -eu
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
if [ "$1" = package ]; then
    exec python3 -m pip install --no-index --no-deps /package/dist/kqueue-*.whl
fi
wanted=$(mktemp)
python3 /needs/scripts/requirements.py /needs/pyproject.toml "$1" >"$wanted"
if [ -n "${WHEELHOUSE:-}" ]; then
    python3 -m pip install --no-index --find-links /needs/wheels -r "$wanted"
elif [ "${2:-}" = cpu ]; then
    # uv finds the CPU builds. It must compile bytecode here like pip, because the running image writes none.
    python3 -m pip install --target /tmp/uv uv
    PYTHONPATH=/tmp/uv python3 -m uv pip install --no-cache --system --break-system-packages --compile-bytecode \
        --torch-backend cpu -r "$wanted"
    rm -rf /tmp/uv
else
    python3 -m pip install -r "$wanted"
fi
rm "$wanted"
if [ "${2:-}" = cpu ]; then
    # Half a gigabyte for GPUs and for torch's tests, which judging on the CPU does not use.
    packages=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')/..
    rm -rf "$packages"/triton/backends/nvidia/bin/* "$packages"/triton/backends/nvidia/lib/cupti* \
        "$packages"/torch/test "$packages"/torch/bin/test_*
fi
