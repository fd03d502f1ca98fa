// Device memory of the host tests: filled with NaNs, an untouchable page behind it, marks in front of it; and closed to
// a block of threads until the first of them has waited for earlier kernels (follow_previous).
#pragma once

#include <cstring>

#include "cuda/device.h"

namespace ptq::test {

class Buffer {
  public:
    // `offset` bytes lie between the 16-aligned start of the memory and the data; the rest of it is unused.
    Buffer(const void* from, int64_t bytes, int offset = 0) : bytes_(bytes) {
        const int64_t whole = (bytes + offset + 15) / 16 * 16 + 16;
        memory_ = cuda::guarded(static_cast<size_t>(whole));
        std::memset(memory_.data, 0xff, static_cast<size_t>(whole));
        data_ = memory_.data + 16 + offset;
        if (from) std::memcpy(data_, from, static_cast<size_t>(bytes));
        cuda::machine.written.push_back(memory_);
    }
    Buffer(Buffer&& other) noexcept : memory_(other.memory_), data_(other.data_), bytes_(other.bytes_) {
        other.memory_ = {};
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() {
        if (!memory_.pages) return;
        is_weight();
        cuda::release(memory_);
    }
    // No kernel writes it: it may be read before earlier ones are waited for.
    void is_weight() {
        std::erase_if(cuda::machine.written, [&](const cuda::Guarded& g) { return g.pages == memory_.pages; });
    }
    void* data() const { return data_; }
    void give(void* to) const { std::memcpy(to, data_, static_cast<size_t>(bytes_)); }
    bool damaged() const {
        for (const uint8_t* b = memory_.data; b < data_; b++)
            if (*b != 0xff) return true;
        for (const uint8_t* b = data_ + bytes_; b < memory_.data + (data_ - memory_.data + bytes_ + 15) / 16 * 16; b++)
            if (*b != 0xff) return true;
        return false;
    }

  private:
    cuda::Guarded memory_;
    uint8_t* data_;
    int64_t bytes_;
};

}  // namespace ptq::test
