#!/usr/bin/env bash
# Compiles every CUDA source for sm_80 and sm_90a, without a GPU. Says so where there is nothing to compile, or no nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."

shopt -s nullglob
sources=(csrc/*/*.cu)
if [ ${#sources[@]} -eq 0 ]; then
    echo "CUDA: there are no CUDA sources yet; CUDA tensors run on the reference ops"
elif ! command -v nvcc >/dev/null; then
    echo "CUDA: no nvcc here, ${#sources[@]} sources not compiled"
else
    include=$(.venv/bin/python -c 'import torch; print(torch.__path__[0])')/include
    for source in "${sources[@]}"; do
        nvcc -std=c++20 -O3 -DNDEBUG -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020b000000000000 -Icsrc -I"$include" -Xcompiler -fPIC \
            -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a -c "$source" -o /dev/null
        echo "CUDA: $source compiles for sm_80 and sm_90a"
    done
fi
