// AMX tiles of bfloat16 and int8 in software, with all of avx512_bf16.h: the level amx_model of DLINFER_CPU_ISA.
//
// Tiles are a thread's, as the registers are. An exception of the processor (#GP, #UD) here ends the process with
// a line that says why. Not modelled is a start_row other than zero, which only an interrupted load leaves behind.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "avx512_bf16.h"

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud

namespace dlinfer {
namespace model {

constexpr int kTileCount = 8, kMostTileRows = 16, kMostTileBytes = 64;

struct TileConfiguration {  // as memory has it
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_of_a_row[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfiguration) == 64);

struct TileFile {
  TileConfiguration shapes{};
  alignas(64) uint8_t of[kTileCount][kMostTileRows][kMostTileBytes];
};

inline TileFile& tile_file() {
  static thread_local TileFile file;
  return file;
}

inline void check_tiles(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "dlinfer: a modelled tile instruction faults: %s\n", what);
  std::abort();
}

// A tile of the configuration in force, whose rows beyond its own are zeros, and so are bytes beyond a row's.
struct Tile {
  explicit Tile(int which) : which(which) {
    check_tiles(tile_file().shapes.palette == 1, "no configuration is loaded");
    check_tiles(which >= 0 && which < kTileCount, "there is no such tile");
    rows = tile_file().shapes.rows[which], bytes = tile_file().shapes.bytes_of_a_row[which];
    check_tiles(rows > 0 && bytes > 0, "the tile is not configured");
  }
  uint8_t* row(int i) const { return tile_file().of[which][i]; }
  void clear() const { std::memset(tile_file().of[which], 0, sizeof tile_file().of[which]); }
  int which, rows, bytes;
};

// out[m, n] += left[m, :] . right[:, n], where words of four bytes are multiplied: `left` has them row by row, and
// `right` has in row k word k of each column.
struct Product {
  Product(int to, int a, int b) : out(to), left(a), right(b) {
    check_tiles(to != a && to != b && a != b, "an instruction takes three different tiles");
    check_tiles(out.bytes % 4 == 0 && left.bytes % 4 == 0 && right.bytes % 4 == 0, "a row is no whole number of words");
    check_tiles(out.rows == left.rows && out.bytes == right.bytes && left.bytes / 4 == right.rows,
                "the tiles' shapes do not fit each other");
  }
  Tile out, left, right;
};

template <class Left, class Right>
inline void add_bytes(int to, int a, int b) {
  const Product of(to, a, b);
  for (int m = 0; m < of.out.rows; ++m) {
    auto* const sums = reinterpret_cast<uint32_t*>(of.out.row(m));
    for (int k = 0; k < of.left.bytes / 4; ++k) {
      const auto* const left = reinterpret_cast<const Left*>(of.left.row(m)) + 4 * k;
      const auto* const right = reinterpret_cast<const Right*>(of.right.row(k));
      for (int n = 0; n < of.out.bytes / 4; ++n) {
        for (int i = 0; i < 4; ++i) sums[n] += uint32_t(int32_t(left[i]) * int32_t(right[4 * n + i]));
      }
    }
  }
}

}  // namespace model

inline void _tile_release() {
  model::tile_file().shapes = {};
  std::memset(model::tile_file().of, 0, sizeof model::tile_file().of);
}

inline void _tile_loadconfig(const void* from) {
  model::TileConfiguration shapes;
  std::memcpy(&shapes, from, sizeof shapes);
  _tile_release();
  if (shapes.palette == 0) return;
  model::check_tiles(shapes.palette == 1 && shapes.start_row == 0, "palette 1 from row 0 on is what there is");
  for (const uint8_t byte : shapes.reserved) model::check_tiles(byte == 0, "reserved bytes are zero");
  for (int i = 0; i < 16; ++i) {
    const int bytes = shapes.bytes_of_a_row[i], rows = shapes.rows[i];
    const bool fits = bytes <= model::kMostTileBytes && rows <= model::kMostTileRows;
    model::check_tiles(i < model::kTileCount ? fits && (bytes == 0) == (rows == 0) : bytes == 0 && rows == 0,
                       "a tile has at most 16 rows of 64 bytes, and there are 8 tiles");
  }
  model::tile_file().shapes = shapes;
}

inline void _tile_zero(int tile) { model::Tile(tile).clear(); }

inline void _tile_loadd(int tile, const void* from, size_t stride) {
  const model::Tile to(tile);
  to.clear();
  for (int r = 0; r < to.rows; ++r) std::memcpy(to.row(r), static_cast<const char*>(from) + r * stride, to.bytes);
}
inline void _tile_stream_loadd(int tile, const void* from, size_t stride) { _tile_loadd(tile, from, stride); }

inline void _tile_stored(int tile, void* to, size_t stride) {
  const model::Tile from(tile);
  for (int r = 0; r < from.rows; ++r) std::memcpy(static_cast<char*>(to) + r * stride, from.row(r), from.bytes);
}

// Products of the lower numbers of words and of the upper are summed apart, from zero on, each with one rounding. Then
// both sums are added, and the result is added to the tile.
__attribute__((noinline)) inline void _tile_dpbf16ps(int to, int a, int b) {
  const model::Product of(to, a, b);
  const int words = of.left.bytes / 4;
  const model::FlushedArithmetic flushed;
  for (int m = 0; m < of.out.rows; ++m) {
    for (int half = 0; half < 2; ++half) {  // columns beyond the tile's are zeros
      __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
      for (int k = 0; k < words; ++k) {
        int32_t word;
        std::memcpy(&word, of.left.row(m) + 4 * k, sizeof word);
        const __m256i left = _mm256_set1_epi32(word);
        const __m256i right = _mm256_load_si256(reinterpret_cast<const __m256i*>(of.right.row(k)) + half);
        even = model::fused(even, model::lower(left), model::lower(right));
        odd = model::fused(odd, model::upper(left), model::upper(right));
      }
      float* const sums = reinterpret_cast<float*>(of.out.row(m)) + 8 * half;
      _mm256_store_ps(sums, model::added(_mm256_load_ps(sums), model::added(even, odd)));
    }
    std::memset(of.out.row(m) + of.out.bytes, 0, model::kMostTileBytes - of.out.bytes);
  }
}

// int8 with a sign (s) or without (u), first the left tile's.
inline void _tile_dpbssd(int to, int a, int b) { model::add_bytes<int8_t, int8_t>(to, a, b); }
inline void _tile_dpbsud(int to, int a, int b) { model::add_bytes<int8_t, uint8_t>(to, a, b); }
inline void _tile_dpbusd(int to, int a, int b) { model::add_bytes<uint8_t, int8_t>(to, a, b); }
inline void _tile_dpbuud(int to, int a, int b) { model::add_bytes<uint8_t, uint8_t>(to, a, b); }

}  // namespace dlinfer

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
