// Queries, keys and values as panel.h wants them, in words of float32 or of two neighbours in bfloat16; and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention/panel.h"
#include "common/store.h"
#include "common/tile_registers.h"
#include "common/transpose.h"
#include "common/widen.h"

namespace dlinfer::prefill {

// Whether products take two neighbours at once.
#if defined(__AVX512BF16__)
template <class T>
constexpr bool kPairs = std::is_same_v<T, BFloat16>;
#else
template <class T>
constexpr bool kPairs = false;
#endif

template <class T>
constexpr int64_t kWord = kPairs<T> ? 2 : 1;  // neighbours in a word

template <class T>
int64_t words_of(int64_t numbers) {
  return (numbers + kWord<T> - 1) / kWord<T>;
}

// kLanes words of a row of `numbers` numbers, from word `at` on; zeros where it ends.
template <class T>
inline Floats words_at(const T* row, int64_t at, int64_t numbers) {
  const int64_t left = numbers - at * kWord<T>;
  if constexpr (kPairs<T>) {
    return left >= 2 * kLanes ? load_as<Floats>(row + 2 * at) : load_part<Floats>(row + 2 * at, left);
  } else {
    return left >= kLanes ? widen(row + at) : widen_part(row + at, left);
  }
}

inline void store_part(float* to, Floats lanes, int64_t count) {
  count >= kLanes ? store(to, lanes) : void(std::memcpy(to, &lanes, count * sizeof(float)));
}

// [words, width] from rows[0 .. count), null for zeros; count is at most kLanes.
template <class T>
void pack_queries(const T* const* rows, int64_t numbers, int64_t width, float* to) {
  const int64_t words = words_of<T>(numbers);
  for (int64_t at = 0; at < words; at += kLanes) {
    Floats square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = rows[i] ? words_at(rows[i], at, numbers) : Floats{};
    transpose(square);
    const int64_t count = std::min<int64_t>(kLanes, words - at);
    for (int64_t i = 0; i < count; ++i) store(to + (at + i) * width, square[i]);
  }
}

// The words of a key.
template <class T>
void pack_key(const T* key, int64_t numbers, float* to) {
  const int64_t words = words_of<T>(numbers);
  for (int64_t at = 0; at < words; at += kLanes) store_part(to + at, words_at(key, at, numbers), words - at);
}

// Words [count] of a value, or of two neighbours; `second` may be null, and count is `numbers` or one more.
template <class T>
void pack_values(const T* first, [[maybe_unused]] const T* second, int64_t numbers, int64_t count, float* to) {
  const auto part = [numbers](const T* row, int64_t at) __attribute__((always_inline)) {
    if (!row) return Floats{};
    return numbers - at >= kLanes ? widen(row + at) : widen_part(row + at, std::max<int64_t>(numbers - at, 0));
  };
  for (int64_t at = 0; at < count; at += kLanes) {
    Floats words = part(first, at);
    if constexpr (kPairs<T>) words = (Floats)((Words)words >> 16 | (Words)part(second, at));  // as bfloat16 widens
    store_part(to + at, words, count - at);
  }
}

#if defined(DLINFER_HAS_TILES)

// Words of values as the left tile of a product: row i of `to`, `width` words apart, has number i of the 2 * kLanes keys
// at rows[0 ..), null for zeros. count: rows of `to`, a multiple of kLanes; numbers from `numbers` on are zeros.
inline void pack_turned_values(const BFloat16* const* rows, int64_t numbers, int64_t count, int64_t width, float* to) {
  for (int64_t at = 0; at < count; at += kLanes) {
    Floats square[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      pack_values(rows[2 * i] ? rows[2 * i] + at : nullptr, rows[2 * i + 1] ? rows[2 * i + 1] + at : nullptr,
                  numbers - at, kLanes, reinterpret_cast<float*>(square + i));
    }
    transpose(square);
    for (int i = 0; i < kLanes; ++i) store(to + (at + i) * width, square[i]);
  }
}

#endif

// The first `count` numbers of words.
template <class T>
inline void store_words(T* to, Floats words, int64_t count) {
  if constexpr (kPairs<T>) {
    count == 2 * kLanes ? std::memcpy(to, &words, sizeof words) : std::memcpy(to, &words, count * sizeof(T));
  } else {
    store_narrow(to, words, count);
  }
}

// The results of kLanes rows: sums / totals, or zeros where a total is; sums: [numbers, width]. Null rows are left out.
template <class T>
void unpack(const float* sums, Floats totals, int64_t numbers, int64_t width, T* const* rows) {
  // A total too small for a reciprocal is that of a sink, in a row that sees nothing: its sums are zeros.
  const Floats nothing{}, factors = all_lanes(1.0f) / larger(all_lanes(std::numeric_limits<float>::min()), totals);
  const auto quotients = [&](int64_t number) __attribute__((always_inline)) {
    const Floats found = load_as<Floats>(sums + std::min(number, numbers - 1) * width) * factors;
    return totals == nothing ? nothing : found;
  };
  constexpr int64_t kAtOnce = kLanes * kWord<T>;
  for (int64_t at = 0; at < numbers; at += kAtOnce) {
    Floats square[kLanes];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t number = at + i * kWord<T>;
#if defined(__AVX512BF16__)
      if constexpr (kPairs<T>) {
        square[i] = paired(quotients(number), quotients(number + 1));
        continue;
      }
#endif
      square[i] = quotients(number);
    }
    transpose(square);
    const int64_t count = std::min(kAtOnce, numbers - at);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (rows[i]) store_words(rows[i] + at, square[i], count);
    }
  }
}

}  // namespace dlinfer::prefill
