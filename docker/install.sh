#!/bin/sh
# Installs kqueue with an extra ($1); with `cpu` as $2 the CPU build of torch. Packages that the image brings
# along and that will do, such as a GPU image's torch, are kept.
set -eu
what="kqueue[$1] @ file://$(echo /package/dist/kqueue-*.whl)"
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
if [ -n "${WHEELHOUSE:-}" ]; then
    exec python3 -m pip install --no-index --find-links /package/wheels "$what"
elif [ "${2:-}" = cpu ]; then
    # It knows where the CPU builds are.
    python3 -m pip install --target /tmp/uv uv
    PYTHONPATH=/tmp/uv python3 -m uv pip install --no-cache --system --break-system-packages --torch-backend cpu "$what"
    rm -rf /tmp/uv
else
    exec python3 -m pip install "$what"
fi
