// x @ w for a weight of 4 bits that AWQ packs: [in_features, out_features / 8] words of eight neighbours. They are
// widened in registers, or for many rows of x into the first-level cache; no float copy of the weight is made.
//
// A number is (q - zero) * scale, with a zero and a scale for each column and each group of rows. Summed is x * (q - 8);
// the rest, (8 - zero) * sum of x, and the scale follow once a strip. The work is cut four times:
// - piece: blocks of columns whose float32 sums stay in the second-level cache
// - strip: rows of the weight within a group, so few that a block of them stays in the first-level cache
// - block: the columns of a register of words; while one is computed, the next ones are prefetched
// - tile: some nibbles of a block times a few rows of x, summed in registers
//
// Each sum is taken in one order, whatever the tile: a row of x gives the same bits in any company.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/lanes.h"

namespace dlinfer::int4 {

constexpr int kNibbles = 8;
constexpr int kColumns = kLanes * kNibbles;  // of a block
constexpr int64_t kStripRows = 128;          // 8 KiB of a block with 16 lanes

// How many sums a tile keeps beside a few operands.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 24;  // of 32 registers
#else
constexpr int kSums = 12;  // of 16
#endif
constexpr int kMostRows = kSums / 2;

constexpr int tile_nibbles(int rows) { return 8 * rows <= kSums ? 8 : 4 * rows <= kSums ? 4 : 2; }

// Calls run(kFirst) with `first`, a multiple of kTileNibbles, as a constant.
template <int kTileNibbles, class Run>
inline void with_first(int first, const Run& run) {
  const auto at = [&](auto turn) { run(std::integral_constant<int, turn() * kTileNibbles>()); };
  [&]<int... kTurn>(std::integer_sequence<int, kTurn...>) {
    (void)((first == kTurn * kTileNibbles && (at(std::integral_constant<int, kTurn>()), true)) || ...);
  }(std::make_integer_sequence<int, kNibbles / kTileNibbles>());
}

// The meaning of four bits: q - 8, or a float of one sign, two bits of exponent and one of mantissa (E2M1).
enum class Numbers { kWhole, kE2M1 };

// Words of a block; `count` of them exist.
inline Words load_words(const uint32_t* from, int64_t count) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_loadu_epi32(count >= kLanes ? 0xffff : (1u << count) - 1, from);
#else
  return count >= kLanes ? load_as<Words>(from) : load_part<Words>(from, count);
#endif
}

// Rows of a block of the weight: `count` of its words exist, the next row begins `stride` words on.
struct Strip {
  const uint32_t* words;
  int64_t stride;
  int64_t count;
  int64_t depth;  // rows
};

// The lines to prefetch meanwhile, in runs. A tile of the first rows of x fetches a line for each row of its strip; all of
// those tiles together do so once. After the last run the same line is fetched again.
struct Next {
  static constexpr int64_t kAgain = int64_t(1) << 60;

  const uint32_t* line;
  int64_t step, jump;              // words from a line to the next of its run; from a run's end to the next run
  int64_t run, left_of_run, runs;  // lines; runs behind this one

  static Next nothing(const uint32_t* line) { return {line, 0, 0, 0, kAgain, 0}; }

  void fetch() {
    __builtin_prefetch(line, 0, 2);  // not the first level
    line += step;
    if (!--left_of_run) [[unlikely]] end_run();
  }
  int64_t left() const { return left_of_run > run ? 0 : runs * run + left_of_run; }

 private:
  void end_run() {
    line += jump;
    left_of_run = run;
    if (!runs--) *this = nothing(line - jump - step);
  }
};

// The place of a tile's sums: row m's go to kept[m * kept_stride + nibble], with sums_of_x[m * sums_stride]. If x was
// rounded, scales_of_x has the same stride.
struct Finish {
  const Floats *scales, *less;  // by nibble: the scales, and 8 - zero
  const float* sums_of_x;
  int64_t sums_stride;
  Floats* kept;
  int64_t kept_stride;
  const float* scales_of_x = nullptr;

  // fresh[i * kRows + m]: of nibble first + i.
  template <int kRows, int kTileNibbles>
  void add(const Floats* fresh, int first) const {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Floats sum_of_x = all_lanes(sums_of_x[m * sums_stride]);
      Floats* const to = kept + m * kept_stride + first;
#pragma GCC unroll 8
      for (int i = 0; i < kTileNibbles; ++i) {
        const Floats exact = multiply_add(fresh[i * kRows + m], less[first + i], sum_of_x);
        to[i] = multiply_add(to[i], scales[first + i], exact);
      }
    }
  }
};

}  // namespace dlinfer::int4
