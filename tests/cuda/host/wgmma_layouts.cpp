// What csrc/cuda/wgmma.h takes for granted, against the tables in CUTLASS's headers, for tests/test_cuda_host_wgmma.py.
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "cuda/wgmma.h"

namespace {

using namespace cute;
constexpr auto k_major = SM90::GMMA::Major::K;

// Registers of A and C as (thread, number) -> row + 64 column, with `depth` columns of A.
template <class Instruction>
int wrong_registers() {
    using Traits = MMA_Traits<Instruction>;
    const typename Traits::ALayout a;
    const typename Traits::CLayout c;
    constexpr int depth = size<2>(typename Traits::Shape_MNK{}), each = depth / 8;  // columns; numbers in a word
    int wrong = size<1>(a) != 4 * each || size<1>(c) != 64;
    for (int thread = 0; thread < 128; thread++) {
        const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
        for (int j = 0; j < 4; j++)
            for (int e = 0; e < each; e++) {
                const int row = 16 * warp + g + 8 * (j % 2), column = j / 2 * depth / 2 + each * t + e;
                wrong += a(thread, each * j + e) != row + 64 * column;
            }
        for (int i = 0; i < 64; i++) {
            const int row = 16 * warp + g + 8 * (i % 4 / 2), token = 8 * (i / 4) + 2 * t + i % 2;
            wrong += c(thread, i) != row + 64 * token;
        }
    }
    return wrong;
}

// Bytes of a tile of tokens, and its descriptor but for the address, which CUTLASS has on a GPU only.
template <class T>
int wrong_tile() {
    constexpr int columns = ptq::cuda::wgmma_row_bytes / sizeof(T);
    const auto layout = tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<T>{}, Shape<_128, Int<columns>>{});
    const auto place = as_position_independent_swizzle_layout(layout);
    int wrong = 0;
    for (int row = 0; row < 128; row++)
        for (int column = 0; column < columns; column++) {
            const int byte = column * static_cast<int>(sizeof(T));
            wrong +=
                place(row, column) * static_cast<int>(sizeof(T)) != ptq::cuda::swizzled(row, byte / 16) + byte % 16;
        }
    const auto step = local_tile(make_tensor(make_smem_ptr(static_cast<T*>(nullptr)), layout),
                                 Shape<_128, Int<32 / sizeof(T)>>{}, make_coord(0, 1));
    const uint64_t wanted = SM90::GMMA::make_gmma_desc<k_major>(step).desc_ & ~uint64_t{0x3fff};
    uint8_t* const base = reinterpret_cast<uint8_t*>(uintptr_t{1} << 20);
    ptq::cuda::machine.shared = base;
    const uint64_t found = ptq::cuda::tile_descriptor(base + 3 * ptq::cuda::swizzle_bytes, 1);
    return wrong + (found != (wanted | (3 * ptq::cuda::swizzle_bytes + 32) >> 4));
}

}  // namespace

extern "C" int test_wgmma_layouts() {
    return wrong_registers<SM90::GMMA::MMA_64x128x16_F32BF16BF16_RS<k_major, k_major>>() +
           wrong_registers<SM90::GMMA::MMA_64x128x16_F32F16F16_RS<k_major, k_major>>() +
           wrong_registers<SM90::GMMA::MMA_64x128x32_S32S8S8_RS_TN>() + wrong_tile<bfloat16_t>() + wrong_tile<int8_t>();
}
