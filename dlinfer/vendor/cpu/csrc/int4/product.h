// The product of rows of x and a layer's weight, block by block of columns.
#pragma once

#include <array>
#include <atomic>
#include <utility>

#include "int4/layer.h"
#include "int4/rounded.h"
#include "int4/tile_inputs.h"

namespace dlinfer::int4 {

constexpr int64_t kBytesPerThread = 64 << 10;  // of the weight: below it a thread is done before another has begun
constexpr int64_t kSliceBytes = 256 << 10;     // of sums: a part of the second-level cache

// Measured on a Zen 4 (benchmarks/four_bit.py): the distance of prefetching, and the least width of a piece that is
// read at the speed of memory. A thread prefetches some strips of a block before it computes anything.
constexpr int64_t kRowsAhead = 768;
constexpr int64_t kFetchedFirst = 2;
constexpr int64_t kWidePiece = 16;  // blocks
constexpr int64_t kPiecesPerThread = 4;

constexpr int64_t kChunkRows = 256;  // of x, for which the weight is widened once

// Whether rows of x are for the tiles of AMX.
template <class In>
constexpr bool kInTiles = false;
#if defined(DLINFER_HAS_INT4_TILES)
template <class Tiles>
constexpr bool kInTiles<TileInputs<Tiles>> = true;
#endif

template <class Tiles, Numbers kNumbers, int kRows, int kTileNibbles = tile_nibbles(kRows)>
void tile(const Strip& strip, const typename Tiles::X* x, Next& next, const Finish& to) {
  for (int first = 0; first < kNibbles; first += kTileNibbles) {
    Tiles::template run<kNumbers, kRows, kTileNibbles>(strip, x, first, next, to);
  }
}

// Two nibbles of a strip that were widened.
template <class Tiles, int kRows>
void panel_tile(const Floats* panel, const typename Tiles::X* x, int64_t steps, int first, const Finish& to) {
  typename Tiles::Sum kept[2 * kRows]{};
  for (int64_t k = 0; k < steps; ++k, panel += 2, x += kRows) {
    const Floats a = panel[0], b = panel[1];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      kept[m] = Tiles::dot(kept[m], a, x[m]);
      kept[kRows + m] = Tiles::dot(kept[kRows + m], b, x[m]);
    }
  }
  if constexpr (Tiles::kRounds) {
    Tiles::template finish<kRows>(to, kept, first);
  } else {
    to.add<kRows, 2>(kept, first);
  }
}

template <class Tiles>
struct TileOf {
  void (*run)(const Strip&, const typename Tiles::X*, Next&, const Finish&);
  void (*run_panel)(const Floats*, const typename Tiles::X*, int64_t, int, const Finish&);
};

template <class Tiles, Numbers kNumbers, int kRows>
constexpr TileOf<Tiles> tile_of() {
  if constexpr (Tiles::kFewRows > 0) {
    return {tile<Tiles, kNumbers, kRows>, panel_tile<Tiles, kRows>};
  } else {
    return {nullptr, panel_tile<Tiles, kRows>};
  }
}

template <class Tiles, Numbers kNumbers, int... I>
constexpr std::array<TileOf<Tiles>, sizeof...(I)> tiles_by_rows(std::integer_sequence<int, I...>) {
  return {{tile_of<Tiles, kNumbers, I + 1>()...}};
}

template <class Tiles, Numbers kNumbers, class In = Inputs<Tiles>>
class Product {
  static constexpr auto kTiles = tiles_by_rows<Tiles, kNumbers>(std::make_integer_sequence<int, kMostRows>());

 public:
  Product(const Layer& layer, const In& x, void* out, const Kind& kind)
      : layer_(layer), x_(x), out_(out), kind_(kind), blocks_(layer.blocks()) {}

  void run() const {
    if constexpr (Tiles::kFewRows > 0 && !kInTiles<In>) {
      if (x_.count <= Tiles::kFewRows) return few();
    }
    many();
  }

 private:
  // Blocks that a thread does in a piece.
  struct Piece {
    int64_t begin, end;
  };

  // Deals out pieces of about equal size. They are wide, so that rows of the weight are read in long stretches. There
  // are many, so that a late or interrupted thread does less.
  class Pieces {
   public:
    Pieces(int64_t blocks, int64_t threads, int64_t longest) : blocks_(blocks) {
      const int64_t each = threads > 1 ? blocks / (kWidePiece * threads) : 1;
      const int64_t wide = std::clamp<int64_t>(each, 1, kPiecesPerThread) * threads;
      count_ = std::max((blocks + longest - 1) / longest, std::min(wide, blocks));
    }
    int64_t longest() const { return (blocks_ + count_ - 1) / count_; }
    // An empty one where none is left.
    Piece take() {
      const int64_t i = std::min(next_.fetch_add(1, std::memory_order_relaxed), count_);
      return {blocks_ * i / count_, blocks_ * std::min(i + 1, count_) / count_};
    }

   private:
    const int64_t blocks_;
    int64_t count_;
    std::atomic<int64_t> next_{0};
  };

  void few() const {
    const int64_t bytes = layer_.in * layer_.words_of_a_row() * int64_t(sizeof(uint32_t));
    const int64_t threads = std::clamp<int64_t>(std::min(bytes / kBytesPerThread, blocks_), 1, thread_count());
    const int64_t block_bytes = x_.count * kColumns * int64_t(sizeof(float));
    Pieces pieces(blocks_, threads, std::max<int64_t>(kSliceBytes / block_bytes, 1));
    parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      Piece piece = pieces.take();
      if (piece.begin >= piece.end) return;
      const Scratch sums(pieces.longest() * block_bytes);
      Ahead ahead(layer_, x_.strips, piece);
      while (piece.begin < piece.end) {
        slice(piece, pieces, ahead, sums.as<Floats>());
        if (ahead.is_in(piece)) ahead.enter(pieces.take());
        piece = ahead.piece();
      }
    });
  }

  // Where reading ahead has come to: a strip of a piece. Lines of narrow rows are read block by block, and those of wide
  // rows in the order of memory, which the processor's own reading ahead follows.
  class Ahead {
   public:
    Ahead(const Layer& layer, int64_t strips, Piece piece) : layer_(layer), strips_(strips) { enter(piece); }
    void enter(Piece piece) {
      piece_ = piece;
      const bool is_empty = piece.begin >= piece.end || !strips_;
      strip_ = is_empty ? strips_ : 0;
      if (is_empty) {
        next = Next::nothing(layer_.words);
      } else {
        begin_strip();
      }
    }
    bool is_in(Piece piece) const { return piece.begin == piece_.begin; }
    bool at_end() const { return !next.left() && strip_ + 1 >= strips_; }
    Piece piece() const { return piece_; }
    const Span& span() const { return span_; }
    // Fetches until `lines` fetched lines are not yet read, or until the piece ends.
    void fetch(int64_t lines) {
      while (ahead_ < lines && !at_end()) {
        if (!next.left()) {
          ++strip_;
          begin_strip();
        }
        const int64_t some = std::min(next.left(), lines - ahead_);
        for (int64_t i = 0; i < some; ++i) next.fetch();
        ahead_ += some;
      }
    }
    // Counts the lines of a block's strip, which was read. Tiles fetched meanwhile; before that, `before` lines were left.
    void read(int64_t lines, int64_t before) { ahead_ += before - next.left() - lines; }

    Next next;

   private:
    void begin_strip() {
      span_ = span_of(layer_, strip_);
      const int64_t begin = piece_.begin * kLanes;
      const int64_t blocks = piece_.end - piece_.begin, depth = span_.depth;
      next.line = layer_.words + span_.begin * layer_.stride + begin;
      if (layer_.has_wide_rows()) {
        next.step = kLanes, next.jump = layer_.stride - blocks * kLanes, next.run = blocks, next.runs = depth;
      } else {
        next.step = layer_.stride, next.jump = kLanes - depth * layer_.stride, next.run = depth, next.runs = blocks;
      }
      next.left_of_run = next.run;
      --next.runs;
    }

    const Layer& layer_;
    const int64_t strips_;
    Piece piece_;
    int64_t strip_, ahead_ = 0;
    Span span_{};
  };

  void fetch_group(const Span& span, int64_t block) const {
    const auto* const scales = static_cast<const char*>(layer_.scales) +
                               (span.group * layer_.scales_stride + block * kColumns) * layer_.scales_kind.bytes;
    const int64_t bytes = layer_.words_of(block) * kNibbles * layer_.scales_kind.bytes;
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(scales + byte);
    if (layer_.zeros) __builtin_prefetch(layer_.zeros + span.group * layer_.zeros_stride + block * kLanes);
  }

  // The number of fetched lines that are not yet read: those of a strip of the piece and of one more block. Where rows are
  // narrow, a thread begins with fewer.
  int64_t distance(Piece piece, int64_t read) const {
    const int64_t depth = span_of(layer_, 0).depth;
    const int64_t enough = std::max(kRowsAhead, (piece.end - piece.begin + 1) * depth);
    return layer_.has_wide_rows() ? enough : std::min(enough, kFetchedFirst * depth + read);
  }

  // Scales and what is less than q of a block's columns for one group, by nibble.
  void load_group(int64_t group, int64_t block, Floats* scales, Floats* less) const {
    const int64_t word = block * kLanes, words = layer_.words_of(block);
    float columns[kColumns];
    layer_.scales_kind.widen(layer_.scales, group * layer_.scales_stride + word * kNibbles, words * kNibbles, columns);
    if (words < kLanes) std::fill(columns + words * kNibbles, columns + kColumns, 0.0f);
    Tiles::by_nibble(columns, scales);
    if (layer_.zeros) {
      Tiles::less(load_words(layer_.zeros + group * layer_.zeros_stride + word, words), less);
    } else {
      std::fill_n(less, kNibbles, all_lanes(Tiles::kWithoutZeros));
    }
  }

  // All rows of x and a piece of blocks, while the beginning of the one that follows is fetched.
  void slice(Piece piece, Pieces& pieces, Ahead& ahead, Floats* sums) const {
    const int64_t blocks = piece.end - piece.begin, row_of_sums = blocks * kNibbles;
    int64_t read = 0;
    Next nothing = Next::nothing(layer_.words);
    std::fill_n(sums, x_.count * row_of_sums, Floats{});
    for (int64_t strip = 0; strip < x_.strips; ++strip) {
      const Span span = span_of(layer_, strip);
      for (int64_t block = piece.begin; block < piece.end; ++block) {
        const Strip weight = strip_of(span, block);
        Floats scales[kNibbles], less[kNibbles];
        load_group(span.group, block, scales, less);
        if (ahead.at_end() && ahead.is_in(piece)) ahead.enter(pieces.take());
        ahead.fetch(distance(piece, read));
        fetch_group(ahead.span(), block);
        const int64_t before = ahead.next.left();
        for (int64_t row = 0; row < x_.count; row += x_.rows) {
          Floats* const kept = sums + row * row_of_sums + (block - piece.begin) * kNibbles;
          const Finish to{scales, less, x_.sums(row, strip), x_.strips, kept, row_of_sums, x_.scales(row, strip)};
          kTiles[x_.rows_at(row) - 1].run(weight, x_.at(row, span.begin), row ? nothing : ahead.next, to);
        }
        ahead.read(weight.depth, before);
        read += weight.depth;
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
      const Scratch sums(most * kColumns * int64_t(sizeof(float))), panel(4 * kStripRows * int64_t(sizeof(Floats)));
      for (; begin < end; ++begin) {
        const int64_t first = begin / blocks_ * chunk;
        const int64_t rows = std::min(chunk, x_.count - first);
        if constexpr (kInTiles<In>) {
          tiles_of_many(begin % blocks_, first, rows, sums.as<Floats>(), panel.as<Floats>());
        } else {
          block_of_many(begin % blocks_, first, rows, sums.as<Floats>(), panel.as<Floats>());
        }
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
      const Span next = strip + 1 < x_.strips ? span_of(layer_, strip + 1) : Span{span.group, span.begin, 0};
      const Strip later = strip_of(next, block);
      for (int nibble = 0; nibble < kNibbles; nibble += 2) {
        Tiles::template widen<kNumbers>(weight, nibble, panel);
        for (int64_t k = nibble / 2; k < later.depth; k += 4) __builtin_prefetch(later.words + k * later.stride, 0, 2);
        for (int64_t row = 0; row < rows; row += x_.rows) {
          const auto* const x = reinterpret_cast<const char*>(x_.at(first + row, next.begin));
          const auto* const end = reinterpret_cast<const char*>(x_.at(first + row, next.begin + next.depth));
          for (const char* line = x + nibble * 32; line < end; line += 256) __builtin_prefetch(line, 0, 2);
          const Finish to{scales, less, x_.sums(first + row, strip), x_.strips, sums + row * kNibbles, kNibbles,
                          x_.scales(first + row, strip)};
          kTiles[x_.rows_at(first + row) - 1].run_panel(panel, x_.at(first + row, span.begin), steps, nibble, to);
        }
      }
    }
    for (int64_t m = 0; m < rows; ++m) store(first + m, block, sums + m * kNibbles);
  }

  // The same with the tiles of AMX.
  void tiles_of_many([[maybe_unused]] int64_t block, [[maybe_unused]] int64_t first, [[maybe_unused]] int64_t rows,
                     [[maybe_unused]] Floats* sums, [[maybe_unused]] Floats* panel) const {
#if defined(DLINFER_HAS_INT4_TILES)
    const TileRegisters registers(kWholeTiles);
    std::fill_n(sums, rows * kNibbles, Floats{});
    for (int64_t strip = 0; strip < x_.strips; ++strip) {
      const Span span = span_of(layer_, strip);
      const Strip weight = strip_of(span, block);
      const int64_t registers_of_x = (span.depth + Tiles::kRowsOfX - 1) / Tiles::kRowsOfX, steps = In::steps(span);
      Floats scales[kNibbles], less[kNibbles];
      load_group(span.group, block, scales, less);
      const Span next = strip + 1 < x_.strips ? span_of(layer_, strip + 1) : Span{span.group, span.begin, 0};
      const Strip later = strip_of(next, block);
      TileStrip<Tiles> product(x_, strip, first, rows, scales, less, sums);
      for (int nibble = 0; nibble < kNibbles; nibble += 2) {
        Floats* const widened = panel + nibble / 2 % 2 * 2 * kStripRows;
        Tiles::template widen<kNumbers>(weight, nibble, widened);
        std::fill(widened + 2 * registers_of_x, widened + 2 * kTile * steps, Floats{});
        for (int64_t k = nibble / 2; k < later.depth; k += 4) __builtin_prefetch(later.words + k * later.stride, 0, 2);
        memory_is_read();
        product.multiply(widened, steps, nibble);
      }
    }
    for (int64_t m = 0; m < rows; ++m) store(first + m, block, sums + m * kNibbles);
#endif
  }

  void store(int64_t row, int64_t block, const Floats* sums) const {
    const int64_t column = block * kColumns, count = std::min<int64_t>(kColumns, layer_.out - column);
    float columns[kColumns];
    Tiles::by_column(sums, columns);
    for (int64_t c = 0; layer_.bias && c < count; ++c) columns[c] += layer_.bias[column + c];
    kind_.narrow(columns, count, out_, row * layer_.out + column);
  }

  const Layer& layer_;
  const In& x_;
  void* const out_;
  const Kind kind_;
  const int64_t blocks_;
};

}  // namespace dlinfer::int4
