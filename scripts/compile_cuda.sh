#!/usr/bin/env bash
# Compiles every CUDA source for sm_80 and sm_90a, without a GPU, and fails where a kernel spills more than four
# registers (a few outside the loops over weights, and in transforms, do less harm than half as many warps would), or
# where the assembler waits for each wgmma. Says so where there is no nvcc. PTQ_NVCC_JOBS: how many at once (all
# processors).
set -euo pipefail
cd "$(dirname "$0")/.."

shopt -s nullglob
sources=(csrc/*/*.cu)
if [ ${#sources[@]} -eq 0 ]; then
    echo "CUDA: there are no CUDA sources; CUDA tensors run on the reference ops"
    exit
elif ! command -v nvcc >/dev/null; then
    echo "CUDA: no nvcc here, ${#sources[@]} sources not compiled"
    exit
fi
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
export INCLUDE=$("$python" -c 'import torch; print(torch.__path__[0])')/include
compile() {
    log=$(mktemp)
    nvcc -std=c++20 -O3 -DNDEBUG -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020b000000000000 -Icsrc -I"$INCLUDE" \
        -Xcompiler -fPIC -Xptxas -v -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a \
        -c "$1" -o /dev/null >"$log" 2>&1 || { cat "$log"; exit 1; }
    kernels=$(grep -c 'bytes spill stores' "$log" || true)
    if grep -B1 'bytes spill stores' "$log" | grep -v '^--' | paste - - | grep -Ev ' ([048]|1[26]) bytes spill stores, ([048]|1[26]|2[048]) bytes spill loads'; then
        echo "CUDA: $1: the kernels above spill registers" >&2
        exit 1
    fi
    if grep 'wgmma.mma_async instructions are serialized' "$log"; then
        echo "CUDA: $1: the products above do not overlap" >&2
        exit 1
    fi
    rm "$log"
    echo "CUDA: $1 compiles for sm_80 and sm_90a, $kernels kernels, next to no spills"
}
export -f compile
printf '%s\n' "${sources[@]}" | xargs -P "${PTQ_NVCC_JOBS:-$(nproc)}" -I{} bash -euo pipefail -c 'compile {}'
