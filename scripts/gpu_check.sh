#!/usr/bin/env bash
# On a machine with a GPU and nvcc, without a network: builds the kernels, runs the tests that need a GPU, measures.
#
#     scripts/gpu_check.sh [FOLDER]     writes there (./gpu_check): logs, and as .json and .md
#                                       gpu_check (kernels), generate (decoding) and generate_compiled (if time is left)
#
# Meant to end within nine minutes. PYTHON names the interpreter whose torch is used (.venv/bin/python, or python3).
set -euo pipefail
cd "$(dirname "$0")/.."

output=$(realpath -m "${1:-gpu_check}")
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
python=$(command -v "$python")
case $python in /*) ;; *) python=$PWD/$python ;; esac  # CMake wants it so; realpath would leave the environment
mkdir -p "$output"
unset OMP_NUM_THREADS OMP_THREAD_LIMIT  # nproc looks at them
unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE  # set in NVIDIA's containers: float32 references would be rounded
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=$(nproc)
# limited SECONDS COMMAND...: stopped as by Ctrl-C, so that tests say what they found; 124 says that it was
limited() { timeout -s INT -k 10 "$@"; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
command -v nvcc >/dev/null || { echo "gpu_check: no nvcc here" >&2; exit 1; }

echo "== build ($(date +%T))"
cmake -S . -B build/gpu_check -DCMAKE_BUILD_TYPE=Release -DPTQ_CUDA=ON -DPython_EXECUTABLE="$python" >"$output/build.log"
cmake --build build/gpu_check -j "$(nproc)" >>"$output/build.log" 2>&1 || { tail -40 "$output/build.log"; exit 1; }
for library in libptq_cpu.so libptq_cuda.so; do
    cp "build/gpu_check/$library" "ptq/$library.new" && mv "ptq/$library.new" "ptq/$library"
done

echo "== tests ($(date +%T))"
# The types in signatures are checked where beartype is installed; here they need not be. Warnings (-W) of a torch and
# packages that were never met with a GPU are shown, and no errors: they would hide what the kernels do.
tests=0 together=()
if "$python" -c 'import xdist' 2>/dev/null; then together=(-n "$(($(nproc) < 12 ? $(nproc) : 12))"); fi
limited 210 "$python" -m pytest -q -W default -o addopts="" -p no:cacheprovider "${together[@]}" tests/cuda \
    >"$output/tests.log" 2>&1 || tests=$?
tail -25 "$output/tests.log"

echo "== kernels ($(date +%T))"
kernels=0
limited 140 "$python" scripts/bench_cuda.py --output "$output/gpu_check" || kernels=$?

echo "== decoding ($(date +%T))"
decoding=not-run
if [ "$SECONDS" -lt 430 ]; then
    decoding=0
    limited $((550 - SECONDS > 150 ? 150 : 550 - SECONDS)) "$python" scripts/bench_cuda_generate.py --output "$output/generate" || decoding=$?
fi

compiled=not-run
if [ "$SECONDS" -lt 360 ]; then  # compiling 32 layers may take a minute
    echo "== compiled decoding ($(date +%T))"
    compiled=0
    limited 170 "$python" scripts/bench_cuda_generate.py --output "$output/generate_compiled" --compiled \
        --only "INT4 W4A16 g128" --only "FP6 e2m3 W6A16" || compiled=$?
fi
echo "== end ($(date +%T)); exit codes: tests $tests, kernels $kernels, decoding $decoding, compiled $compiled"
case $tests$kernels$decoding in 000 | 00not-run) ;; *) exit 1 ;; esac
