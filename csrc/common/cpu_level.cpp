#include "common/cpu_level.h"

#include <atomic>

namespace ptq {
namespace {

CpuLevel best_level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
          __builtin_cpu_supports("bmi2")))
        return CpuLevel::portable;
    if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")))
        return CpuLevel::avx2;
    if (!(__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi"))) return CpuLevel::avx512;
    return __builtin_cpu_supports("avx512bf16") ? CpuLevel::avx512bf16 : CpuLevel::avx512vnni;
#else
    return CpuLevel::portable;
#endif
}

std::atomic<int>& level() {
    static std::atomic<int> value{static_cast<int>(best_level())};
    return value;
}

}  // namespace

CpuLevel cpu_level() {
    return static_cast<CpuLevel>(level().load(std::memory_order_relaxed));
}

}  // namespace ptq

extern "C" __attribute__((visibility("default"))) int ptq_set_cpu_level(int wanted) {
    const int best = static_cast<int>(ptq::best_level());
    ptq::level() = wanted < 0 || wanted > best ? best : wanted;
    return ptq::level();
}
