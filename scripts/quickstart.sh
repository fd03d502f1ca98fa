#!/usr/bin/env bash
# Sets up .venv and runs the whole job offline on the model that ships with ptq: quantise, load, generate, measure.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
.venv/bin/quantize quarot demo "$out/demo-int4" --group-size 64 --samples 64
.venv/bin/quantize inspect "$out/demo-int4"
.venv/bin/quantize verify "$out/demo-int4" --against demo
.venv/bin/python scripts/quickstart.py "$out/demo-int4"
