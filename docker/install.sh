#!/bin/sh
# `install.sh EXTRAS [cpu]` installs what kqueue with some extras requires, with the CPU build of torch where `cpu` is
# said; `install.sh package` installs kqueue itself. Packages that the image brings along and that will do, such as a
# GPU image's torch, are kept.
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
    # It knows where the CPU builds are. Nothing is compiled when the image runs, so it is now, as pip does by itself.
    python3 -m pip install --target /tmp/uv uv
    PYTHONPATH=/tmp/uv python3 -m uv pip install --no-cache --system --break-system-packages --compile-bytecode \
        --torch-backend cpu -r "$wanted"
    rm -rf /tmp/uv
else
    python3 -m pip install -r "$wanted"
fi
rm "$wanted"
if [ "${2:-}" = cpu ]; then
    # Half a gigabyte for GPUs and for torch's own tests, of which judging on the CPU uses nothing.
    packages=$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')/..
    rm -rf "$packages"/triton/backends/nvidia/bin/* "$packages"/triton/backends/nvidia/lib/cupti* \
        "$packages"/torch/test "$packages"/torch/bin/test_*
fi
