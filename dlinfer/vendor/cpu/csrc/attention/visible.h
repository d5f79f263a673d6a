// Which keys each query sees, read off a mask: a range, as causal masks, windows, padding and packed sequences have it.
//
// Roofline: a row of the mask is read twice, the second time from the first-level cache. Attention of 512 queries over
// 1024 keys in bfloat16, 14 heads of 64, takes 0.75 ms on a Zen 5 with such a mask of 1 MiB, and within the noise of a
// tenth as long with is_causal.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/arguments.h"
#include "attention/panel.h"
#include "threads/team.h"

namespace dlinfer::attention {

using prefill::Keys;

constexpr int64_t kMaskBytesPerThread = 64 << 10;  // below so many a thread is done before another one has begun

// A mask's numbers, as their bits: 0 where a key is visible, and what surely hides it beside a visible one. Models write
// either minus infinity or the dtype's lowest number there; after -1e30 no score that is a number brings a key back.
template <class Bits, Bits kSign, Bits kLeastHidden, Bits kMostHidden>
struct Additive {
  using Number = Bits;
  static bool visible(Bits bits) { return (bits & Bits(~kSign)) == 0; }
  static bool hidden(Bits bits) { return Bits(bits - kLeastHidden) <= Bits(kMostHidden - kLeastHidden); }
  // Alone in a row, minus infinity hides; numbers add up with the scores.
  static bool infinite(Bits bits) { return bits == kMostHidden; }
};
using AdditiveFloat = Additive<uint32_t, 0x80000000u, 0xf149f2cau, 0xff800000u>;
using AdditiveBFloat16 = Additive<uint16_t, 0x8000, 0xf14a, 0xff80>;
using AdditiveHalf = Additive<uint16_t, 0x8000, 0xfbff, 0xfc00>;  // from -65504 on

struct Bools {
  using Number = uint8_t;
  static bool visible(uint8_t bits) { return bits != 0; }
  static bool hidden(uint8_t bits) { return bits == 0; }
  static bool infinite(uint8_t bits) { return bits == 0; }
};

// The range of a row, empty if minus infinity hides all. nullopt if the visible keys are no range, or if other numbers
// are added to scores.
template <class Mask>
std::optional<Keys> range_of(const typename Mask::Number* row, int64_t count) {
  int64_t visible = 0, hidden = 0;
  for (int64_t i = 0; i < count; ++i) {
    visible += Mask::visible(row[i]);
    hidden += Mask::hidden(row[i]);
  }
  if (visible + hidden != count) return std::nullopt;
  if (visible == 0) {
    const bool nothing = std::all_of(row, row + count, Mask::infinite);
    return nothing ? std::optional(Keys{0, 0}) : std::nullopt;
  }
  int64_t begin = 0, inside = 0;
  while (!Mask::visible(row[begin])) ++begin;
  const int64_t end = begin + visible;
  if (end > count) return std::nullopt;
  for (int64_t i = begin; i < end; ++i) inside += Mask::visible(row[i]);
  return inside == visible ? std::optional(Keys{int32_t(begin), int32_t(end)}) : std::nullopt;
}

// The visible range of each row of a mask [batch or 1, 1, queries or 1, keys] (the first dimensions may be left out):
// [batch or 1, queries or 1]. Empty if a row has no such range, or its numbers are no neighbours in memory.
class Visible {
 public:
  static std::optional<Visible> of(const Tensor& mask) {
    const int64_t rank = mask.dim(), keys = rank > 0 ? mask.size(rank - 1) : 0;
    if (rank < 2 || rank > 4 || (rank > 2 && mask.size(rank - 3) != 1)) return std::nullopt;
    if (keys > 1 && mask.stride(rank - 1) != 1) return std::nullopt;
    Visible found;
    found.batch_ = rank == 4 ? mask.size(0) : 1, found.queries_ = mask.size(rank - 2);
    const int64_t of_batch = rank == 4 ? mask.stride(0) : 0, of_query = mask.stride(rank - 2);
    switch (mask.scalar_type()) {
      case ScalarType::Bool:
        return found.read<Bools>(mask, of_batch, of_query, keys);
      case ScalarType::Float:
        return found.read<AdditiveFloat>(mask, of_batch, of_query, keys);
      case ScalarType::BFloat16:
        return found.read<AdditiveBFloat16>(mask, of_batch, of_query, keys);
      case ScalarType::Half:
        return found.read<AdditiveHalf>(mask, of_batch, of_query, keys);
      default:
        return std::nullopt;
    }
  }

  int64_t batch() const { return batch_; }
  int64_t queries() const { return queries_; }
  Keys operator()(int64_t sequence, int64_t query) const {
    return ranges_[(batch_ == 1 ? 0 : sequence) * queries_ + (queries_ == 1 ? 0 : query)];
  }

 private:
  template <class Mask>
  std::optional<Visible> read(const Tensor& mask, int64_t of_batch, int64_t of_query, int64_t keys) {
    using Number = typename Mask::Number;
    const Number* const data = static_cast<const Number*>(mask.const_data_ptr());
    const int64_t bytes = std::max<int64_t>(keys * int64_t(sizeof(Number)), 1);
    ranges_.resize(batch_ * queries_);
    std::atomic<bool> all{true};
    parallel_for(0, int64_t(ranges_.size()), std::max<int64_t>(kMaskBytesPerThread / bytes, 1), [&](int64_t i, int64_t end) {
      for (; i < end && all.load(std::memory_order_relaxed); ++i) {
        const auto range = range_of<Mask>(data + i / queries_ * of_batch + i % queries_ * of_query, keys);
        range ? void(ranges_[i] = *range) : all.store(false, std::memory_order_relaxed);
      }
    });
    return all.load() ? std::optional(std::move(*this)) : std::nullopt;
  }

  int64_t batch_ = 1, queries_ = 1;
  std::vector<Keys> ranges_;
};

}  // namespace dlinfer::attention
