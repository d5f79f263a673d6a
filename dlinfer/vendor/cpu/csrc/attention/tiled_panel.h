// Panels whose products are done by the tiles of AMX, in bfloat16; their softmax is panel.h's.
//
// S^T = K Q^T takes keys as they are packed, in the left tile, and queries, whose neighbours stand in one word, in the
// right one. O^T = V^T P^T takes the weights as the softmax leaves them, and values turned: a row for each number, of
// words of two keys each. One left tile meets all rows of a panel, whose sums take up to four tiles:
// - tiles 0 .. 3: sums, of 16 keys, or numbers of values, and 16 rows each
// - tiles 4, 5: left and right, 16 words deep
// - tiles 6, 7: the same for the last words of a key, where they are no multiple of 16
//
// Keys are taken 32 at a time, as many as a tile of weights is deep, and zeros stand where a tile of the cache ends.
// Zeros add nothing to a sum, so a row has the same bits whatever rows stand beside it.
//
// Tiles do 16 to 32 times as many multiplications a cycle as the vector instructions, and this kernel runs in a chain.
// torch's kernel uses tiles too; the two were not compared.
#pragma once

#include "attention/panel.h"
#include "common/tile_registers.h"

#if defined(DLINFER_HAS_TILES)

namespace dlinfer::prefill {

constexpr int64_t kTileWords = kTileKeys / 2;  // of a number of the values, in a tile of the cache
static_assert(kTiledKeys == 2 * kTile && kVectors <= 4);

// Shapes for keys of so many words.
inline TileShapes shapes_for(int64_t words) {
  TileShapes shapes;
  const int64_t rest = words % kTile;
  shapes.bytes_of_a_row[6] = uint16_t(rest * sizeof(float)), shapes.rows[6] = rest ? kTile : 0;
  shapes.bytes_of_a_row[7] = rest ? 64 : 0, shapes.rows[7] = uint8_t(rest);
  return shapes;
}

template <int kRows>
struct TiledPanel : Panel<true, kRows, kTiledKeys, kTiledKeys> {
  using Base = Panel<true, kRows, kTiledKeys, kTiledKeys>;
  using Base::kWidth;

  // As Panel's.
  template <class Ahead>
  static void multiply_keys(const Shape& shape, const float* keys, const float* queries, int64_t words,
                            const Seen& seen, int64_t tile, Ahead& ahead, RowState& rows, float* scores) {
    std::fill_n(rows.tile_largest, kWidth, kNone);
    memory_is_read();
    for (int64_t key = seen.first(kTiledKeys); key < seen.end; key += kTiledKeys) {
      ahead.step();
      for (int64_t some = key; some < key + kTiledKeys; some += kTile) {
        zero_sums();
        add_products(keys + some * words, words, queries, words);
        store_sums(scores + some * kWidth);
      }
      Base::take_scores(shape, key, seen, tile, rows, scores);
    }
  }

  // As Panel's, but for values: [count, keys / 2] words, and count is a multiple of 16.
  template <class Ahead>
  static void multiply_values(const float* values, int64_t count, const float* weights, const Seen& seen,
                              const RowState& rows, Ahead& ahead, float* out) {
    const int64_t first = seen.first(kTiledKeys) / 2, words = (Base::end(seen) / 2) - first;
    for (int64_t at = 0; at < count; at += kTile) {
      ahead.step();
      float* const to = out + at * kWidth;
      for (int64_t i = 0; i < kTile; ++i) {
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          float* const lanes = to + i * kWidth + r * kLanes;
          store(lanes, load_as<Floats>(lanes) * load_as<Floats>(rows.rescale + r * kLanes));
        }
      }
      memory_is_read();
      load_sums(to);
      add_products(values + at * kTileWords + first, kTileWords, weights + first * kWidth, words);
      store_sums(to);
    }
  }

 private:
  static constexpr int64_t kBytes = kWidth * sizeof(float);

  // The compiler's names of tiles are digits, so that nothing here goes through them in a loop.
  static void zero_sums() {
    _tile_zero(0);
    if constexpr (kRows > 1) _tile_zero(1);
    if constexpr (kRows > 2) _tile_zero(2);
    if constexpr (kRows > 3) _tile_zero(3);
  }
  static void load_sums(const float* from) {
    _tile_loadd(0, from, kBytes);
    if constexpr (kRows > 1) _tile_loadd(1, from + kLanes, kBytes);
    if constexpr (kRows > 2) _tile_loadd(2, from + 2 * kLanes, kBytes);
    if constexpr (kRows > 3) _tile_loadd(3, from + 3 * kLanes, kBytes);
  }
  static void store_sums(float* to) {
    _tile_stored(0, to, kBytes);
    if constexpr (kRows > 1) _tile_stored(1, to + kLanes, kBytes);
    if constexpr (kRows > 2) _tile_stored(2, to + 2 * kLanes, kBytes);
    if constexpr (kRows > 3) _tile_stored(3, to + 3 * kLanes, kBytes);
  }

  // Sums of 16 rows of `left`, `stride` words apart, with `words` rows of `right`. Tiles are zeroed as
  // common/tile_registers.h explains.
  static void add_products(const float* left, int64_t stride, const float* right, int64_t words) {
    const int64_t bytes = stride * int64_t(sizeof(float));
    for (; words >= kTile; words -= kTile, left += kTile, right += kTile * kWidth) {
      _tile_loadd(4, left, bytes);
      _tile_loadd(5, right, kBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_zero(5);
      if constexpr (kRows > 1) {
        _tile_loadd(5, right + kLanes, kBytes);
        _tile_dpbf16ps(1, 4, 5);
        _tile_zero(5);
      }
      if constexpr (kRows > 2) {
        _tile_loadd(5, right + 2 * kLanes, kBytes);
        _tile_dpbf16ps(2, 4, 5);
        _tile_zero(5);
      }
      if constexpr (kRows > 3) {
        _tile_loadd(5, right + 3 * kLanes, kBytes);
        _tile_dpbf16ps(3, 4, 5);
        _tile_zero(5);
      }
      _tile_zero(4);
    }
    if (words == 0) return;
    _tile_loadd(6, left, bytes);
    _tile_loadd(7, right, kBytes);
    _tile_dpbf16ps(0, 6, 7);
    _tile_zero(7);
    if constexpr (kRows > 1) {
      _tile_loadd(7, right + kLanes, kBytes);
      _tile_dpbf16ps(1, 6, 7);
      _tile_zero(7);
    }
    if constexpr (kRows > 2) {
      _tile_loadd(7, right + 2 * kLanes, kBytes);
      _tile_dpbf16ps(2, 6, 7);
      _tile_zero(7);
    }
    if constexpr (kRows > 3) {
      _tile_loadd(7, right + 3 * kLanes, kBytes);
      _tile_dpbf16ps(3, 6, 7);
      _tile_zero(7);
    }
    _tile_zero(6);
  }
};

}  // namespace dlinfer::prefill

#endif
