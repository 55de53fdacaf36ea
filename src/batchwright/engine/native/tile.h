// What is multiplied at a time: a few rows with a panel of 32 columns. The processor decides how.
#pragma once

#include <utility>
#include <vector>

#include "units.h"

namespace bw {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kLine = 64;  // bytes of a line of the caches
// Up to so many rows only wait for memory, and what the processor fetches by itself comes soonest: measured.
constexpr int kRowsOfStream = 4;

// Bytes of each of `count` pieces that together are no less than `bytes`: what tiles fetch of a panel leaves no gap.
constexpr int64_t piece_bytes(int64_t bytes, int64_t count) { return (bytes + count - 1) / count; }

struct u8 {
  uint8_t bits;
};

// Vectors of sums of products of E.
template <class E>
struct Sum;

template <>
struct Sum<bf16> {
  using Vec = VecF;
};

template <>
struct Sum<u8> {
  using Vec = VecI;
};

}  // namespace bw

#if defined(BW_BFLOAT16)
#include "tile_512.h"
#else
#include "tile_widened.h"
#endif

namespace bw {

// A tile of `count` rows.
template <class E, bool Near, int... R>
void multiply_tile(int64_t count, const uint32_t* rows, int64_t units, const char* panel, const char* ahead,
                   int64_t step, typename Sum<E>::Vec* sums, std::integer_sequence<int, R...>) {
  using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, const char*, int64_t, typename Sum<E>::Vec*);
  static constexpr Tile tiles[] = {multiply_tile<E, R + 1, Near>...};
  tiles[count - 1](rows, units, reinterpret_cast<const uint32_t*>(panel), ahead, step, sums);
}

template <class E, bool Near>
void multiply_tile(int64_t count, const uint32_t* rows, int64_t units, const char* panel, const char* ahead,
                   int64_t step, typename Sum<E>::Vec* sums) {
  multiply_tile<E, Near>(count, rows, units, panel, ahead, step, sums,
                         std::make_integer_sequence<int, kMostRows<E>>());
}

}  // namespace bw
