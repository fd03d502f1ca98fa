// wgmma.h on a GPU. Compiled for sm_90a alone; elsewhere nothing of it is launched.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PTQ_SM90(...) __VA_ARGS__
#else
#define PTQ_SM90(...) __trap()
#endif

namespace ptq::cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool has_wgmma = true;
#else
constexpr bool has_wgmma = false;
#endif

struct alignas(8) Barrier {
    uint64_t state;
};

PTQ_DEVICE uint32_t shared_offset(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
PTQ_DEVICE void barrier_init(Barrier* b, int arrivals) {
    PTQ_SM90(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_offset(b)), "r"(arrivals) : "memory"));
}
PTQ_DEVICE void barriers_ready() {
    PTQ_SM90(asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" :: : "memory"));
}
PTQ_DEVICE void barrier_arrive(Barrier* b) {
    PTQ_SM90(asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_offset(b)) : "memory"));
}
PTQ_DEVICE void barrier_expect(Barrier* b, int bytes) {
    PTQ_SM90(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_offset(b)),
                          "r"(bytes) : "memory"));
}
PTQ_DEVICE void barrier_wait(Barrier* b, int parity) {
    PTQ_SM90(
        asm volatile("{\n\t"
                     ".reg .pred over;\n\t"
                     "again:\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n\t"
                     "@!over bra again;\n\t"
                     "}" ::"r"(shared_offset(b)),
                     "r"(parity) : "memory"));
}
PTQ_DEVICE void copy_bulk(void* to, const void* from, int bytes, Barrier* b) {
    PTQ_SM90(
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_offset(to)),
                     "l"(from), "r"(bytes), "r"(shared_offset(b)) : "memory"));
}

PTQ_DEVICE void leave_registers() {
    PTQ_SM90(asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"));
}
PTQ_DEVICE void take_registers() {
    PTQ_SM90(asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"));
}
PTQ_DEVICE void wgmma_fence() {
    PTQ_SM90(asm volatile("wgmma.fence.sync.aligned;" :: : "memory"));
}
PTQ_DEVICE void wgmma_commit() {
    PTQ_SM90(asm volatile("wgmma.commit_group.sync.aligned;" :: : "memory"));
}
template <int pending>
PTQ_DEVICE void wgmma_wait() {
    PTQ_SM90(asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory"));
}
PTQ_DEVICE void keep(float& x) {
    asm volatile("" : "+f"(x)::"memory");
}

// The 64 sums of a thread as operands 0 to 63.
#define PTQ_FOUR(kind, c, m) kind(c[m][0]), kind(c[m][1]), kind(c[m][2]), kind(c[m][3])
#define PTQ_SUMS(kind, c)                                                                                             \
    PTQ_FOUR(kind, c, 0), PTQ_FOUR(kind, c, 1), PTQ_FOUR(kind, c, 2), PTQ_FOUR(kind, c, 3), PTQ_FOUR(kind, c, 4),     \
        PTQ_FOUR(kind, c, 5), PTQ_FOUR(kind, c, 6), PTQ_FOUR(kind, c, 7), PTQ_FOUR(kind, c, 8), PTQ_FOUR(kind, c, 9), \
        PTQ_FOUR(kind, c, 10), PTQ_FOUR(kind, c, 11), PTQ_FOUR(kind, c, 12), PTQ_FOUR(kind, c, 13),                   \
        PTQ_FOUR(kind, c, 14), PTQ_FOUR(kind, c, 15)
#define PTQ_SUM_NAMES                                                                  \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define PTQ_WGMMA(name, more, kind)                                                                                \
    PTQ_SM90(                                                                                                      \
        asm volatile("{\n\t"                                                                                       \
                     ".reg .pred adds;\n\t"                                                                        \
                     "setp.ne.b32 adds, %69, 0;\n\t"                                                               \
                     "wgmma.mma_async.sync.aligned." name " " PTQ_SUM_NAMES "{%64, %65, %66, %67}, %68, adds" more \
                     ";\n\t"                                                                                       \
                     "}" : PTQ_SUMS(kind, c) : "r"(a[0]),                                                          \
                     "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(static_cast<int>(adds))))

template <class T>
PTQ_DEVICE void wgmma(float (&c)[16][4], const uint32_t (&a)[4], uint64_t tokens, bool adds) {
    if constexpr (std::is_same_v<T, Half>)
        PTQ_WGMMA("m64n128k16.f32.f16.f16", ", 1, 1, 0", "+f");
    else
        PTQ_WGMMA("m64n128k16.f32.bf16.bf16", ", 1, 1, 0", "+f");
}
PTQ_DEVICE void wgmma_s8(int32_t (&c)[16][4], const uint32_t (&a)[4], uint64_t tokens, bool adds) {
    PTQ_WGMMA("m64n128k32.s32.s8.s8", "", "+r");
}

#undef PTQ_WGMMA
#undef PTQ_SUM_NAMES
#undef PTQ_SUMS
#undef PTQ_FOUR
#undef PTQ_SM90

}  // namespace ptq::cuda
