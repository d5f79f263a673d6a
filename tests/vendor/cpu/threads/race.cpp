// All that the team of threads can be asked, from many threads at once; for ThreadSanitizer, which needs no luck to see
// two of them meet. Ends with 0 where every sum is right.
#include "threads/library.cpp"

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

namespace {

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::_Exit(3);
}

// Results that a helper writes and the caller reads, in memory that the next round uses again.
void rounds(int caller, int times) {
  std::vector<int64_t> counts(1000);
  for (int round = 0; round < times; ++round) {
    const int64_t size = 1 + (round * 37 + caller * 11) % 1000;
    std::fill(counts.begin(), counts.end(), 0);
    count(0, size, 1 + round % 7, round % 50 == 0 ? 20 : 0, counts.data());
    expect(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == size, "a sum");
    if (round % 20 == caller % 20) {
      int64_t begun = 0;
      expect(fails(size + 8, round % size, 0, &begun) == 1, "an exception");
    }
    if (round % 30 == caller % 30) set_threads(1 + round % 6);
    if (round % 100 == 0) nap(400);  // longer than helpers stay awake
  }
}

}  // namespace

int main() {
  for (int callers : {1, 3, 12}) {
    std::vector<std::thread> threads;
    for (int caller = 0; caller < callers; ++caller) threads.emplace_back([=] { rounds(caller, 3000 / callers); });
    for (std::thread& one : threads) one.join();
  }
  std::puts("right");
}
