// GGUF's types by their numbers, and rows of their blocks unpacked into a dtype.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "gguf/bfloat16.h"
#include "gguf/blocks.h"

namespace dlinfer::gguf {

// As narrow, but any NaN stays one: files hold those whose bits narrow does not expect.
template <class T>
inline void put(T* to, Floats values) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    values = values == values ? values : all_lanes(std::numeric_limits<float>::quiet_NaN());
  }
  narrow(to, values);
}

// Unpacks `count` numbers of a row from number `first` on into T, rounded. Whole blocks, unless they hold one number.
template <class T>
using Unpack = void (*)(const uint8_t* row, int64_t first, int64_t count, T* to);

template <class Block, class T>
void unpack_blocks(const uint8_t* row, int64_t first, int64_t count, T* to) {
  const uint8_t* from = row + first / Block::kNumbers * Block::kBytes;
  for (int64_t at = 0; at < count; at += Block::kNumbers, from += Block::kBytes) {
#if defined(DLINFER_HAS_PICKED_BLOCKS)
    if constexpr (std::is_same_v<T, BFloat16>) {
      Picked<Block>::unpack(from, to + at);
      continue;
    }
#endif
    Block::unpack(from, [&](int64_t i, Floats values) __attribute__((always_inline)) { put(to + at + i, values); });
  }
}

template <class Number, class T>
void unpack_numbers(const uint8_t* row, int64_t first, int64_t count, T* to) {
  const uint8_t* const from = row + first * sizeof(Number);
  if constexpr (std::is_same_v<Number, T>) {
    std::memcpy(to, from, count * sizeof(T));
    return;
  }
  Number some[kLanes];  // which may lie at any address in a file
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    std::memcpy(some, from + at * sizeof(Number), sizeof some);
    put(to + at, widen(some));
  }
  if (at < count) {
    std::memcpy(some, from + at * sizeof(Number), (count - at) * sizeof(Number));
    T rest[kLanes];
    put(rest, widen_part(some, count - at));
    std::memcpy(to + at, rest, (count - at) * sizeof(T));
  }
}

template <class T>
struct Format {
  int64_t numbers, bytes;  // of a block
  Unpack<T> unpack;
};

template <class T, class Block>
constexpr Format<T> of_blocks() {
  return {Block::kNumbers, Block::kBytes, unpack_blocks<Block, T>};
}

// By GGUF's number of a type; without `unpack` if the type is not known.
template <class T>
Format<T> format(int64_t type) {
  switch (type) {
    case 0:
      return {1, 4, unpack_numbers<float, T>};
    case 1:
      return {1, 2, unpack_numbers<Half, T>};
    case 2:
      return of_blocks<T, Q4_0>();
    case 3:
      return of_blocks<T, Q4_1>();
    case 6:
      return of_blocks<T, Q5_0>();
    case 7:
      return of_blocks<T, Q5_1>();
    case 8:
      return of_blocks<T, Q8_0>();
    case 12:
      return of_blocks<T, Q4_K>();
    case 13:
      return of_blocks<T, Q5_K>();
    case 14:
      return of_blocks<T, Q6_K>();
    case 30:
      return {1, 2, unpack_numbers<BFloat16, T>};
    default:
      return {1, 1, nullptr};
  }
}

}  // namespace dlinfer::gguf
