// How split.cuh cuts a vector up, and where its elements lie in shared memory. No torch here.
#pragma once

#include "cuda/device.h"

namespace ptq::hadamard {

using namespace ptq::cuda;

// How split.cuh transforms a vector; no rows: it does not.
struct Split {
    int rows, log;                           // the matrix, and log2 of its columns
    int row_log, group_log;                  // log2 of the distance of rows, and of groups of 8 columns
    int top;                                 // log2 of what the last steps are the upper part of
    int shuffles, skipped;                   // steps between lanes; of the last steps, those that are already done
    int pad[2];                              // log2 of what is followed by 4 and by 8 unused elements in shared memory
    int rows_apart, groups_apart, apart[5];  // there: of rows 8 apart, of groups, of the bits of the last steps
    int stage_log, stage_pad;                // before the rows: after 2^stage_log elements, 2^stage_pad unused ones
};

// Where element i of a chunk lies in shared memory: neighbouring threads reach different banks.
PTQ_BOTH int spread(const Split& s, int i) {
    return i + 4 * (i >> s.pad[0]) + 8 * (i >> s.pad[1]);
}
// Where it lies before the rows are transformed.
PTQ_BOTH int staged(const Split& s, int i) {
    return i + (i >> s.stage_log << s.stage_pad);
}

}  // namespace ptq::hadamard
