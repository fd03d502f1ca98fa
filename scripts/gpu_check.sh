#!/usr/bin/env bash
# On a machine with a GPU and nvcc, without a network: builds the kernels, runs the tests that need a GPU, measures.
#
#     scripts/gpu_check.sh [FOLDER]     writes gpu_check.json, gpu_check.md and the logs there (./gpu_check)
#
# Meant to end within nine minutes. PYTHON names the interpreter whose torch is used (.venv/bin/python, or python3).
set -euo pipefail
cd "$(dirname "$0")/.."

output=$(realpath -m "${1:-gpu_check}")
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
python=$(command -v "$python")
mkdir -p "$output"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
command -v nvcc >/dev/null || { echo "gpu_check: no nvcc here" >&2; exit 1; }

echo "== build ($(date +%T))"
cmake -S . -B build/gpu_check -DCMAKE_BUILD_TYPE=Release -DPTQ_CUDA=ON -DPython_EXECUTABLE="$python" >"$output/build.log"
cmake --build build/gpu_check -j "$(nproc)" >>"$output/build.log" 2>&1 || { tail -40 "$output/build.log"; exit 1; }
for library in libptq_cpu.so libptq_cuda.so; do
    cp "build/gpu_check/$library" "ptq/$library.new" && mv "ptq/$library.new" "ptq/$library"
done

echo "== tests ($(date +%T))"
# The types in signatures are checked where beartype is installed; here they need not be.
tests=0
"$python" -m pytest -q -o addopts="" -p no:cacheprovider tests/cuda >"$output/tests.log" 2>&1 || tests=$?
tail -25 "$output/tests.log"

echo "== benchmark ($(date +%T))"
"$python" scripts/bench_cuda.py --output "$output/gpu_check"
echo "== end ($(date +%T)); tests: exit code $tests"
exit "$tests"
