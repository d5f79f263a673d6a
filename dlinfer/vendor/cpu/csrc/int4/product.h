// The product of rows of x and a layer's weight, block by block of columns.
#pragma once

#include <array>
#include <atomic>
#include <utility>

#include "int4/layer.h"

namespace dlinfer::int4 {

constexpr int64_t kBytesPerThread = 64 << 10;  // of the weight: below it a thread is done before another has begun
constexpr int64_t kSliceBytes = 256 << 10;     // of sums: a part of the second-level cache
constexpr int64_t kRowsAhead = 256;            // of a block: what is prefetched before it is read
constexpr int64_t kFewRows = 2 * kMostRows;    // of x, for which the weight is widened anew by each tile
constexpr int64_t kChunkRows = 256;            // of x, for which it is widened once

template <class Tiles, Numbers kNumbers, int kRows, int kTileNibbles = tile_nibbles(kRows)>
void tile(const Strip& strip, const typename Tiles::X* x, Next next, const Finish& to) {
  for (int first = 0; first < kNibbles; first += kTileNibbles) {
    Tiles::template run<kNumbers, kRows, kTileNibbles>(strip, x, first, next, to);
  }
}

// Two nibbles of a strip that were widened.
template <class Tiles, int kRows>
void panel_tile(const Floats* panel, const typename Tiles::X* x, int64_t steps, int first, const Finish& to) {
  Floats kept[2 * kRows]{};
  for (int64_t k = 0; k < steps; ++k, panel += 2, x += kRows) {
    const Floats a = panel[0], b = panel[1];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      kept[m] = Tiles::dot(kept[m], a, x[m]);
      kept[kRows + m] = Tiles::dot(kept[kRows + m], b, x[m]);
    }
  }
  to.add<kRows, 2>(kept, first);
}

template <class Tiles>
struct TileOf {
  void (*run)(const Strip&, const typename Tiles::X*, Next, const Finish&);
  void (*run_panel)(const Floats*, const typename Tiles::X*, int64_t, int, const Finish&);
};

template <class Tiles, Numbers kNumbers, int... I>
constexpr std::array<TileOf<Tiles>, sizeof...(I)> tiles_by_rows(std::integer_sequence<int, I...>) {
  return {{{tile<Tiles, kNumbers, I + 1>, panel_tile<Tiles, I + 1>}...}};
}

template <class Tiles, Numbers kNumbers>
class Product {
  static constexpr auto kTiles = tiles_by_rows<Tiles, kNumbers>(std::make_integer_sequence<int, kMostRows>());

 public:
  Product(const Layer& layer, const Inputs<Tiles>& x, void* out, const Kind& kind)
      : layer_(layer), x_(x), out_(out), kind_(kind), blocks_(layer.blocks()) {}

  void run() const { x_.count <= kFewRows ? few() : many(); }

 private:
  // Blocks that a thread does in a piece.
  struct Piece {
    int64_t begin, end;
  };

  // Deals them out: long pieces first, then shorter ones, so that all threads end together.
  class Pieces {
   public:
    Pieces(int64_t blocks, int64_t threads, int64_t longest) : blocks_(blocks), threads_(threads), longest_(longest) {}
    Piece take() {
      int64_t first = next_.load(std::memory_order_relaxed), last;
      do {
        last = std::min(blocks_, first + std::clamp<int64_t>((blocks_ - first) / (2 * threads_), 1, longest_));
      } while (first < blocks_ && !next_.compare_exchange_weak(first, last, std::memory_order_relaxed));
      return {first, last};
    }

   private:
    const int64_t blocks_, threads_, longest_;
    std::atomic<int64_t> next_{0};
  };

  void few() const {
    const int64_t bytes = layer_.in * layer_.words_of_a_row() * int64_t(sizeof(uint32_t));
    const int64_t threads = std::clamp<int64_t>(std::min(bytes / kBytesPerThread, blocks_), 1, thread_count());
    const int64_t block_bytes = x_.count * kColumns * int64_t(sizeof(float));
    const int64_t longest = std::max<int64_t>(kSliceBytes / block_bytes, 1);
    Pieces pieces(blocks_, threads, longest);
    parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      Piece piece = pieces.take();
      if (piece.begin >= blocks_) return;
      Piece following = pieces.take();
      fetch(piece, following);
      const Scratch sums(std::min(longest, blocks_) * block_bytes);
      while (piece.begin < blocks_) {
        slice(piece, following, sums.as<Floats>());
        piece = std::exchange(following, pieces.take());
      }
    });
  }

  // A strip of a block that is read later.
  struct Later {
    Next lines{};
    int64_t block = 0, group = 0, depth = 0;
  };

  // What comes `by` strips after that of a piece's block; nothing where that has fewer rows.
  Later later(Piece piece, Piece following, int64_t strip, int64_t block, int64_t by, int64_t depth) const {
    int64_t width = piece.end - piece.begin, place = strip * width + block - piece.begin + by;
    if (place >= x_.strips * width) {
      place -= x_.strips * width;
      piece = following;
      width = piece.end - piece.begin;
    }
    const Later nothing{{layer_.words, 0}};
    if (place >= x_.strips * width) return nothing;
    const Span span = span_of(layer_, place / width);
    if (span.depth < depth) return nothing;
    const Strip there = strip_of(span, piece.begin + place % width);
    return {{there.words, there.stride}, piece.begin + place % width, span.group, span.depth};
  }

  void fetch_group(const Later& of) const {
    if (of.depth == 0) return;
    const auto* const scales = static_cast<const char*>(layer_.scales) +
                               (of.group * layer_.scales_stride + of.block * kColumns) * layer_.scales_kind.bytes;
    const int64_t bytes = layer_.words_of(of.block) * kNibbles * layer_.scales_kind.bytes;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(scales + byte);
    if (layer_.zeros) __builtin_prefetch(layer_.zeros + of.group * layer_.zeros_stride + of.block * kLanes);
  }

  // Where nothing was read ahead: what a piece begins with.
  void fetch(Piece piece, Piece following) const {
    if (x_.strips == 0) return;
    const int64_t depth = span_of(layer_, 0).depth;
    for (int64_t by = 0; by * depth < kRowsAhead; ++by) {
      const Later there = later(piece, following, 0, piece.begin, by, 1);
      fetch_group(there);
      for (int64_t k = 0; k < there.depth; ++k) __builtin_prefetch(there.lines.line + k * there.lines.stride, 0, 2);
    }
  }

  // Scales and 8 less zero points of a block's columns for one group, by nibble.
  void load_group(int64_t group, int64_t block, Floats* scales, Floats* less) const {
    const int64_t word = block * kLanes, words = layer_.words_of(block);
    float columns[kColumns];
    layer_.scales_kind.widen(layer_.scales, group * layer_.scales_stride + word * kNibbles, words * kNibbles, columns);
    if (words < kLanes) std::fill(columns + words * kNibbles, columns + kColumns, 0.0f);
    Tiles::by_nibble(columns, scales);
    if (layer_.zeros) {
      Tiles::less(load_words(layer_.zeros + group * layer_.zeros_stride + word, words), less);
    } else {
      std::fill_n(less, kNibbles, Floats{});
    }
  }

  // All rows of x and a piece of blocks, while the beginning of the one that follows is fetched.
  void slice(Piece piece, Piece following, Floats* sums) const {
    const int64_t blocks = piece.end - piece.begin, row_of_sums = blocks * kNibbles;
    std::fill_n(sums, x_.count * row_of_sums, Floats{});
    for (int64_t strip = 0; strip < x_.strips; ++strip) {
      const Span span = span_of(layer_, strip);
      const int64_t by = (kRowsAhead + span.depth - 1) / span.depth;
      for (int64_t block = piece.begin; block < piece.end; ++block) {
        const Strip weight = strip_of(span, block);
        const Later there = later(piece, following, strip, block, by, span.depth);
        Floats scales[kNibbles], less[kNibbles];
        load_group(span.group, block, scales, less);
        fetch_group(there);
        Next next = there.lines;
        for (int64_t row = 0; row < x_.count; row += x_.rows) {
          Floats* const kept = sums + row * row_of_sums + (block - piece.begin) * kNibbles;
          const Finish to{scales, less, x_.sums(row, strip), x_.strips, kept, row_of_sums};
          kTiles[x_.rows_at(row) - 1].run(weight, x_.at(row, span.begin), next, to);
          next.stride = 0;
        }
      }
    }
    for (int64_t m = 0; m < x_.count; ++m) {
      for (int64_t block = piece.begin; block < piece.end; ++block) {
        store(m, block, sums + m * row_of_sums + (block - piece.begin) * kNibbles);
      }
    }
  }

  Strip strip_of(const Span& span, int64_t block) const {
    return {layer_.words + span.begin * layer_.stride + block * kLanes, layer_.stride, layer_.words_of(block), span.depth};
  }

  void many() const {
    const int64_t passes = (x_.count + kChunkRows - 1) / kChunkRows, tiles = (x_.count + x_.rows - 1) / x_.rows;
    const int64_t chunk = (tiles + passes - 1) / passes * x_.rows, chunks = (x_.count + chunk - 1) / chunk;
    parallel_for(0, chunks * blocks_, 1, [&](int64_t begin, int64_t end) {
      const int64_t most = std::min(chunk, x_.count);
      const Scratch sums(most * kColumns * int64_t(sizeof(float))), panel(2 * kStripRows * int64_t(sizeof(Floats)));
      for (; begin < end; ++begin) {
        const int64_t first = begin / blocks_ * chunk;
        block_of_many(begin % blocks_, first, std::min(chunk, x_.count - first), sums.as<Floats>(), panel.as<Floats>());
      }
    });
  }

  // One block, and `rows` rows of x.
  void block_of_many(int64_t block, int64_t first, int64_t rows, Floats* sums, Floats* panel) const {
    std::fill_n(sums, rows * kNibbles, Floats{});
    for (int64_t strip = 0; strip < x_.strips; ++strip) {
      const Span span = span_of(layer_, strip);
      const Strip weight = strip_of(span, block);
      const int64_t steps = (span.depth + Tiles::kRowsOfX - 1) / Tiles::kRowsOfX;
      Floats scales[kNibbles], less[kNibbles];
      load_group(span.group, block, scales, less);
      for (int nibble = 0; nibble < kNibbles; nibble += 2) {
        Tiles::template widen<kNumbers>(weight, nibble, panel);
        for (int64_t row = 0; row < rows; row += x_.rows) {
          const Finish to{scales, less, x_.sums(first + row, strip), x_.strips, sums + row * kNibbles, kNibbles};
          kTiles[x_.rows_at(first + row) - 1].run_panel(panel, x_.at(first + row, span.begin), steps, nibble, to);
        }
      }
    }
    for (int64_t m = 0; m < rows; ++m) store(first + m, block, sums + m * kNibbles);
  }

  void store(int64_t row, int64_t block, const Floats* sums) const {
    const int64_t column = block * kColumns, count = std::min<int64_t>(kColumns, layer_.out - column);
    float columns[kColumns];
    Tiles::by_column(sums, columns);
    for (int64_t c = 0; layer_.bias && c < count; ++c) columns[c] += layer_.bias[column + c];
    kind_.narrow(columns, count, out_, row * layer_.out + column);
  }

  const Layer& layer_;
  const Inputs<Tiles>& x_;
  void* const out_;
  const Kind kind_;
  const int64_t blocks_;
};

}  // namespace dlinfer::int4
