// The machine behind device_host.h: fibers, blocks, guarded memory, launch.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace ptq::cuda {

using Stream = void*;

// --- fibers ----------------------------------------------------------------------------------------------------------

struct Copy {
    void* to;
    const void* from;
    int bytes;
};
struct BulkCopy {  // of wgmma_host.h
    void* to;
    const void* from;
    int bytes;
    void* barrier;
};

struct Fiber {
    std::vector<std::byte> stack;
    ucontext_t context;
    jmp_buf point;
    bool started, done, waiting, follows;   // the last: it has waited for earlier kernels
    const void* awaits;                     // a barrier of wgmma_host.h, or null
    std::vector<std::vector<Copy>> copies;  // groups; the last one is not committed yet
};

// An asynchronous product of a warp (wgmma_host.h).
struct Product {
    void* c[32];
    const uint32_t* a[32];
    uint64_t tokens;
    bool adds;
    void (*compute)(const Product&);
};

// What lanes give to and get from an exchange in their warp.
struct Exchange {
    int arrived;
    int kind;  // which instruction: all lanes must be at the same one
    uint32_t in[32][10], out[32][4];
    std::vector<std::vector<Product>> products;  // groups; the last one is not committed yet
};

// --- memory ----------------------------------------------------------------------------------------------------------

// Memory whose last byte (rounded up to 16) lies right before a page that must not be touched.
struct Guarded {
    void* pages = nullptr;
    size_t size = 0;
    uint8_t* data = nullptr;
    void allow(int access) const {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        if (size > 2 * page) mprotect(static_cast<uint8_t*>(pages) + page, size - 2 * page, access);
    }
};
inline Guarded guarded(size_t bytes) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), used = (bytes + page - 1) / page * page;
    Guarded g;
    g.size = used + 2 * page;
    g.pages = mmap(nullptr, g.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    g.allow(PROT_READ | PROT_WRITE);
    g.data = static_cast<uint8_t*>(g.pages) + page + used - (bytes + 15) / 16 * 16;
    return g;
}
inline void release(const Guarded& g) {
    munmap(g.pages, g.size);
}

// --- the machine -----------------------------------------------------------------------------------------------------

constexpr int hopper_shared = 227 * 1024;  // of 9.0

struct Machine {
    bool backwards = false;  // see above
    bool idle = false;       // `launch` checks what it is asked, and runs nothing
    size_t most_shared = least_shared;
    std::vector<Fiber> fibers;
    std::vector<Exchange> warps;
    std::vector<BulkCopy> bulk;    // on their way
    std::vector<Guarded> written;  // what earlier kernels may write
    bool open = true;              // it: once a thread of the block has waited for them
    int threads = 0, current = 0, at_barrier = 0;
    unsigned block[3] = {};
    uint8_t* shared = nullptr;
    ucontext_t home_context;
    jmp_buf home;
    sigjmp_buf fault;
    void (*body)(const void*) = nullptr;
    const void* parameters = nullptr;
    char error[200] = {};
};
inline Machine machine;

[[noreturn]] inline void fail(const char* what) {
    Machine& m = machine;
    std::snprintf(m.error, sizeof m.error, "%s (block %u %u %u, thread %d)", what, m.block[0], m.block[1], m.block[2],
                  m.current);
    siglongjmp(m.fault, 1);
}
inline void set_open(bool open) {
    if (machine.open == open) return;
    machine.open = open;
    for (const Guarded& g : machine.written) g.allow(open ? PROT_READ | PROT_WRITE : PROT_NONE);
}
inline void on_fault(int, siginfo_t*, void*) {
    fail(machine.open ? "access beyond the end of a buffer"
                      : "access beyond the end of a buffer, or ahead of follow_previous to what is no weight");
}

inline void fiber_main() {
    machine.body(machine.parameters);
    machine.fibers[machine.current].done = true;
    _longjmp(machine.home, 1);
}
inline void pause() {  // until another fiber clears `waiting`
    Fiber& f = machine.fibers[machine.current];
    f.waiting = true;
    if (!_setjmp(f.point)) _longjmp(machine.home, 1);
}
inline void resume(int t) {
    Fiber& f = machine.fibers[t];
    machine.current = t;
    if (_setjmp(machine.home)) return;
    if (f.started) _longjmp(f.point, 1);
    f.started = true;
    swapcontext(&machine.home_context, &f.context);
}

inline void run_block() {
    Machine& m = machine;
    m.at_barrier = 0;
    set_open(false);
    m.bulk.clear();
    for (Exchange& e : m.warps) e.arrived = 0, e.products.assign(1, {});
    for (Fiber& f : m.fibers) {
        f.started = f.done = f.waiting = f.follows = false;
        f.awaits = nullptr;
        f.copies.assign(1, {});
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, fiber_main, 0);
    }
    for (int left = m.threads; left > 0;) {
        bool moved = false;
        for (int i = 0; i < m.threads; i++) {
            const int t = m.backwards ? m.threads - 1 - i : i;
            if (m.fibers[t].done || m.fibers[t].waiting) continue;
            resume(t);
            moved = true;
            left -= m.fibers[t].done;
        }
        if (!moved) fail("some threads wait at a barrier, shuffle or mma that others do not reach");
    }
    for (const Fiber& f : m.fibers)
        if (!f.follows) fail("a thread has not waited for the kernels before this one (follow_previous)");
    if (!m.bulk.empty()) fail("a block ends before its bulk copies");
    for (const Exchange& e : m.warps)
        if (e.products.size() > 1 || !e.products[0].empty()) fail("a warp ends before its products");
}

// --- launch ----------------------------------------------------------------------------------------------------------

template <auto kernel, class Parameters>
const char* launch(Grid grid, int threads, size_t shared_bytes, Stream, const Parameters& parameters) {
    constexpr size_t stack_bytes = 1 << 16;
    Machine& m = machine;
    if (threads % 32 || threads < 32 || threads > 1024) return "a block must be 1 to 32 whole warps";
    if (shared_bytes > m.most_shared) return "too much shared memory";
    if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        return "a grid must be 1 to 2^31 - 1 by 65535 by 65535";
    if (m.idle) return nullptr;
    m.threads = threads;
    m.fibers.resize(threads);
    m.warps.assign(threads / 32, {});
    for (Fiber& f : m.fibers) f.stack.resize(stack_bytes);
    m.parameters = &parameters;
    m.body = [](const void* p) { kernel(*static_cast<const Parameters*>(p)); };
    m.error[0] = 0;
    const Guarded memory = guarded(shared_bytes);
    m.shared = memory.data;
    struct sigaction action = {}, before_segv, before_bus;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
    if (!sigsetjmp(m.fault, 1)) {
        const int64_t count = int64_t{grid.x} * grid.y * grid.z;
        for (int64_t i = 0; i < count; i++) {
            const int64_t b = m.backwards ? count - 1 - i : i;
            m.block[0] = static_cast<unsigned>(b % grid.x);
            m.block[1] = static_cast<unsigned>(b / grid.x % grid.y);
            m.block[2] = static_cast<unsigned>(b / grid.x / grid.y);
            std::memset(memory.data, 0xff, shared_bytes);
            run_block();
        }
    }
    set_open(true);
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
    release(memory);
    return m.error[0] ? m.error : nullptr;
}

}  // namespace ptq::cuda
