#!/usr/bin/env bash
# Makes the virtual environment .venv with ptq and its kernels in it. Used by quickstart.sh and test.sh; safe to repeat.
#   scripts/setup.sh [EXTRA]      EXTRA: an extra of pyproject.toml to install too, such as `test`
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or newer is needed; name one with PYTHON=/path/to/python3" >&2
    exit 2
}
command -v c++ >/dev/null || {
    echo "setup: a C++ compiler is needed for the kernels; install g++ (Debian: apt-get install g++)" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$PYTHON" -m venv .venv
install() {
    .venv/bin/python -m pip --disable-pip-version-check --quiet install --constraint scripts/constraints.txt "$@" \
        2> >(grep -v '^WARNING: Location' >&2)
}

[ -e .venv/.complete ] || echo "setup: downloading torch and the rest, about 1 GB, then compiling the kernels, 3 to 4 minutes on two cores" >&2
# torch first: the kernels are compiled against it.
install torch
install scikit-build-core cmake ninja
install --no-build-isolation --editable ".${1:+[$1]}"
# Headers that a test compares layouts with; what they depend on is not needed.
if [ "${1:-}" = test ]; then install --no-deps nvidia-cutlass; fi
touch .venv/.complete
