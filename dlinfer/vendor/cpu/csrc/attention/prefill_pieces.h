// Queries of several sequences over keys and values that stand packed, or in blocks, where they are read in place and
// once a tile.
//
// With N keys a query takes N * (size + size_v) multiplications and additions a head, and reads as many numbers, shared
// by all rows of a piece. At 512 rows that is 1024 operations a number, so the multiplications take all the time. A
// core of AMD's Zen 4 at 2.6 GHz does 166 GFLOP/s with the dot instructions for bfloat16, and half of that in float32.
// The work is cut into pieces of (sequence, key head, some rows), which threads take one after another as they become
// free, the largest first. Rows are the queries of all heads that share the key head, query after query, so that a tile
// of keys and values, once copied, serves them all:
// - tile: kTileKeys keys and values, copied into the second-level cache as words of the products (packing.h).
// - panel: kPanelRows rows against a tile: products, softmax in float32, and products again (panel.h). Meanwhile the
//   rows of the next tile are prefetched, that of the thread's next piece too. A sequence that decodes has a handful of
//   rows, and would wait for its keys longer than it computes with them.
//
// Tiles begin at multiples of their size, and a row's sums are taken in the order of its keys. So a row has the same
// bits whatever else is in the batch or in the same call, and with any number of threads.
//
// On the processor above, one thread reaches 0.78 of its multiplications at 512 tokens and 0.82 at 2048 in bfloat16,
// 0.82 and 0.87 in float32 (heads of 64, all in its caches). A piece's memory is that of its thread: queries, sums, one
// tile and one panel's scores, below 1 MiB for all head sizes that models have. With AMX the products of bfloat16 are its
// tiles' (tiled_panel.h).
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "attention/ahead.h"
#include "attention/arguments.h"
#include "attention/packing.h"
#include "attention/panel.h"
#include "attention/tiled_panel.h"
#include "common/result_memory.h"
#include "threads/team.h"

namespace dlinfer::prefill {

using attention::Ahead;
using attention::MaybeTensor;
using attention::ScalarType;
using attention::Tensor;

constexpr int64_t kMostRows = 512;                     // of a piece
constexpr int64_t kRowBytes = 256 << 10;              // of a piece's queries and sums: a part of a second-level cache
constexpr int64_t kPiecesPerThread = 4;                // so that they end together
constexpr int64_t kProductsPerThread = 1 << 20;        // below so many a thread is done before another one has begun

struct Sequence {
  int64_t first_query, queries, keys;
  int64_t first_slot;            // of its keys, where they stand packed
  const int64_t* blocks;         // where they stand in pages
  const Keys* visible = nullptr; // to each of its queries; null where the call's shape tells
};

struct Call {
  int64_t heads, kv_heads, group, size, size_v, block_size;
  int64_t q_row, q_head, out_row, out_head;  // strides, in elements
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
  Shape shape;
  std::vector<Sequence> sequences;
  std::vector<int64_t> blocks;
  std::vector<float> slopes, sinks;  // by query head; empty is none
};

// Rows [begin, end) of a sequence and a key head: row r is of query r / group and of the group's head r % group.
struct Piece {
  int64_t sequence, kv_head, begin, end, products;
};

// Memory that a thread uses while it is at work; kept for the next call.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : block_(ResultMemory::get().take(floats * sizeof(float))) {
    next_ = static_cast<float*>(block_.data);
  }
  ~Scratch() { ResultMemory::get().give_back(block_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* floats(int64_t count) {
    float* const taken = next_;
    next_ += rounded(count);
    return taken;
  }
  static int64_t rounded(int64_t count) { return (count + 15) / 16 * 16; }  // cache lines

 private:
  ResultMemory::Block block_;
  float* next_;
};

template <class T>
class Runner {
 public:
  Runner(const Call& call, const T* q, const T* k, const T* v, T* out)
      : call_(call),
        q_(q),
        k_(k),
        v_(v),
        out_(out),
        tiled_(has_tiles()),
        block_(tiled_ ? kTiledKeys : kColumns),
        words_(words_of<T>(call.size)),
        words_v_(tiled_ ? (call.size_v + kLanes - 1) / kLanes * kLanes : (call.size_v + 1) / 2 * 2) {
    const int64_t threads = thread_count();
    int64_t all = 0;
    for (const Sequence& one : call.sequences) all += one.queries * call.heads;
    const auto panels = [](int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows * kPanelRows; };
    const int64_t most = kRowBytes / int64_t(sizeof(float)) / (words_ + words_v_) / kPanelRows * kPanelRows;
    rows_ = std::clamp(panels(all / (kPiecesPerThread * threads)), kPanelRows,
                       std::clamp(most, kPanelRows, kMostRows));
    for (int64_t s = 0; s < int64_t(call.sequences.size()); ++s) {
      const int64_t rows = call.sequences[s].queries * call.group;
      for (int64_t h = 0; h < call.kv_heads; ++h) {
        for (int64_t row = 0; row < rows; row += rows_) add_piece({s, h, row, std::min(row + rows_, rows), 0});
      }
    }
    const auto larger = [](const Piece& a, const Piece& b) { return a.products > b.products; };
    std::stable_sort(pieces_.begin(), pieces_.end(), larger);
  }

  void run() {
    int64_t products = 0;
    for (const Piece& piece : pieces_) products += piece.products;
    const int64_t most = std::clamp<int64_t>(products / kProductsPerThread, 1, thread_count());
    std::atomic<int64_t> next{0};
    const auto take = [&](int64_t, int64_t) {
      const int64_t count = pieces_.size();
      const auto taken = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
      int64_t i = taken();
      if (i >= count) return;
      Work work(*this);
      while (i < count) {
        // Taken before this one is computed, so that memory can be asked for it; not the last, so that threads end
        // together.
        const bool early = next.load(std::memory_order_relaxed) + most < count;
        const int64_t following = early ? taken() : count;  // the end, where others have taken all the rest meanwhile
        work.compute(pieces_[i], following < count ? &pieces_[following] : nullptr);
        i = early ? following : taken();
      }
    };
    parallel_for(0, most, most == 1 ? 2 : 1, take);
  }

 private:
  static bool has_tiles() {
#if defined(DLINFER_HAS_TILES)
    if constexpr (kPairs<T>) return tiles_granted();
#endif
    return false;
  }

  // Keys that a query of a sequence sees.
  Keys visible(const Sequence& of, int64_t query) const {
    if (of.visible) return of.visible[query];
    const int64_t position = of.keys - of.queries + query;
    const int64_t begin = std::clamp<int64_t>(position + call_.shape.lowest, 0, of.keys);
    return {int32_t(begin), int32_t(std::clamp<int64_t>(position + call_.shape.highest + 1, begin, of.keys))};
  }

  // The keys that some of the rows [row, end) see, and those that all see.
  Seen seen(const Piece& piece, int64_t row, int64_t end) const {
    const Sequence& of = call_.sequences[piece.sequence];
    const int64_t first = row / call_.group, last = (end - 1) / call_.group;
    Seen found{of.keys, 0, 0, of.keys};
    for (int64_t query = first; query <= last; query += of.visible ? 1 : std::max<int64_t>(last - first, 1)) {
      // By the call's shape they move on with the query: the first's begin and the last's end hold for those between,
      // even where that query itself sees nothing.
      const Keys keys = visible(of, query);
      found.all_begin = std::max<int64_t>(found.all_begin, keys.begin);
      found.all_end = std::min<int64_t>(found.all_end, keys.end);
      if (of.visible && keys.begin == keys.end) continue;
      found.begin = std::min<int64_t>(found.begin, keys.begin);
      found.end = std::max<int64_t>(found.end, keys.end);
    }
    return found;
  }

  void add_piece(Piece piece) {
    const Seen keys = seen(piece, piece.begin, piece.end);
    const int64_t count = std::max<int64_t>(keys.end - keys.begin, 1);
    piece.products = (piece.end - piece.begin) * count * (call_.size + call_.size_v);
    pieces_.push_back(piece);
  }

  // A thread's memory, and what it does with a piece.
  class Work {
   public:
    explicit Work(const Runner& of)
        : of_(of),
          call_(of.call_),
          panels_(of.rows_ / kPanelRows),
          scratch_(Scratch::rounded(of.rows_ * of.words_) + Scratch::rounded(of.rows_ * of.words_v_) +
                   Scratch::rounded(kTileKeys * of.words_) + Scratch::rounded(kTileKeys * of.words_v_) +
                   Scratch::rounded(kTileKeys * kPanelRows)),
          queries_(scratch_.floats(of.rows_ * of.words_)),
          sums_(scratch_.floats(of.rows_ * of.words_v_)),
          keys_(scratch_.floats(kTileKeys * of.words_)),
          values_(scratch_.floats(kTileKeys * of.words_v_)),
          scores_(scratch_.floats(kTileKeys * kPanelRows)),
          states_(panels_) {
#if defined(DLINFER_HAS_TILES)
      if (of.tiled_) registers_.emplace(shapes_for(of.words_));
#endif
    }

    // next: the piece that this thread takes then, or null where that is open.
    void compute(const Piece& piece, const Piece* next) {
      for (int64_t row = piece.begin; row < piece.end; row += kPanelRows) begin_panel(piece, row);
      const Seen all = of_.seen(piece, piece.begin, piece.end);
      const int64_t panels = (piece.end - piece.begin + kPanelRows - 1) / kPanelRows;
      if (!std::exchange(is_next_found_, false)) find(piece, all, all.first_tile());
      for (int64_t tile = all.first_tile(); tile < all.end; tile += kTileKeys) {
        const int64_t blocks = copy_tile();
        if (tile + kTileKeys < all.end) {
          find(piece, all, tile + kTileKeys);
        } else if (next) {
          const Seen seen = of_.seen(*next, next->begin, next->end);
          find(*next, seen, seen.first_tile());
          is_next_found_ = true;
        }
        keys_ahead_ = rows_.ahead(rows_.keys, call_.size, panels * blocks);
        values_ahead_ = rows_.ahead(rows_.values, call_.size_v, panels * of_.steps_of_values());
        for (int64_t row = piece.begin; row < piece.end; row += kPanelRows) {
          const int64_t vectors = (std::min(kPanelRows, piece.end - row) + kLanes - 1) / kLanes;
          add_tile(std::make_integer_sequence<int, kVectors>(), vectors, piece, tile, row);
        }
      }
      for (int64_t row = piece.begin; row < piece.end; row += kPanelRows) end_panel(piece, row);
    }

   private:
    float* of_panel(float* all, int64_t words, const Piece& piece, int64_t row) const {
      return all + (row - piece.begin) * words;
    }
    RowState& state(const Piece& piece, int64_t row) { return states_[(row - piece.begin) / kPanelRows]; }

    // Calls f(first row, rows, width of the panel) for groups of at most kLanes rows of a panel.
    template <class F>
    void each_vector(const Piece& piece, int64_t row, F&& f) const {
      const int64_t end = std::min(row + kPanelRows, piece.end), width = (end - row + kLanes - 1) / kLanes * kLanes;
      for (int64_t first = row; first < end; first += kLanes) f(first, std::min<int64_t>(kLanes, end - first), width);
    }
    // Calls f(i, its query, its head) for `count` rows from `first` on.
    template <class F>
    void each_row(const Piece& piece, int64_t first, int64_t count, F&& f) const {
      int64_t query = first / call_.group, head = first % call_.group;
      for (int64_t i = 0; i < count; ++i) {
        f(i, query, piece.kv_head * call_.group + head);
        if (++head == call_.group) head = 0, ++query;
      }
    }

    void begin_panel(const Piece& piece, int64_t row) {
      const Sequence& sequence = call_.sequences[piece.sequence];
      RowState& rows = state(piece, row);
      std::fill_n(rows.largest, kPanelRows, kNone);
      std::fill_n(rows.sums, kPanelRows, 0.0f);
      const int64_t own = std::min(kPanelRows, piece.end - row);
      each_row(piece, row, own, [&](int64_t i, int64_t query, int64_t head) {
        const Keys keys = of_.visible(sequence, query);
        rows.begins[i] = keys.begin, rows.ends[i] = keys.end;
        rows.positions[i] = int32_t(sequence.keys - sequence.queries + query);
        rows.slopes[i] = call_.slopes.empty() ? 0.0f : call_.slopes[head];
      });
      for (int64_t i = own; i < kPanelRows; ++i) {  // as the last
        rows.begins[i] = rows.begins[own - 1], rows.ends[i] = rows.ends[own - 1];
        rows.positions[i] = rows.positions[own - 1], rows.slopes[i] = rows.slopes[own - 1];
      }
      float* const queries = of_panel(queries_, of_.words_, piece, row);
      each_vector(piece, row, [&](int64_t first, int64_t count, int64_t width) {
        std::array<const T*, kLanes> from{};
        each_row(piece, first, count, [&](int64_t i, int64_t query, int64_t head) {
          from[i] = of_.q_ + (sequence.first_query + query) * call_.q_row + head * call_.q_head;
        });
        pack_queries(from.data(), call_.size, width, queries + first - row);
      });
      std::fill_n(of_panel(sums_, of_.words_v_, piece, row), kPanelRows * of_.words_v_, 0.0f);
    }

    // Where the tile that is copied next has its keys and values; null where it has none.
    struct TileRows {
      int64_t begin = 0, end = 0;
      std::array<const T*, kTileKeys> keys{}, values{};

      Ahead<T> ahead(const std::array<const T*, kTileKeys>& of, int64_t numbers, int64_t steps) const {
        return Ahead<T>(of.data() + begin, end - begin, numbers, steps);
      }
    };

    // Finds the rows of a tile; a piece sees some of its keys, or none.
    void find(const Piece& piece, const Seen& seen, int64_t tile) {
      const int64_t begin = std::max(seen.begin, tile), end = std::max(begin, std::min(tile + kTileKeys, seen.end));
      rows_ = TileRows{begin - tile, end - tile};
      if (begin == end) return;
      const Sequence& sequence = call_.sequences[piece.sequence];
      const T* const k = of_.k_ + piece.kv_head * call_.k_head;
      const T* const v = of_.v_ + piece.kv_head * call_.v_head;
      const int64_t first = sequence.first_slot + begin;
      int64_t column = first / call_.block_size, slot = first % call_.block_size;
      for (int64_t key = begin; key < end; ++column, slot = 0) {
        const int64_t block = sequence.blocks ? sequence.blocks[column] : 0;
        for (; key < end && slot < call_.block_size; ++key, ++slot) {
          rows_.keys[key - tile] = k + block * call_.k_block + slot * call_.k_slot;
          rows_.values[key - tile] = v + block * call_.v_block + slot * call_.v_slot;
        }
      }
    }

    // Keys and values that were found, at their places in the tile; zeros beside them, as far as blocks reach. Says how
    // many blocks of keys they are.
    int64_t copy_tile() {
      const int64_t block = of_.block_;
      const int64_t first = rows_.begin / block * block, last = (rows_.end + block - 1) / block * block;
      for (int64_t i = first; i < last; ++i) {
        float* const to = keys_ + i * of_.words_;
        rows_.keys[i] ? pack_key(rows_.keys[i], call_.size, to) : void(std::fill_n(to, of_.words_, 0.0f));
      }
      copy_values(first, last);
      return (last - first) / block;
    }

    void copy_values(int64_t first, int64_t last) {
#if defined(DLINFER_HAS_TILES)
      if constexpr (kPairs<T>) {
        for (int64_t i = first; of_.tiled_ && i < last; i += kTiledKeys) {
          pack_turned_values(rows_.values.data() + i, call_.size_v, of_.words_v_, kTileWords, values_ + i / 2);
        }
        if (of_.tiled_) return;
      }
#endif
      for (int64_t i = first; i < last; i += kWord<T>) {
        pack_values(rows_.values[i], rows_.values[i + kWord<T> - 1], call_.size_v, of_.words_v_,
                    values_ + i / kWord<T> * of_.words_v_);
      }
    }

    template <int... I>
    void add_tile(std::integer_sequence<int, I...>, int64_t vectors, const Piece& piece, int64_t tile, int64_t row) {
      ((vectors == I + 1 ? add_tile<I + 1>(piece, tile, row) : void()), ...);
    }

    template <int kRows>
    void add_tile(const Piece& piece, int64_t tile, int64_t row) {
#if defined(DLINFER_HAS_TILES)
      if constexpr (kPairs<T>) {
        if (of_.tiled_) return add_tile_to<TiledPanel<kRows>>(piece, tile, row);
      }
#endif
      add_tile_to<Panel<kPairs<T>, kRows>>(piece, tile, row);
    }

    template <class OfRows>
    void add_tile_to(const Piece& piece, int64_t tile, int64_t row) {
      const Seen of_rows = of_.seen(piece, row, std::min(row + kPanelRows, piece.end));
      const Seen seen{std::max(of_rows.begin, tile) - tile, std::min(of_rows.end, tile + kTileKeys) - tile,
                      of_rows.all_begin - tile, of_rows.all_end - tile};
      if (seen.begin >= seen.end) return;
      RowState& rows = state(piece, row);
      const float* const queries = of_panel(queries_, of_.words_, piece, row);
      OfRows::multiply_keys(call_.shape, keys_, queries, of_.words_, seen, tile, keys_ahead_, rows, scores_);
      OfRows::softmax(call_.shape, seen, rows, scores_);
      OfRows::multiply_values(values_, of_.words_v_, scores_, seen, rows, values_ahead_,
                              of_panel(sums_, of_.words_v_, piece, row));
    }

    void end_panel(const Piece& piece, int64_t row) {
      const Sequence& sequence = call_.sequences[piece.sequence];
      const RowState& rows = state(piece, row);
      const float* const sums = of_panel(sums_, of_.words_v_, piece, row);
      each_vector(piece, row, [&](int64_t first, int64_t count, int64_t width) {
        std::array<T*, kLanes> to{};
        Floats totals = load_as<Floats>(rows.sums + first - row);
        each_row(piece, first, count, [&](int64_t i, int64_t query, int64_t head) {
          to[i] = of_.out_ + (sequence.first_query + query) * call_.out_row + head * call_.out_head;
          if (call_.sinks.empty()) return;
          const float largest = rows.largest[first - row + i], base = largest == kNone ? 0.0f : largest;
          totals[i] += std::exp2(call_.sinks[head] * kLog2e - base);
        });
        unpack(sums + first - row, totals, call_.size_v, width, to.data());
      });
    }

    const Runner& of_;
    const Call& call_;
    int64_t panels_;
    Scratch scratch_;
    float *queries_, *sums_, *keys_, *values_, *scores_;
    std::vector<RowState> states_;
    TileRows rows_;
    bool is_next_found_ = false;  // whether those are of the next piece's first tile
    Ahead<T> keys_ahead_, values_ahead_;
#if defined(DLINFER_HAS_TILES)
    std::optional<TileRegisters> registers_;
#endif
  };

  // The steps of a panel's product with a tile's values; each prefetches a part of the next tile.
  int64_t steps_of_values() const { return std::max<int64_t>(words_v_ / (tiled_ ? kLanes : kColumns), 1); }

  const Call& call_;
  const T *q_, *k_, *v_;
  T* out_;
  bool tiled_;     // whether products are those of AMX
  int64_t block_;  // keys that are taken at once
  int64_t words_, words_v_, rows_;
  std::vector<Piece> pieces_;
};

template <class T>
void run_as(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  const auto data = [](const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
  Runner<T>(call, data(q), data(k), data(v), static_cast<T*>(out.mutable_data_ptr())).run();
}

// By the dtype of all four.
void run(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  switch (q.scalar_type()) {
    case ScalarType::Float:
      return run_as<float>(call, q, k, v, out);
    case ScalarType::BFloat16:
      return run_as<BFloat16>(call, q, k, v, out);
    case ScalarType::Half:
      return run_as<Half>(call, q, k, v, out);
    default:
      STD_TORCH_CHECK(false, "prefill attention: no kernel for this dtype");
  }
}

}  // namespace dlinfer::prefill
