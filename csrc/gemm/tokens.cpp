#include "gemm/tokens.h"

#include <cstring>

namespace ptq::gemm {

const int8_t* row_of(const Tokens& from, int64_t token, int64_t columns, int8_t* spare) {
    if (token >= from.t) {
        std::memset(spare, 0, columns);
    } else if (from.numbers) {
        activations::quantize(*from.numbers, token, spare, from.scale + token);
        from.scale[token] *= from.unit;
    } else if (columns == from.k) {
        return from.q + token * from.k;
    } else {
        std::memcpy(spare, from.q + token * from.k, from.k);
    }
    return spare;
}

const int8_t* rows_of(const Tokens& from, int64_t columns, std::unique_ptr<int8_t[]>& room) {
    if (!from.numbers && columns == from.k) return from.q;
    room.reset(new int8_t[from.t * columns]);
    for (int64_t t = 0; t < from.t; t++) {
        std::memset(room.get() + t * columns + from.k, 0, columns - from.k);
        row_of(from, t, columns, room.get() + t * columns);
    }
    return room.get();
}

}  // namespace ptq::gemm
