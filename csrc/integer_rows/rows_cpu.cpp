// ptq::integer_rows and integer_rows_tiled for the CPU: single rows of an integer weight as numbers, from the stored
// bytes (quarot/integer.py) or from tiles (tiles/layout.h). Schemas, fake kernels and references are in
// quarot/row_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

#include "common/linear.h"
#include "common/tensors.h"
#include "tiles/layout.h"

namespace ptq::integer_rows {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct LookUp {
    const uint8_t* codes;   // [n, bytes] or [row tiles, super-blocks, 64 bits]
    const uint16_t* scale;  // [n, g] or [row tiles, g, 16]: bits of bfloat16
    const uint8_t* zero;    // likewise; null where it is 2^(bits - 1)
    const int64_t* index;   // [rows]
    void* out;              // [rows, k]
    Number number;          // that of `out`
    int64_t k, group, groups;
    int bits;
    bool tiled;
};

// The codes of a stored row: a little-endian bit stream.
void stored_codes(const uint8_t* row, int bits, int64_t k, uint8_t* out) {
    if (bits == 8) {
        std::memcpy(out, row, k);
        return;
    }
    const unsigned mask = (1u << bits) - 1;
    for (int64_t i = 0; i < k; i++) {
        const int64_t bit = i * bits;
        const int shift = bit & 7;
        unsigned x = row[bit >> 3];
        if (shift + bits > 8) x |= static_cast<unsigned>(row[(bit >> 3) + 1]) << 8;
        out[i] = static_cast<uint8_t>(x >> shift & mask);
    }
}

// The codes of row `r` of a tile.
void tiled_codes(const uint8_t* tile, int64_t r, int bits, int64_t k, uint8_t* out) {
    using namespace tiles;
    for (int64_t first = 0; first < k; first += block_columns, tile += block_bytes(bits)) {
        uint8_t code[block_columns] = {};
        for (int shift = 0; shift < bits;) {
            const int width = plane_of(bits, shift), fields = 8 / width;
            const uint8_t* plane = tile + 64 * shift + 4 * r;
            const unsigned mask = (1u << width) - 1;
            for (int quad = 0; quad < quads; quad++)
                for (int j = 0; j < 4; j++) {
                    const unsigned byte = plane[64 * (quad / fields) + j];
                    code[4 * quad + j] |= static_cast<uint8_t>((byte >> (quad % fields * width) & mask) << shift);
                }
            shift += width;
        }
        std::memcpy(out + first, code, k - first < block_columns ? k - first : block_columns);
    }
}

// Rows [first, last) of the result; `code` has room for k bytes.
void decode(const LookUp& p, int64_t first, int64_t last, uint8_t* code) {
    using namespace tiles;
    const int64_t bytes = (p.k * p.bits + 7) / 8;
    for (int64_t i = first; i < last; i++) {
        const int64_t row = p.index[i], tile = row / tile_rows, r = row % tile_rows;
        if (p.tiled)
            tiled_codes(p.codes + tile * tile_bytes(p.k, p.bits), r, p.bits, p.k, code);
        else
            stored_codes(p.codes + row * bytes, p.bits, p.k, code);
        for (int64_t g = 0; g < p.groups; g++) {
            const int64_t at = p.tiled ? (tile * p.groups + g) * tile_rows + r : row * p.groups + g;
            const float scale = from_bfloat16(p.scale[at]);
            const int zero = p.zero ? p.zero[at] : 1 << (p.bits - 1);
            for (int64_t c = g * p.group; c < (g + 1) * p.group; c++) {
                const float x = static_cast<float>(code[c] - zero) * scale;
                if (p.number == Number::bfloat16)
                    static_cast<uint16_t*>(p.out)[i * p.k + c] = to_bfloat16(x);
                else
                    static_cast<float*>(p.out)[i * p.k + c] = x;
            }
        }
    }
}

Tensor look_up(LookUp p, const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero,
               const Tensor& index, int64_t n, ScalarType dtype) {
    STD_TORCH_CHECK(index.dim() == 1 && index.scalar_type() == ScalarType::Long,
                    "integer_rows: index must be int64 [u]");
    const Tensor c = compact(codes), s = compact(scale), rows = compact(index);
    std::optional<Tensor> z;
    if (zero) z = compact(*zero);
    p.index = static_cast<const int64_t*>(rows.const_data_ptr());
    const int64_t count = rows.numel();
    for (int64_t i = 0; i < count; i++)
        STD_TORCH_CHECK(p.index[i] >= 0 && p.index[i] < n, "integer_rows: row ", p.index[i], " of ", n,
                        " does not exist");
    p.codes = static_cast<const uint8_t*>(c.const_data_ptr());
    p.scale = static_cast<const uint16_t*>(s.const_data_ptr());
    p.zero = z ? static_cast<const uint8_t*>(z->const_data_ptr()) : nullptr;
    const Tensor out = fresh(std::vector<int64_t>{count, p.k}, kernel_type(dtype));
    p.out = out.mutable_data_ptr();
    p.number = ptq::number_of(dtype);
    run_codes(count, p.k, [&](int64_t first, int64_t last) {
        const std::unique_ptr<uint8_t[]> code(new uint8_t[p.k]);
        decode(p, first, last, code.get());
    });
    return out.scalar_type() == dtype ? out : torch::stable::to(out, dtype);
}

LookUp weight(int64_t bits, int64_t group_size, int64_t k, bool tiled) {
    STD_TORCH_CHECK(bits >= 2 && bits <= 8, "integer_rows: bits must be 2 to 8, found ", bits);
    STD_TORCH_CHECK(k >= 0 && group_size >= 0 && (group_size == 0 || k % group_size == 0), "integer_rows: ", k,
                    " columns do not divide into groups of ", group_size);
    LookUp p{};
    p.bits = static_cast<int>(bits), p.k = k, p.tiled = tiled;
    p.group = group_size ? group_size : k, p.groups = group_size ? k / group_size : 1;
    return p;
}

Tensor rows(const Tensor& codes, const Tensor& scale, const std::optional<Tensor>& zero, const Tensor& index,
            int64_t bits, int64_t group_size, int64_t k, ScalarType dtype) {
    const LookUp p = weight(bits, group_size, k, false);
    const int64_t n = codes.size(0);
    check_tensor("integer_rows", "codes", codes, ScalarType::Byte, {n, (k * bits + 7) / 8});
    check_tensor("integer_rows", "scale", scale, ScalarType::Short, {n, p.groups});
    if (zero) check_tensor("integer_rows", "zero", *zero, ScalarType::Byte, {n, p.groups});
    return look_up(p, codes, scale, zero, index, n, dtype);
}

Tensor rows_tiled(const Tensor& tiles, const Tensor& scale, const std::optional<Tensor>& zero, const Tensor& index,
                  int64_t n, int64_t bits, int64_t group_size, int64_t k, ScalarType dtype) {
    using namespace tiles;
    const LookUp p = weight(bits, group_size, k, true);
    check_tensor("integer_rows_tiled", "tiles", tiles, ScalarType::Byte,
                 {row_tiles(n), blocks_in(k), block_bytes(p.bits)});
    check_tensor("integer_rows_tiled", "scale", scale, ScalarType::Short, {row_tiles(n), p.groups, tile_rows});
    if (zero) check_tensor("integer_rows_tiled", "zero", *zero, ScalarType::Byte, {row_tiles(n), p.groups, tile_rows});
    return look_up(p, tiles, scale, zero, index, n, dtype);
}

}  // namespace
}  // namespace ptq::integer_rows

STABLE_TORCH_LIBRARY_IMPL(ptq, CPU, m) {
    m.impl("integer_rows", TORCH_BOX(&ptq::integer_rows::rows));
    m.impl("integer_rows_tiled", TORCH_BOX(&ptq::integer_rows::rows_tiled));
}
