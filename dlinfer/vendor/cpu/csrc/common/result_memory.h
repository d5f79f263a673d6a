// Memory for large results, which is reused after its tensor is freed.
//
// The C library gives large blocks back to the system as soon as they are free, and the system hands out pages anew:
// zeroed, one fault each. For a prefill of 512 tokens on a model of half a billion parameters that was 60,000 faults,
// a fifth of its time. Here a free block stays, up to a bound, and the next result of about its size gets it.
#pragma once

#include <sys/mman.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <deque>
#include <iterator>
#include <mutex>
#include <new>
#include <vector>

#include "common/torch_call.h"

namespace dlinfer {

constexpr int64_t kLeastPooled = 128 << 10;  // bytes: below this the C library keeps what is free
constexpr int64_t kMostIdle = 128 << 20;     // bytes: the least recently used blocks beyond it are freed
constexpr int64_t kHugePage = 2 << 20;       // bytes: blocks of several pages are multiples of this

class ResultMemory {
 public:
  // The pool of this process. It outlives every tensor, so nothing ends it.
  static ResultMemory& get() {
    static auto* const memory = new ResultMemory;
    return *memory;
  }

  struct Block {
    void* data;
    int64_t size;  // bytes, at least as many as were asked for
  };

  Block take(int64_t bytes) {
    // Never waits for the lock: in a fork's child it might be held for ever.
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) {
      // The newest first: it is the likeliest to be in a cache.
      for (auto block = idle_.rbegin(); block != idle_.rend(); ++block) {
        if (block->size < bytes || block->size > 2 * bytes) continue;
        const Block found = *block;
        idle_.erase(std::next(block).base());
        idle_bytes_ -= found.size;
        return found;
      }
    }
    const int64_t unit = bytes >= 2 * kHugePage ? kHugePage : 64 << 10;
    return map((bytes + unit - 1) / unit * unit);
  }

  void give_back(Block block) {
    if (block.size > kMostIdle) return unmap(block);
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock) {
      idle_.push_back(block);
      idle_bytes_ += block.size;
      for (; idle_bytes_ > kMostIdle; idle_.pop_front()) {
        idle_bytes_ -= idle_.front().size;
        unmap(idle_.front());
      }
      return;
    }
    unmap(block);
  }

  static Block map(int64_t size) {
    void* const data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (size >= 2 * kHugePage) madvise(data, size, MADV_HUGEPAGE);  // a wish
#endif
    return {data, size};
  }

  static void unmap(Block block) { munmap(block.data, block.size); }

 private:
  std::mutex mutex_;
  std::deque<Block> idle_;  // the oldest first
  int64_t idle_bytes_ = 0;
};

// Uninitialised memory of the pool, for the lifetime of this object.
class PooledMemory {
 public:
  explicit PooledMemory(int64_t bytes) : block_(ResultMemory::get().take(bytes)) {}
  ~PooledMemory() { ResultMemory::get().give_back(block_); }
  PooledMemory(const PooledMemory&) = delete;
  PooledMemory& operator=(const PooledMemory&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(block_.data);
  }

 private:
  const ResultMemory::Block block_;
};

// Whether results of kernels that this thread calls go to the caller of a graph. They are in torch's own memory, since
// the caller may resize them and torch cannot resize the pool's memory.
inline thread_local bool results_escape = false;
inline void set_results_escape(bool on) { results_escape = on; }

// An uninitialised tensor, in the pool's memory if it is large. item_bytes: the dtype's, which torch's stable ABI
// does not tell.
inline torch::stable::Tensor empty_strided(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                           torch::headeronly::ScalarType dtype, int64_t item_bytes) {
  int64_t elements = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    elements = sizes[d] == 0 || elements == 0 ? 0 : elements + (sizes[d] - 1) * strides[d];
  }
  if (const int64_t bytes = elements * item_bytes; bytes >= kLeastPooled && !results_escape) {
    const ResultMemory::Block block = ResultMemory::get().take(bytes);
    const auto give_back = [block](void*) { ResultMemory::get().give_back(block); };
    return torch::stable::from_blob(block.data, sizes, strides, torch::headeronly::DeviceType::CPU, dtype, give_back);
  }
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made;
  check(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), code, aoti_torch_device_type_cpu(), 0,
                                 &made));
  return torch::stable::Tensor(made);
}

// The same, with contiguous strides.
inline torch::stable::Tensor empty_packed(const std::vector<int64_t>& sizes, torch::headeronly::ScalarType dtype,
                                          int64_t item_bytes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * (sizes[d] ? sizes[d] : 1);
  return empty_strided(sizes, strides, dtype, item_bytes);
}

inline torch::stable::Tensor empty_packed_like(const torch::stable::Tensor& x) {
  const auto shape = x.sizes();
  return empty_packed({shape.begin(), shape.end()}, x.scalar_type(), x.element_size());
}

// A long-lived uint8 tensor [bytes], such as a weight: its memory is not from the pool, and ends where the bytes end.
// Then the system puts the next one beside it, and a huge page may hold parts of both.
inline torch::stable::Tensor empty_lasting(int64_t bytes) {
  using namespace torch::headeronly;
  if (bytes < kLeastPooled) return empty_packed({bytes}, ScalarType::Byte, 1);
  const ResultMemory::Block block = ResultMemory::map(bytes);
  const auto give_back = [block](void*) { ResultMemory::unmap(block); };
  const std::vector<int64_t> sizes{bytes}, strides{1};
  return torch::stable::from_blob(block.data, sizes, strides, DeviceType::CPU, ScalarType::Byte, give_back);
}

}  // namespace dlinfer
