// Which instruction set the CPU kernels use. Every kernel is compiled once per level (see CMakeLists.txt) and asks
// cpu_level() on each call. Codes, bytes and products of integers must not depend on the level, nor do most sums of
// floating-point numbers: docs/add-a-kernel.md names those that do.
#pragma once

#include <type_traits>

namespace ptq {

enum class CpuLevel : int {
    portable = 0,    // the compiler's baseline for the architecture
    avx2 = 1,        // AVX2, FMA, F16C, BMI2
    avxvnni = 2,     // + AVX-VNNI; the levels above do not ask for it
    avx512 = 3,      // AVX2 + AVX-512 F, BW, VL, DQ
    avx512vnni = 4,  // + AVX-512 VNNI, VBMI
    avx512bf16 = 5,  // + AVX-512 BF16
    amx = 6,         // + AMX TILE, INT8, BF16
    dotprod = 7,     // Arm: portable + the dot product of ARMv8.2; not to be compared with those of x86
};

// The best level that this machine has, or a lower one that a test has asked for.
CpuLevel cpu_level();

// Whether AVX-512 BF16 is in use and multiplies fewer numbers in a cycle than float32: Intel's processors begin one of
// its products in two cycles, and four of float32.
bool has_slow_pairs();

// What was made for the level in use, of one thing (a table of kernels) per level from portable on: above the last, the
// last. A level that has none of its own repeats the one below (avx512: avx2).
template <auto& portable, auto&... higher>
auto& at_level() {
    static_assert(sizeof...(higher) != static_cast<int>(CpuLevel::avxvnni), "a machine above may lack AVX-VNNI");
#if defined(__x86_64__)
    static constexpr std::remove_reference_t<decltype(portable)>* all[] = {&portable, &higher...};
    constexpr int last = sizeof...(higher);
    const int level = static_cast<int>(cpu_level());
    return *all[level < last ? level : last];
#else
    return portable;
#endif
}

// The same on Arm, where `portable` has the vectors of every ARMv8.
template <auto& portable, auto& dotprod>
auto& at_arm_level() {
    return cpu_level() == CpuLevel::dotprod ? dotprod : portable;
}

}  // namespace ptq

// Through ctypes (ptq/ops/native.py). The level in use. For tests: use this level from now on, or the next one below
// that the machine has; a negative level means the best one. Returns the level now in use.
extern "C" int ptq_cpu_level();
extern "C" int ptq_set_cpu_level(int level);
// The same of `has_slow_pairs`: 0 or 1; negative: as the machine is.
extern "C" int ptq_has_slow_pairs();
extern "C" int ptq_set_slow_pairs(int slow);
