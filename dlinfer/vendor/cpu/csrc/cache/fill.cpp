// dlinfer_cpu::fill_kv_cache: keys and values of new tokens copied to their slots of the paged cache, as they are.
//
// Roofline: every byte is read once and written once, so the time is that of the memory, or, of a decoding step, that
// of the call.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "chain/table.h"
#include "threads/team.h"

namespace dlinfer::cache {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below so many a thread is done before another one has begun.
constexpr int64_t kBytesPerThread = 128 << 10;

// Rows of tokens or slots: heads of neighbours or not. Strides in elements.
template <class Word>
struct Heads {
  Word* data;
  int64_t head_stride, stride;
};

template <class Word>
void copy(Heads<const Word> from, Heads<Word> to, int64_t heads, int64_t size) {
  const bool dense = size <= 1 || (from.stride == 1 && to.stride == 1);
  if (dense && from.head_stride == size && to.head_stride == size) {
    std::copy_n(from.data, heads * size, to.data);
    return;
  }
  for (int64_t h = 0; h < heads; ++h) {
    const Word* const source = from.data + h * from.head_stride;
    Word* const target = to.data + h * to.head_stride;
    if (dense) {
      std::copy_n(source, size, target);
    } else {
      for (int64_t i = 0; i < size; ++i) target[i * to.stride] = source[i * from.stride];
    }
  }
}

void check(const Tensor& from, const Tensor& cache, const Tensor& slots) {
  STD_TORCH_CHECK(from.dim() == 3 && cache.dim() == 4 && slots.dim() == 1,
                  "fill_kv_cache: keys are [tokens, heads, size], caches [blocks, block_size, heads, size]");
  STD_TORCH_CHECK(from.scalar_type() == cache.scalar_type(), "fill_kv_cache: a cache has the dtype of what it keeps");
  STD_TORCH_CHECK(from.size(0) == slots.size(0) && from.size(1) == cache.size(2) && from.size(2) == cache.size(3),
                  "fill_kv_cache: sizes of slots, keys or values, and caches differ");
}

// The slots as they are; raises where one lies behind the end of the cache.
std::vector<int64_t> read_slots(const Tensor& slots, int64_t count) {
  const auto read = [&]<class T>(const T* data) {
    std::vector<int64_t> found(slots.size(0));
    for (int64_t i = 0; i < slots.size(0); ++i) {
      found[i] = data[i * slots.stride(0)];
      STD_TORCH_CHECK(found[i] < count, "fill_kv_cache: slot ", found[i], " of a cache of ", count);
    }
    return found;
  };
  switch (slots.scalar_type()) {
    case ScalarType::Int:
      return read(static_cast<const int32_t*>(slots.const_data_ptr()));
    case ScalarType::Long:
      return read(static_cast<const int64_t*>(slots.const_data_ptr()));
    default:
      STD_TORCH_CHECK(false, "fill_kv_cache: slots are int32 or int64");
  }
}

template <class Word>
void fill(const Tensor& from, Tensor& cache, int64_t token, int64_t slot) {
  const int64_t block = slot / cache.size(1), offset = slot % cache.size(1);
  copy<Word>({static_cast<const Word*>(from.const_data_ptr()) + token * from.stride(0), from.stride(1), from.stride(2)},
             {static_cast<Word*>(cache.mutable_data_ptr()) + block * cache.stride(0) + offset * cache.stride(1),
              cache.stride(2), cache.stride(3)},
             cache.size(2), cache.size(3));
}

void fill_kv_cache(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots) {
  check(k, k_cache, slots);
  check(v, v_cache, slots);
  STD_TORCH_CHECK(k_cache.size(0) == v_cache.size(0) && k_cache.size(1) == v_cache.size(1) &&
                      k.scalar_type() == v.scalar_type(),
                  "fill_kv_cache: caches have as many slots, and one dtype");
  const std::vector<int64_t> to = read_slots(slots, k_cache.size(0) * k_cache.size(1));
  const int64_t item = k.element_size(), heads_k = k.size(1) * k.size(2), heads_v = v.size(1) * v.size(2);
  const int64_t grain = std::max<int64_t>(kBytesPerThread / std::max<int64_t>((heads_k + heads_v) * item, 1), 1);
  const auto fill_as = [&]<class Word>(Word) {
    parallel_for(0, int64_t(to.size()), grain, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        if (to[token] < 0) continue;  // padding
        fill<Word>(k, k_cache, token, to[token]);
        fill<Word>(v, v_cache, token, to[token]);
      }
    });
  };
  switch (item) {
    case 2:
      return fill_as(uint16_t());
    case 4:
      return fill_as(uint32_t());
    default:
      STD_TORCH_CHECK(false, "fill_kv_cache: no kernel for elements of ", item, " bytes");
  }
}

}  // namespace
}  // namespace dlinfer::cache

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "fill_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_start_indices) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "fill_kv_cache", TORCH_BOX(&dlinfer::cache::fill_kv_cache));
}
