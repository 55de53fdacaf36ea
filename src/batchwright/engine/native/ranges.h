// Items that threads compute, each of them once. A thread takes those of its own range in their order, since memory is read
// fastest in long streams, and then what is left of others' ranges: it makes up for a thread that had to leave its core.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace bw {

// Waits until `reached()`: a moment without giving up the core, since most waits are short, and then asleep. A core that
// is asleep takes over another program's work from the core that is waited for; one that only yields does not.
template <class Reached>
void wait_until(const Reached& reached) {
  constexpr int64_t kSpins = 10000, kYields = 100;  // some 10 and 50 microseconds
  for (int64_t tries = 0; !reached(); ++tries) {
    if (tries >= kSpins + kYields) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    } else if (tries >= kSpins) {
      std::this_thread::yield();
    }
  }
}

// The first item of range `range` of `count`, of which the last one ends with all items.
inline int64_t range_begin(int64_t items, int64_t range, int64_t count) { return items * range / count; }

// The range that an item is in.
inline int64_t range_of(int64_t item, int64_t items, int64_t count) { return ((item + 1) * count - 1) / items; }

// Ranges that are dealt out again in every round. A thread begins a round when all have ended the one before.
class Ranges {
 public:
  explicit Ranges(int count) : taken_(count) {}

  // Calls `compute` with items until none of `items` is left, which may be before others have computed theirs. Rounds have
  // ascending numbers from 1 on.
  template <class Compute>
  void share(int64_t items, int thread, uint32_t round, const Compute& compute) {
    const int64_t count = taken_.size();
    for (int64_t ahead = 0; ahead < count; ++ahead) {
      const int64_t range = (thread + ahead) % count, begin = range_begin(items, range, count);
      const int64_t size = range_begin(items, range + 1, count) - begin;
      for (int64_t item; (item = taken_[range].next(round, size)) >= 0;) compute(begin + item);
    }
  }

 private:
  struct alignas(64) Taken {
    // The round, and how many were taken in it.
    std::atomic<uint64_t> state{0};

    // The next one of `size`, or -1.
    int64_t next(uint32_t round, int64_t size) {
      uint64_t seen = state.load(std::memory_order_relaxed), taken;
      do {
        taken = seen >> 32 == round ? seen & 0xffffffffu : 0;
        if (static_cast<int64_t>(taken) >= size) return -1;
      } while (!state.compare_exchange_weak(seen, uint64_t{round} << 32 | (taken + 1), std::memory_order_relaxed));
      return taken;
    }
  };

  std::vector<Taken> taken_;
};

// Items that any number of threads compute once.
class alignas(64) SharedItems {
 public:
  // `ranges`: how many threads begin at the same time.
  explicit SharedItems(int ranges) : ranges_(ranges) {}

  // For each thread that takes part: it returns when all `count` items are computed, by whichever thread.
  template <class Compute>
  void compute(int64_t count, int thread, const Compute& item) {
    ranges_.share(count, thread, 1, [&](int64_t i) {
      item(i);
      done_.fetch_add(1, std::memory_order_acq_rel);
    });
    wait_until([&] { return done_.load(std::memory_order_acquire) >= count; });
  }

 private:
  Ranges ranges_;
  std::atomic<int64_t> done_{0};
};

}  // namespace bw
