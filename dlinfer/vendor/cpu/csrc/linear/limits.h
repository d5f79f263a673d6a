// Up to how many rows of x our own products are taken, and torch's from there on.
//
// few_rows.h reads a weight at the speed of memory and multiplies at 0.6 to 0.9 of the processor's peak. torch's product
// packs the weight anew at each call, which pays for itself once there are many rows, where torch has instructions for
// the dtype at all: for bfloat16 it asks for AVX-512, for float16 for AVX512-FP16 or AVX-NE-CONVERT
// (aten/src/ATen/native/mkldnn/Utils.h, mkldnn_bf16_device_check and its like). Without them float16 takes it 7 times as
// long as ours on Zen 5.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "common/processor.h"
#include "linear/few_rows.h"
#include "linear/float_blocks.h"
#include "linear/many_rows.h"

namespace dlinfer {

constexpr int64_t kAnyNumber = std::numeric_limits<int64_t>::max();

// Where both have instructions: from here on computing takes longer than reading, and torch's is as fast. Measured on an
// AMD EPYC of the Zen 4 kind for each instruction set (benchmarks/linear.py). Where AMX tiles, ours or torch's, or other
// processors may compute faster than that, the rows for which reading surely takes longer.
template <class T>
constexpr int64_t kUntilTorch = 16;
#if defined(__x86_64__) && !defined(__AMX_BF16__)
template <>
constexpr int64_t kUntilTorch<BFloat16> = 64;
template <>
constexpr int64_t kUntilTorch<Half> = 64;
#endif
#if defined(__AVX512F__)
template <>
constexpr int64_t kUntilTorch<float> = 32;
#endif

#if defined(DLINFER_HAS_FLOAT_BLOCKS)
// Likewise, where float_blocks.h takes what is more, of any dtype. Measured on an AMD EPYC of the Zen 3 kind, two
// threads: with 48 rows both are as fast; with 512 it is 1.2 to 1.3 times as fast as few_rows.h in bfloat16, and 1.0 to
// 1.2 times as fast as torch's float32. torch's bfloat16 is its reference there: it takes hundreds of times as long.
constexpr int64_t kUntilBlocks = 48;
#endif

#if defined(DLINFER_HAS_TILES)
// Likewise, where our tiles take what is more. Measured on a Xeon of the Emerald Rapids kind: with three rows both are
// as fast, with four the tiles are ahead, with 16 by a factor of two and more; one row takes them 15 % longer.
constexpr int64_t kUntilTiles = 2;

// With more rows than this torch's own linear is as fast as our tiles: it packs the weight at each call, which then
// costs little. Measured there: 512 and 1024 rows take torch 1.0 to 1.3 times as long, 2048 rows 0.8 to 1.5 times.
constexpr int64_t kMaxTileInputs = 1024;
#endif

// On Zen 5, two threads of one, against torch 2.13: float32 takes torch 1.3 to 1.6 times as long with any number of
// rows from 16 to 1024 (it reaches 0.4 of the peak, ours 0.6). bfloat16 takes it 1.3 times as long with 64
// rows, 1.2 with 128; from 256 on both are at 0.85 of the peak, and ours is behind by a tenth where a row of the weight
// is read in several chunks. It is taken all the same: torch's threads, OpenMP's, go on looking for work after a product
// and have a CPU each meanwhile. A model's linear layers, with every fourth one torch's, took 601 ms for 512 rows and
// 358 for 256; with all of them ours, 529 and 268. LMDeploy calls from a thread of its own, where they do not; there a
// prompt takes 2 to 3 % longer than with torch's.

// The most rows of x that few_rows.h takes of a weight; -1 where there is no kernel for the dtype.
inline int64_t max_inputs(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
#if defined(DLINFER_HAS_FLOAT_BLOCKS)
  const bool known = dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  return known ? kUntilBlocks : -1;
#endif
  switch (dtype) {
    case ScalarType::Float:
#if defined(__AVX512F__)
      if (is_zen5_or_later()) return kAnyNumber;
#endif
      return kUntilTorch<float>;
    case ScalarType::BFloat16:
#if defined(DLINFER_HAS_TILES)
      if (tiles_granted()) return kUntilTiles;
#endif
      if (lacks_for_torch(Instructions::kAvx512)) return kAnyNumber;
#if defined(__AVX512BF16__)
      if (is_zen5_or_later()) return kAnyNumber;
#endif
      return kUntilTorch<BFloat16>;
#if defined(DLINFER_HAS_HALF)
    case ScalarType::Half:
      if (lacks_for_torch(Instructions::kHalf)) return kAnyNumber;
      return kUntilTorch<Half>;
#endif
    default:
      return -1;
  }
}

// Whether so many rows of x are ours, few_rows.h's or those of a kernel for more.
inline bool takes_inputs(torch::headeronly::ScalarType dtype, int64_t inputs) {
  if (inputs <= max_inputs(dtype)) return true;
#if defined(DLINFER_HAS_TILES)
  return dtype == torch::headeronly::ScalarType::BFloat16 && inputs <= kMaxTileInputs && tiles_granted();
#elif defined(DLINFER_HAS_FLOAT_BLOCKS)
  return max_inputs(dtype) >= 0;
#else
  return false;
#endif
}

// The most rows of x that few_rows.h takes of a packed weight. Tiles and torch read plain ones, and to unpack a weight
// into memory takes longer than to read it, so that only many rows pay for it.
inline int64_t max_packed_inputs() {
  constexpr int64_t kFewest = 32;
  return std::max(max_inputs(torch::headeronly::ScalarType::BFloat16), kFewest);
}

}  // namespace dlinfer
