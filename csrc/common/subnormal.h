// Subnormal numbers hold up a core for a hundred cycles or more.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ptq {

// While one of these lives, this thread takes subnormal floats for 0, and rounds to 0 what would become one. What is
// computed must be behind a call that the compiler does not see through.
class FlushedSubnormals {
  public:
#if defined(__x86_64__)
    FlushedSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | flush_to_zero | denormals_are_zero); }
    ~FlushedSubnormals() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
    FlushedSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | flush_to_zero));
    }
    ~FlushedSubnormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
#else
    FlushedSubnormals() = default;
#endif
    FlushedSubnormals(const FlushedSubnormals&) = delete;
    FlushedSubnormals& operator=(const FlushedSubnormals&) = delete;

  private:
#if defined(__x86_64__)
    static constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x40;  // of MXCSR
    unsigned before_;
#else
    static constexpr uint64_t flush_to_zero = uint64_t{1} << 24;  // of FPCR
    uint64_t before_ = 0;
#endif
};

}  // namespace ptq
