// A kernel that touches memory when it may, and when it may not: what the emulation itself reports.
#include "guarded.h"

namespace {

using namespace ptq::cuda;
using ptq::test::Buffer;

enum Fault { none, reads_early, writes_early, copies_early, never_waits, reads_behind };

struct Task {
    const float *weight, *x;
    float* out;
    int fault;
};

PTQ_KERNEL(32, 1) void kernel(Task p) {
    float* mine = reinterpret_cast<float*>(shared()) + 4 * lane();
    const float w = p.weight[lane()];
    float x = p.fault == reads_early ? p.x[lane()] : 0;
    if (p.fault == writes_early) p.out[lane()] = w;
    if (p.fault == copies_early) copy_async<4>(mine, p.x + lane());
    if (p.fault == never_waits) return;
    follow_previous();
    copy_commit();
    copy_wait<0>();
    x += p.x[lane() + (p.fault == reads_behind ? 4 : 0)];
    p.out[lane()] = w * x;
}

}  // namespace

// Null, or what was reported.
extern "C" const char* test_emulation(int fault, int backwards) {
    machine.backwards = backwards;
    const float numbers[32] = {};
    Buffer weight(numbers, sizeof numbers), x(numbers, sizeof numbers), out(nullptr, sizeof numbers);
    weight.is_weight();
    const Task p{static_cast<const float*>(weight.data()), static_cast<const float*>(x.data()),
                 static_cast<float*>(out.data()), fault};
    return launch<kernel>({1, 1, 1}, 32, 512, nullptr, p);
}
