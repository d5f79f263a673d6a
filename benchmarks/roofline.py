"""What this machine can do at most: multiplications by the vector instructions that kernels use, and reading memory.

Measured by loops of their own, since products of libraries may be far below it: MKL's on AMD are. Seconds are those
that a thread had a CPU for, as other load on the machine takes turns with it.
"""

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from dlinfer.vendor.cpu import native

_SOURCE = r"""
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
using Floats = float __attribute__((vector_size(kBytes)));

inline Floats add_product(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

// Multiplications and additions that were done. Memory of kSums + 2 registers tells the compiler nothing about them.
extern "C" int64_t multiply(int64_t turns, bool pairs, Floats* memory) {
  constexpr int kSums = 12;
  Floats sums[kSums];
  const Floats a = memory[kSums], b = memory[kSums + 1];
  for (int s = 0; s < kSums; ++s) sums[s] = memory[s];
  const int64_t turn = 2 * kSums * kBytes / sizeof(float);
  int64_t done = turns * turn;
#if defined(__AVX512BF16__)
  if (pairs) {
    done *= 2;
    for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 12
      for (int s = 0; s < kSums; ++s) sums[s] = (Floats)_mm512_dpbf16_ps((__m512)sums[s], (__m512bh)a, (__m512bh)b);
    }
    turns = 0;
  }
#endif
  for (int64_t i = 0; i < turns; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) sums[s] = add_product(sums[s], a, b);
  }
  for (int s = 0; s < kSums; ++s) memory[s] = sums[s];
  return done;
}

extern "C" void read(const char* from, int64_t bytes, float* out) {
  Floats sums[4]{};
  for (int64_t i = 0; i + 4 * kBytes <= bytes; i += 4 * kBytes) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) sums[s] += *reinterpret_cast<const Floats*>(from + i + s * kBytes);
  }
  for (int s = 0; s < 4; ++s) *out += sums[s][0];
}
"""
_TURNS = 4_000_000  # so many that a thread's start is not seen
_MEMORY = 128 << 20  # bytes, beyond the caches


@functools.cache
def _library() -> ctypes.CDLL:
    """Compiled anew in each process, which takes a second. Raises BuildError where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "roofline.so"
        command = [*native._command(), "-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=_SOURCE, text=True, check=True, capture_output=True)
        return ctypes.CDLL(str(path))


@functools.cache
def _memory() -> Tensor:
    return torch.ones(_MEMORY // 4)


def _side_by_side(work: Callable[[int], int]) -> float:
    """What a thread does in a second of its own while as many are at work as torch would use.

    work: one thread's, by its index; gives how much it did.
    """

    def timed(index: int) -> tuple[int, float]:
        start = time.thread_time()
        done = work(index)
        return done, time.thread_time() - start

    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(timed, range(threads)))
    return sum(done for done, _ in results) / sum(seconds for _, seconds in results)


def flops(dtype: torch.dtype) -> float:
    """Multiplications and additions a thread's second at most; those of bfloat16 where the CPU has some for it."""
    call = _library().multiply
    call.restype = ctypes.c_int64
    pairs = ctypes.c_bool(dtype is torch.bfloat16)

    def work(_: int) -> int:
        registers = torch.zeros(64, 16)
        return call(ctypes.c_int64(_TURNS), pairs, ctypes.c_void_p(registers.data_ptr()))

    return _side_by_side(work)


def bandwidth() -> float:
    """Bytes a thread's second that can be read from memory, beyond the caches."""
    call, memory = _library().read, _memory()
    share = _MEMORY // torch.get_num_threads() // 1024 * 1024

    def work(index: int) -> int:
        result = ctypes.c_float()
        call(ctypes.c_void_p(memory.data_ptr() + index * share), ctypes.c_int64(share), ctypes.byref(result))
        return share

    return _side_by_side(work)
