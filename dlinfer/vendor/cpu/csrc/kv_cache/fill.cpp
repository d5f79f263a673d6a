// dlinfer_cpu::fill_kv_cache: new keys and values to their slots of the paged cache.
//
// A copy, so its time is that of reading and writing each byte once: a decode step's 512 bytes a layer and sequence
// (2 heads of 64 in bfloat16) are nothing, and what counts is that one call does it all; 512 tokens of a prefill are
// 256 KiB a layer, read from a cache of the processor, and take two threads about 15 us.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace dlinfer::kv_cache {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kBytesPerThread = 64 << 10;  // below so many a thread is done before another one has begun

int64_t slot_at(const Tensor& slots, int64_t token) {
  const int64_t at = token * slots.stride(0);
  return slots.scalar_type() == ScalarType::Int ? static_cast<const int32_t*>(slots.const_data_ptr())[at]
                                                : static_cast<const int64_t*>(slots.const_data_ptr())[at];
}

// What is written into one of both caches. T: a number as wide as its elements.
template <class T>
class Fill {
 public:
  Fill(const Tensor& rows, const Tensor& cache)
      : from_(static_cast<const T*>(rows.const_data_ptr())),
        to_(static_cast<T*>(cache.mutable_data_ptr())),
        heads_(rows.size(1)),
        size_(rows.size(2)),
        from_strides_{rows.stride(0), rows.stride(1), rows.stride(2)},
        to_strides_{cache.stride(0), cache.stride(1), cache.stride(2), cache.stride(3)},
        dense_(size_ <= 1 || (rows.stride(2) == 1 && cache.stride(3) == 1)) {}

  void copy(int64_t token, int64_t block, int64_t offset) const {
    for (int64_t h = 0; h < heads_; ++h) {
      const T* const from = from_ + token * from_strides_[0] + h * from_strides_[1];
      T* const to = to_ + block * to_strides_[0] + offset * to_strides_[1] + h * to_strides_[2];
      if (dense_) {
        std::memcpy(to, from, size_ * sizeof(T));
      } else {
        for (int64_t d = 0; d < size_; ++d) to[d * to_strides_[3]] = from[d * from_strides_[2]];
      }
    }
  }

  int64_t row_bytes() const { return heads_ * size_ * int64_t(sizeof(T)); }

 private:
  const T* from_;
  T* to_;
  int64_t heads_, size_;
  int64_t from_strides_[3], to_strides_[4];
  bool dense_;
};

template <class T>
void fill(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots) {
  const Fill<T> keys(k, k_cache), values(v, v_cache);
  const int64_t block_size = k_cache.size(1);
  const int64_t bytes = std::max<int64_t>(keys.row_bytes() + values.row_bytes(), 1);
  const int64_t grain = std::max<int64_t>(kBytesPerThread / bytes, 1);
  torch::stable::parallel_for(0, slots.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = slot_at(slots, token);
      if (slot < 0) continue;  // padding
      keys.copy(token, slot / block_size, slot % block_size);
      values.copy(token, slot / block_size, slot % block_size);
    }
  });
}

void check(const Tensor& rows, const Tensor& cache, const Tensor& slots) {
  STD_TORCH_CHECK(rows.dim() == 3 && cache.dim() == 4, "fill_kv_cache: keys have 3 dimensions, caches 4");
  STD_TORCH_CHECK(rows.size(0) == slots.size(0), "fill_kv_cache: a slot for each token");
  STD_TORCH_CHECK(rows.size(1) == cache.size(2) && rows.size(2) == cache.size(3),
                  "fill_kv_cache: the cache is for other heads");
  STD_TORCH_CHECK(rows.scalar_type() == cache.scalar_type(), "fill_kv_cache: one dtype");
}

// The highest slot where that lies behind the end of the cache, and nothing is written; else -1.
int64_t fill_kv_cache(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots) {
  STD_TORCH_CHECK(slots.dim() == 1, "fill_kv_cache: slots have one dimension");
  STD_TORCH_CHECK(slots.scalar_type() == ScalarType::Int || slots.scalar_type() == ScalarType::Long,
                  "fill_kv_cache: slots are int32 or int64");
  STD_TORCH_CHECK(k.scalar_type() == v.scalar_type(), "fill_kv_cache: one dtype");
  check(k, k_cache, slots);
  check(v, v_cache, slots);
  STD_TORCH_CHECK(k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1),
                  "fill_kv_cache: caches of as many slots");
  int64_t highest = -1;
  for (int64_t token = 0; token < slots.size(0); ++token) highest = std::max(highest, slot_at(slots, token));
  if (highest >= k_cache.size(0) * k_cache.size(1)) return highest;
  switch (k.scalar_type()) {
    case ScalarType::Float:
      fill<uint32_t>(k, v, k_cache, v_cache, slots);
      break;
    case ScalarType::BFloat16:
    case ScalarType::Half:
      fill<uint16_t>(k, v, k_cache, v_cache, slots);
      break;
    default:
      STD_TORCH_CHECK(false, "fill_kv_cache: no kernel for this dtype");
  }
  return -1;
}

}  // namespace
}  // namespace dlinfer::kv_cache

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("fill_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  library.impl("fill_kv_cache", TORCH_BOX(&dlinfer::kv_cache::fill_kv_cache));
}
