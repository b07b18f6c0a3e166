#!/bin/sh
# Installs the missing parts of a C++ compiler, because kernels are compiled in this image. Debian packages come from
# the wheelhouse if it has them, and otherwise from apt.
set -eu
lacks=""
command -v g++ >/dev/null || lacks="g++"
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$headers/Python.h" ] || lacks="$lacks python3-dev"
[ -n "$lacks" ] || exit 0
if ls /needs/wheels/*.deb >/dev/null 2>&1; then
    dpkg --install /needs/wheels/*.deb
else
    apt-get update
    # shellcheck disable=SC2086
    apt-get install -y --no-install-recommends $lacks
    rm -rf /var/lib/apt/lists/*
fi
[ -e "$headers/Python.h" ] || { echo "no Python.h in $headers: use an image whose Python has its headers" >&2; exit 1; }
