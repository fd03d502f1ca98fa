#include "common/cpu_level.h"

#include "common/fetch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace ptq {
namespace {

#if defined(__x86_64__)
// Tiles are large: Linux saves them for a process that has asked for them.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr uint32_t wanted = 1u << 22 | 1u << 24 | 1u << 25;  // BF16, TILE, INT8
    constexpr long ask_for_state = 0x1023, tile_data = 18;       // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    uint32_t a, b, c, features;
    return __get_cpuid_count(7, 0, &a, &b, &c, &features) && (features & wanted) == wanted &&
           syscall(SYS_arch_prctl, ask_for_state, tile_data) == 0;
#else
    return false;
#endif
}
#endif

#if defined(__x86_64__)
bool has_f16c() {  // clang has no such name for __builtin_cpu_supports
    uint32_t a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

bool has_avx_vnni() {
#if defined(__x86_64__)
    uint32_t a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
#else
    return false;
#endif
}

CpuLevel best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
          has_f16c()))
        return CpuLevel::portable;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")))
        return has_avx_vnni() ? CpuLevel::avxvnni : CpuLevel::avx2;
    if (!(__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi"))) return CpuLevel::avx512;
    if (!__builtin_cpu_supports("avx512bf16")) return CpuLevel::avx512vnni;
    return may_use_tiles() ? CpuLevel::amx : CpuLevel::avx512bf16;
#elif defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long wanted = 1ul << 20 | 1ul << 8;  // HWCAP_ASIMDDP, HWCAP_ATOMICS: of ARMv8.2
    return (getauxval(AT_HWCAP) & wanted) == wanted ? CpuLevel::dotprod : CpuLevel::portable;
#elif defined(__aarch64__) && defined(__APPLE__)
    return CpuLevel::dotprod;
#else
    return CpuLevel::portable;
#endif
}

bool is_intel() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

bool is_zen4() {
#if defined(__x86_64__)
    uint32_t version, b, c, d;  // of the family, Zen 3 and Zen 4, the latter has AVX-512
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") && __get_cpuid(1, &version, &b, &c, &d) &&
           (version >> 8 & 15) + (version >> 20 & 255) == 0x19 && __builtin_cpu_supports("avx512f");
#else
    return false;
#endif
}

std::atomic<bool>& slow_pairs() {
    static std::atomic<bool> value{is_intel()};
    return value;
}

std::atomic<int>& level() {
    static std::atomic<int> value{static_cast<int>(best_level())};
    return value;
}

}  // namespace

const Fetching fetching = is_intel()  ? Fetching::in_four_pages
                          : is_zen4() ? Fetching::second_level
                                      : Fetching::past_second_level;

CpuLevel cpu_level() {
    return static_cast<CpuLevel>(level().load(std::memory_order_relaxed));
}

bool has_slow_pairs() {
    const CpuLevel level = cpu_level();
    const bool has_pairs = level == CpuLevel::avx512bf16 || level == CpuLevel::amx;
    return has_pairs && slow_pairs().load(std::memory_order_relaxed);
}

}  // namespace ptq

extern "C" __attribute__((visibility("default"))) int ptq_cpu_level() {
    return static_cast<int>(ptq::cpu_level());
}

extern "C" __attribute__((visibility("default"))) int ptq_set_cpu_level(int wanted) {
    using ptq::CpuLevel;
    const CpuLevel best = ptq::best_level();
    CpuLevel level = wanted < 0 ? best : std::min(best, static_cast<CpuLevel>(wanted));
    if (level == CpuLevel::avxvnni && !ptq::has_avx_vnni()) level = CpuLevel::avx2;
    if (level != CpuLevel::dotprod && best == CpuLevel::dotprod) level = CpuLevel::portable;
    return ptq::level() = static_cast<int>(level);
}

extern "C" __attribute__((visibility("default"))) int ptq_has_slow_pairs() {
    return ptq::has_slow_pairs();
}

extern "C" __attribute__((visibility("default"))) int ptq_set_slow_pairs(int slow) {
    ptq::slow_pairs() = slow < 0 ? ptq::is_intel() : slow != 0;
    return ptq::has_slow_pairs();
}
