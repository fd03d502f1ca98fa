// What a kernel asks of compute capability 9.0 beyond device.h: barriers in shared memory on which bulk copies arrive,
// and the asynchronous products of a warpgroup, four warps of which the first is a multiple of four. Under nvcc PTX
// (wgmma_gpu.h), under a host compiler emulated (wgmma_host.h). In ptq::cuda:
//
//   has_wgmma                          whether what is compiled is for such a GPU: elsewhere a kernel is left empty
//   Barrier                            8 bytes of shared memory
//   barrier_init(b, arrivals)          by one thread; then barriers_ready(), by the same, and block_barrier()
//   barrier_arrive(b)                  one arrival
//   barrier_expect(b, bytes)           one arrival, and so many bytes that will be copied
//   barrier_wait(b, parity)            until the phase of that parity is over; the first phase has parity 0
//   copy_bulk(to, from, bytes, b)      global to shared memory; all of it multiples of 16
//   shared_offset(p)                   the address of shared memory as the hardware counts it
//   wgmma<T>(c, a, tokens, adds)       m64n128k16, T = Half or Bfloat16, float32 sums: c = a b (+ c where `adds`)
//   wgmma_s8(c, a, tokens, adds)       m64n128k32, signed bytes, int32 sums
//   wgmma_commit(), wgmma_wait<pending>()
//   wgmma_fence()                      after registers were written, before they are multiplied
//   leave_registers(), take_registers()   the first by a warpgroup of three, for the other two
//   keep(float), keep(int32_t)         as of device.h: keeps reads of sums behind a wait, and writes in front of a
//   fence
//
// Each warp has 16 of the 64 rows of A, in fragments like those of `mma`, and 16 tiles of 8 tokens of C, likewise. B is
// a tile of 128 tokens in shared memory that `tokens` describes.
#pragma once

#include "cuda/device.h"

#if defined(__CUDACC__)
#include "cuda/wgmma_gpu.h"
#else
#include "cuda/wgmma_host.h"
#endif

namespace ptq::cuda {

constexpr int wgmma_tokens = 128, wgmma_row_bytes = 128, wgmma_tile_bytes = wgmma_tokens * wgmma_row_bytes;
constexpr int swizzle_bytes = 1024;  // a tile begins at a multiple of it

// Rows of 128 bytes, one for a token. Of row r the 16 bytes number c lie in place c ^ r % 8, so that 8 rows reach all
// banks ("128-byte swizzle", K-major).
PTQ_BOTH constexpr int swizzled(int row, int chunk) {
    return wgmma_row_bytes * row + 16 * (chunk ^ (row & 7));
}
// The descriptor of a tile, from its bytes 32 `step` of each row on: address, distance of eights of rows, swizzle.
PTQ_DEVICE uint64_t tile_descriptor(const void* tile, int step) {
    const uint64_t address = shared_offset(tile) + 32 * static_cast<uint32_t>(step);
    return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{swizzle_bytes >> 4} << 32 | uint64_t{1} << 62;
}

}  // namespace ptq::cuda
