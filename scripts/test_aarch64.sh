#!/usr/bin/env bash
# The CPU kernels for Arm where no such machine is at hand: cross-compiles the library, and runs tests of it under
# emulation, which shows whether results are right, and nothing of their speed.
#   ./scripts/test_aarch64.sh [ARGUMENTS OF PYTEST]     by default the tests of products with packed weights
# For root on Debian 12 (x86-64), behind ./scripts/setup.sh test: installs g++-aarch64-linux-gnu and qemu-user, and
# brings Python, torch and the rest for Arm to build/aarch64 (11 GB: torch for Arm wants CUDA's libraries).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/build/aarch64
mkdir -p "$root/debs" "$root/wheels" "$root/system/proc"

if [ ! -e "$root/system/.complete" ]; then
    trap 'dpkg --remove-architecture arm64' EXIT
    dpkg --add-architecture arm64
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu qemu-user
    packages=(libc6 libgcc-s1 libstdc++6 python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libssl3
        libffi8 zlib1g libexpat1 libsqlite3-0 libbz2-1.0 liblzma5 libncursesw6 libtinfo6 libreadline8 libuuid1 libgomp1
        libcrypt1 libdb5.3)
    (cd "$root/debs" && apt-get download -qq "${packages[@]/%/:arm64}" && for deb in *.deb; do dpkg -x "$deb" ../system; done)
    # What torch asks of a processor, which the emulator passes on as it is here.
    for i in 0 1; do
        mkdir -p "$root/system/sys/devices/system/cpu/cpu$i/regs/identification"
        echo 0x00000000413fd0c1 >"$root/system/sys/devices/system/cpu/cpu$i/regs/identification/midr_el1"
        printf 'processor\t: %d\nFeatures\t: fp asimd crc32 atomics fphp asimdhp asimdrdm asimddp\n' $i
        printf 'CPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n\n'
    done >"$root/system/proc/cpuinfo"
    dpkg --remove-architecture arm64
    trap - EXIT
    touch "$root/system/.complete"
fi

if [ ! -e "$root/site/.complete" ]; then
    versions=$(.venv/bin/python -c "
from importlib.metadata import version
print(*(f'{name}=={version(name)}'.partition('+')[0] for name in ('torch', 'transformers', 'numpy', 'safetensors')))")
    platforms=$(seq -f '--platform=manylinux_2_%g_aarch64' -s ' ' 39 -1 5)
    # shellcheck disable=SC2086 # lists of words
    PIP_CONSTRAINT='' .venv/bin/pip download -q --only-binary=:all: --python-version 3.11 -d "$root/wheels" \
        $platforms --platform=manylinux2014_aarch64 $versions \
        accelerate beartype datasets huggingface_hub hypothesis jaxtyping peft psutil pytest rich typer
    for wheel in "$root"/wheels/*.whl; do
        case $wheel in */triton-*) ;; *) .venv/bin/python -m zipfile -e "$wheel" "$root/site" ;; esac
    done
    touch "$root/site/.complete"
fi

PATH=$PWD/.venv/bin:$PATH cmake -S . -B "$root/library" -G Ninja -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DPTQ_CUDA=OFF \
    -DPython_EXECUTABLE="$PWD/.venv/bin/python" -DTORCH_CPU="$root/site/torch/lib/libtorch_cpu.so" \
    -DCMAKE_MODULE_LINKER_FLAGS=-Wl,--allow-shlib-undefined >/dev/null
PATH=$PWD/.venv/bin:$PATH cmake --build "$root/library"

rm -rf "$root/source"
mkdir "$root/source"
cp -r ptq quarot quip_sharp fp6 csrc tests scripts docs README.md pyproject.toml "$root/source/"
cp "$root/library/libptq_cpu.so" "$root/source/ptq/"
cd "$root/source"
if [ $# = 0 ]; then
    set -- tests/test_native.py tests/test_tiled_gemm.py tests/test_tiled.py tests/test_minifloat_tiled.py \
        tests/test_e8p_tiled.py -k "portable or dotprod or levels or kernel or sums_of_floats"
fi
system=$root/system
exec qemu-aarch64 -cpu neoverse-n1 -L "$system" -E OMP_NUM_THREADS=1 -E PYTHONHOME="$system/usr" \
    -E LD_LIBRARY_PATH="$system/lib/aarch64-linux-gnu:$system/usr/lib/aarch64-linux-gnu" \
    -E PYTHONPATH="$root/source:$root/site" -E PYTHONDONTWRITEBYTECODE=1 \
    "$system/usr/bin/python3.11" -W ignore -m pytest -q -p no:cacheprovider "$@"
