#!/usr/bin/env bash
# Sets up .venv and runs the whole job offline on the model that ships with ptq, once with each method: quantise, load,
# generate, measure.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
run() {
    printf '\n$'
    printf ' %q' "$@"
    echo
    .venv/bin/"$@"
}
run quantize fp6 demo "$out/FP6"
run quantize quarot demo "$out/QuaRot INT4" --group-size 64 --samples 64
run quantize quip-sharp demo "$out/QuIP# 2 bits" --samples 64
run quantize inspect "$out/QuaRot INT4"
run quantize verify "$out/QuaRot INT4" --against demo
export GOMP_SPINCOUNT=10000 # as `quantize` has it: beside other programs idle threads would take their time
run python scripts/quickstart.py "$out/FP6" "$out/QuaRot INT4" "$out/QuIP# 2 bits"
echo "All of this was in $out, which is removed now. To keep a result: .venv/bin/quantize fp6 demo OUT"
