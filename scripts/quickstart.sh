#!/usr/bin/env bash
# Sets up .venv and runs the whole job offline on the model that ships with ptq, once with each method: quantise, load,
# generate, measure.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
.venv/bin/quantize fp6 demo "$out/FP6"
.venv/bin/quantize quarot demo "$out/QuaRot INT4" --group-size 64 --samples 64
.venv/bin/quantize quip-sharp demo "$out/QuIP# 2 bits" --samples 64
.venv/bin/quantize inspect "$out/QuaRot INT4"
.venv/bin/quantize verify "$out/QuaRot INT4" --against demo
.venv/bin/python scripts/quickstart.py "$out/FP6" "$out/QuaRot INT4" "$out/QuIP# 2 bits"
