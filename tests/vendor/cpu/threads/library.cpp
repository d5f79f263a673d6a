// The team of threads alone, with bodies that show what it does; Python calls them through ctypes.
#include "threads/team.cpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

using dlinfer::parallel_for;

namespace {

void nap(int64_t microseconds) {
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace

extern "C" {

// How often a helper fetches before there is nothing left to, of so many bytes that so many threads will share.
int64_t fetches(int64_t bytes, int64_t threads) {
  static const char memory = 0;  // of which a hint may be wrong
  dlinfer::ComingWork work;
  work.set(&memory, bytes, threads);
  int64_t times = 0;
  while (work.fetch()) ++times;
  return times;
}

void will_share(const void* data, int64_t bytes) { dlinfer::will_share(data, bytes); }

void set_threads(uint32_t threads) { torch::stable::threads_wanted = threads; }

// Adds 1 to each of counts[begin] to counts[end - 1], which are not atomic: no two threads may get one of them.
void count(int64_t begin, int64_t end, int64_t grain, int64_t microseconds, int64_t* counts) {
  parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) ++counts[i];
    nap(microseconds);
  });
}

// The shortest range but the last, of ranges that have to be one behind the other.
int64_t shortest(int64_t begin, int64_t end, int64_t grain) {
  std::atomic<int64_t> least{INT64_MAX};
  parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    if (last == end) return;
    for (int64_t seen = least; last - first < seen && !least.compare_exchange_weak(seen, last - first);) {
    }
  });
  return least;
}

// Threads that took part in a job of so many naps.
int64_t threads_met(int64_t naps) {
  std::mutex mutex;
  std::set<std::thread::id> met;
  parallel_for(0, naps, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) nap(1000);
    const std::lock_guard lock(mutex);
    met.insert(std::this_thread::get_id());
  });
  return int64_t(met.size());
}

// A job in each part of a job; the inner ones have to stay in the thread of theirs. Returns how many did not.
int64_t nested(int64_t outer, int64_t inner, int64_t* counts) {
  std::atomic<int64_t> strayed{0};
  parallel_for(0, outer, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto mine = std::this_thread::get_id();
      parallel_for(0, inner, 1, [&](int64_t begin, int64_t end) {
        if (std::this_thread::get_id() != mine) ++strayed;
        for (int64_t k = begin; k < end; ++k) ++counts[i * inner + k];
      });
    }
  });
  return strayed;
}

// A body that throws at an index, where at -1 everywhere. Whether the caller gets what it threw; `begun` are the ranges.
int64_t fails(int64_t end, int64_t at, int64_t microseconds, int64_t* begun) {
  std::atomic<int64_t> ranges{0};
  bool caught = false;
  try {
    parallel_for(0, end, 1, [&](int64_t first, int64_t last) {
      ++ranges;
      nap(microseconds);
      if (at == -1 || (first <= at && at < last)) throw std::runtime_error("a planted fault");
    });
  } catch (const std::runtime_error& error) {
    caught = error.what() == std::string("a planted fault");
  }
  *begun = ranges;
  return caught;
}

// Whether a thread of the team, which naps meanwhile, flushes what is near zero just as its caller does.
int64_t flushes_as_caller(int64_t naps) {
  std::atomic<int64_t> differ{0};
  const volatile float tiny = 1e-38f;
  const bool mine = tiny * 0.1f == 0.0f;
  parallel_for(0, naps, 1, [&](int64_t first, int64_t last) {
    const volatile float small = 1e-38f;
    if ((small * 0.1f == 0.0f) != mine) ++differ;
    for (int64_t i = first; i < last; ++i) nap(1000);
  });
  return differ == 0;
}

void flush(int on) {
#if defined(__x86_64__)
  _mm_setcsr(on ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(on ? uint64_t(1) << 24 : uint64_t(0)));
#endif
}

}  // extern "C"
