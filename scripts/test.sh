#!/usr/bin/env bash
# Sets up .venv with everything that the tests need, and runs them. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh test
# Spinning OpenMP workers starve each other when tests share the cores.
GOMP_SPINCOUNT=1000 .venv/bin/python -m pytest -n auto --maxprocesses 8 "$@"
