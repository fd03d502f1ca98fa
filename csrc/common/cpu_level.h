// Which instruction set the CPU kernels use. Every kernel is compiled once per level (see CMakeLists.txt) and asks
// cpu_level() on each call. Results must not depend on the level.
#pragma once

namespace ptq {

enum class CpuLevel : int {
    portable = 0,    // the compiler's baseline for the architecture
    avx2 = 1,        // AVX2, FMA, F16C, BMI2
    avx512 = 2,      // + AVX-512 F, BW, VL, DQ
    avx512vnni = 3,  // + AVX-512 VNNI, VBMI
    avx512bf16 = 4,  // + AVX-512 BF16
};

// The best level that this machine has, or a lower one that a test has asked for.
CpuLevel cpu_level();

}  // namespace ptq

// For tests, through ctypes (ptq/native.py): use this level from now on, at most what the machine has; a negative
// level means the best one. Returns the level now in use.
extern "C" int ptq_set_cpu_level(int level);
