// device.h on a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <type_traits>

#define PTQ_KERNEL(threads, blocks) __global__ __launch_bounds__(threads, blocks)
#define PTQ_DEVICE __device__ __forceinline__
#define PTQ_BOTH __host__ __device__ inline
#define PTQ_CONSTANT static __device__ const
#define PTQ_UNROLL _Pragma("unroll")
#define PTQ_ROLLED _Pragma("unroll 1")

namespace ptq::cuda {

using Stream = cudaStream_t;

PTQ_DEVICE int thread() {
    return threadIdx.x;
}
PTQ_DEVICE int lane() {
    return threadIdx.x & 31;
}
PTQ_DEVICE int warp() {
    return threadIdx.x >> 5;
}
PTQ_DEVICE int block_x() {
    return blockIdx.x;
}
PTQ_DEVICE int block_y() {
    return blockIdx.y;
}
PTQ_DEVICE int block_z() {
    return blockIdx.z;
}
PTQ_DEVICE uint8_t* shared() {
    extern __shared__ __align__(16) uint8_t memory[];
    return memory;
}

// See `launch`. The next kernel begins to wait when this one has: so at most two of them are under way.
PTQ_DEVICE void follow_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
PTQ_DEVICE void prefetch([[maybe_unused]] const void* from, [[maybe_unused]] int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
#endif
}

PTQ_DEVICE void prefetch_line(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

PTQ_DEVICE void block_barrier() {
    __syncthreads();
}
PTQ_DEVICE void warp_barrier() {
    __syncwarp();
}
template <class T>
PTQ_DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

template <class T>
PTQ_DEVICE T shuffle(T value, int from) {
    return __shfl_sync(0xffffffffu, value, from);
}

template <class V>
PTQ_DEVICE V load(const void* from) {
    return *static_cast<const V*>(from);
}
template <class V>
PTQ_DEVICE void store(void* to, V value) {
    *static_cast<V*>(to) = value;
}
template <>
PTQ_DEVICE Words4 load<Words4>(const void* from) {
    const uint4 v = *static_cast<const uint4*>(from);
    return {v.x, v.y, v.z, v.w};
}
template <>
PTQ_DEVICE void store<Words4>(void* to, Words4 v) {
    *static_cast<uint4*>(to) = {v.word[0], v.word[1], v.word[2], v.word[3]};
}
template <>
PTQ_DEVICE Words2 load<Words2>(const void* from) {
    const uint2 v = *static_cast<const uint2*>(from);
    return {v.x, v.y};
}
template <>
PTQ_DEVICE void store<Words2>(void* to, Words2 v) {
    *static_cast<uint2*>(to) = {v.word[0], v.word[1]};
}
template <>
PTQ_DEVICE Floats4 load<Floats4>(const void* from) {
    const float4 v = *static_cast<const float4*>(from);
    return {v.x, v.y, v.z, v.w};
}
template <>
PTQ_DEVICE void store<Floats4>(void* to, Floats4 v) {
    *static_cast<float4*>(to) = {v.number[0], v.number[1], v.number[2], v.number[3]};
}

// With a predicate, where the compiler would branch around each.
template <class V>
PTQ_DEVICE void load_once(V& v, const void* from, bool wanted) {
    if constexpr (sizeof(V) == 16)
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3])
            : "l"(from), "r"(static_cast<int>(wanted)));
    else if constexpr (sizeof(V) == 8)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2]; }"
                     : "+r"(v.word[0]), "+r"(v.word[1])
                     : "l"(from), "r"(static_cast<int>(wanted)));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.L1::no_allocate.u32 %0, [%1]; }"
                     : "+r"(v)
                     : "l"(from), "r"(static_cast<int>(wanted)));
}

template <int bytes>
PTQ_DEVICE void copy_async(void* to, const void* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    if constexpr (bytes == 16)  // past the L1 cache
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(bytes) : "memory");
}
PTQ_DEVICE void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending>
PTQ_DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

template <class T>
PTQ_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, Half>)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
PTQ_DEVICE void mma_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PTQ_DEVICE void mma_s4(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    __trap();  // is not launched there
#endif
}

PTQ_DEVICE uint32_t transpose(uint32_t word) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(word));
    return d;
}

PTQ_DEVICE int32_t dp4a(uint32_t a, uint32_t b, int32_t c) {
    return __dp4a(static_cast<int>(a), static_cast<int>(b), c);
}
PTQ_DEVICE uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}
// The compiler alone makes two instructions of it, because an instruction can hold one of the two constants only.
PTQ_DEVICE uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

PTQ_DEVICE uint32_t xor_and(uint32_t a, uint32_t b, uint32_t mask) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
    return d;
}
PTQ_DEVICE uint32_t rotate_left(uint32_t x, int by) {
    return __funnelshift_l(x, x, by);
}

template <class T>
PTQ_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    if constexpr (std::is_same_v<T, Half>)
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    else
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Keeps a number in its register, where the compiler would rather compute it again.
PTQ_DEVICE void keep(int& x) {
    asm volatile("" : "+r"(x));
}
PTQ_DEVICE void keep(uint32_t& x) {
    asm volatile("" : "+r"(x));
}
template <class T>
PTQ_DEVICE void keep(T*& x) {
    asm volatile("" : "+l"(x));
}

PTQ_DEVICE float float_of(uint32_t bits) {
    return __uint_as_float(bits);
}
PTQ_DEVICE uint32_t bits_of(float x) {
    return __float_as_uint(x);
}
PTQ_DEVICE float widen(Half x) {
    return __half2float(__ushort_as_half(x.bits));
}
PTQ_DEVICE float widen(Bfloat16 x) {
    return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
template <class T>
PTQ_DEVICE T narrow(float x) {
    if constexpr (std::is_same_v<T, Half>)
        return {__half_as_ushort(__float2half_rn(x))};
    else
        return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <class T>
PTQ_DEVICE uint32_t pack(float low, float high) {
    uint32_t d;
    if constexpr (std::is_same_v<T, Half>)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

PTQ_DEVICE float lesser(float a, float b) {
    return fminf(a, b);
}
PTQ_DEVICE float greater(float a, float b) {
    return fmaxf(a, b);
}
PTQ_DEVICE float multiply(float a, float b) {
    return __fmul_rn(a, b);
}
PTQ_DEVICE float add(float a, float b) {
    return __fadd_rn(a, b);
}
PTQ_DEVICE float divide(float a, float b) {
    return __fdiv_rn(a, b);
}
PTQ_DEVICE float divide_nearly(float a, float b) {
    return __fdividef(a, b);
}
PTQ_DEVICE float root(float x) {
    return __fsqrt_rn(x);
}
PTQ_DEVICE float exponential(float x) {
    float d;  // exp2f would keep results below 2^-126, with four instructions more
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x * 1.44269504f));
    return d;
}
PTQ_DEVICE float maximum(float a, float b) {
    float d;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
PTQ_DEVICE float accurate_exponential(float x) {
    return expf(x);
}
PTQ_DEVICE int round_to_int(float x) {
    return __float2int_rn(x);
}

// What a launch asks of a device, once.
struct Launching {
    bool overlaps;  // kernels with those before them: 9.0 on
    int most_shared;
};
inline cudaError_t launching_of(int& device, Launching& found) {
    static std::array<std::atomic<int>, 64> known{};  // most_shared, with the sign of `overlaps`
    if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
    if (device >= static_cast<int>(known.size())) return cudaErrorInvalidDevice;
    if (const int value = known[device].load(); value != 0) {
        found = {value < 0, value < 0 ? -value : value};
        return cudaSuccess;
    }
    int most = 0, major = 0;
    cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess) known[device] = major >= 9 ? -most : most;
    found = {major >= 9, most};
    return error;
}

// Null where the launch went well. A block may take more than 48 KiB of shared memory only after it was said once per
// kernel and device. On Hopper the kernel may begin before the one ahead of it in the stream has ended, and waits for
// it in `follow_previous` (programmatic dependent launch; CUDA graphs keep it).
template <auto kernel, class Parameters>
const char* launch(Grid grid, int threads, size_t shared_bytes, Stream stream, const Parameters& parameters) {
    // Forgets the error, which would else be taken for the next launch's.
    const auto failed = [](cudaError_t error) {
        cudaGetLastError();
        return cudaGetErrorString(error);
    };
    int device = 0;
    Launching on{};
    if (const cudaError_t error = launching_of(device, on); error != cudaSuccess) return failed(error);
    if (shared_bytes > 48 * 1024) {
        static std::atomic<uint64_t> allowed{0};
        const uint64_t bit = uint64_t{1} << device;
        if (!(allowed.load() & bit)) {
            const cudaError_t error =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, on.most_shared);
            if (error != cudaSuccess) return failed(error);
            allowed |= bit;
        }
    }
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(grid.x, grid.y, grid.z);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = on.overlaps;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, parameters);
    return error == cudaSuccess ? nullptr : failed(error);
}

}  // namespace ptq::cuda
