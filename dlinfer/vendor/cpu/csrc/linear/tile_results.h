// Sums of a product by tiles are rounded to bfloat16 and written, or what silu_and_mul makes of them.
#pragma once

#include "tiles/product.h"

#if defined(DLINFER_HAS_PANELS)

#include <algorithm>
#include <cstdint>

#include "common/narrow.h"
#include "common/sigmoid.h"
#include "common/transpose.h"

namespace dlinfer::tiles {

// Finishes blocks, an eighth of one at a time.
class BFloat16Finish {
 public:
  // Of the panels `begin` to `end`. bias: of all rows of the weight, or null. out: [rows of a chunk of x, features].
  BFloat16Finish(const Panels& panels, const BFloat16* bias, int64_t begin, int64_t end, Rows<BFloat16> out)
      : panels_(panels), out_(out), begin_(begin) {
    for (int64_t panel = begin; bias && panel < end; ++panel) {
      std::copy_n(bias + panels.first(panel), panels.rows(panel), biases_ + (panel - begin) * kPanel);
    }
  }

  Rows<Byte> memory(const Block& block) const {
    return {reinterpret_cast<Byte*>(at(block)), out_.stride * int64_t(sizeof(BFloat16)), block.count};
  }
  void begin(const Block& block) {
    block_ = block;
    to_ = at(block);
    bias_ = biases_ + (block.panel - begin_) * kPanel;
  }
  bool pending() const { return block_.count > 0; }
  void advance() {
    constexpr int kAtOnce = 4;
#pragma GCC unroll 4
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t r = 2 * (computed_ + i);
      words_[computed_ + i] = block_.gates ? gated(r) : plain(r);
    }
    computed_ += kAtOnce;
    if (computed_ == kTile) write_half();
  }

 private:
  BFloat16* at(const Block& block) const {
    return out_.data + block.first * out_.stride + panels_.feature(block.panel);
  }

  Floats own(int64_t r) const { return load_as<Floats>(block_.sums + r * kPanel) + bias_[r]; }
  Floats gate(int64_t r) const { return load_as<Floats>(block_.gates + r * kPanel) + bias_[r - kPanel]; }

  // A word for each row of x: features r and r + 1.
  Floats plain(int64_t r) const {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                                23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)own(r + 1), (__m512)own(r));
    return (Floats)_mm512_permutexvar_epi16(interleave, (__m512i)both);
  }

  // Each number is rounded where the product and the activation apart round it. The bits are theirs, except for sums
  // below 2**-126, which the product apart takes as 0.
  Floats gated(int64_t r) const {
    const auto value = [&](int64_t row) {
      const Floats given = rounded<BFloat16>(gate(row));
      return rounded<BFloat16>(rounded<BFloat16>(given * sigmoid(given)) * rounded<BFloat16>(own(row)));
    };
    return (Floats)((Words)value(r + 1) | (Words)value(r) >> 16);
  }

  // Writes the first 16 rows of x, and goes on to the others.
  void write_half() {
    Floats turned[kTile];
    std::copy_n(words_, kTile, turned);
    transpose(turned);
    const int64_t count = std::min<int64_t>(block_.count, kTile);
    const __mmask32 exist = ~__mmask32(0) >> (kPanel - block_.rows);
    if (block_.rows == kPanel && count == kTile) {
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) _mm512_storeu_ps(to_ + i * out_.stride, (__m512)turned[i]);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kTile; ++i) {
        if (i < count) _mm512_mask_storeu_epi16(to_ + i * out_.stride, exist, (__m512i)turned[i]);
      }
    }
    computed_ = 0;
    block_.sums += kTile;
    if (block_.gates) block_.gates += kTile;
    block_.count -= count;
    to_ += kTile * out_.stride;
  }

  const Panels& panels_;
  const Rows<BFloat16> out_;
  const int64_t begin_;
  alignas(64) float biases_[kGroup * kPanel]{};
  Block block_{};
  BFloat16* to_ = nullptr;
  const float* bias_ = nullptr;
  int computed_ = 0;  // of words_: word i of a row of x holds features 2i and 2i + 1
  Floats words_[kTile]{};
};

// A weight, and the product of all rows of x with it.
struct BFloat16Job {
  Panels panels;
  const BFloat16* bias;  // or null
  Rows<BFloat16> out;

  BFloat16Finish finish(int64_t begin, int64_t end, int64_t first) const {
    return {panels, bias, begin, end, {out.data + first * out.stride, out.stride, out.count - first}};
  }
};

}  // namespace dlinfer::tiles

#endif
