// Tiles for processors that multiply pairs of bfloat16, and four bytes at a time, in vectors of 512 bits.
#pragma once

#include <type_traits>
#include <vector>

#include "row_pointers.h"
#include "units.h"

namespace bw {

constexpr bool kHasProducts = true;
template <class E>
constexpr int64_t kMostRows = 12;  // two vectors of sums for each, and the panel's, fill 32 registers

// How many times as fast as bfloat16 it is.
template <class E>
constexpr double kProductRate = std::is_same_v<E, bf16> ? 1 : std::is_same_v<E, u8> ? 2 : 1.4;

// Rows are multiplied as they are.
template <class E>
const uint32_t* tile_inputs(const uint32_t* rows, int64_t, int64_t, std::vector<uint32_t>&) {
  return rows;
}

inline VecF add_products(VecF acc, VecU weights, VecU inputs) { return Units<bf16>::add(acc, weights, inputs); }

inline VecI add_products(VecI acc, VecU weights, VecU inputs) {
  return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)inputs, (__m512i)weights);
}

// sums[r] = row r · panel. Meanwhile `ahead` is fetched, `step` bytes a unit: what is `Near` is needed at once.
template <class E, int R, bool Near>
void multiply_tile(const uint32_t* rows, int64_t units, const uint32_t* panel, const char* ahead, int64_t step,
                   typename Sum<E>::Vec* sums) {
  typename Sum<E>::Vec low[R], high[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) low[r] = high[r] = typename Sum<E>::Vec{};
  RowPointers<R> at(rows, units);
  for (int64_t u = 0; u < units; ++u, at.advance(1), panel += kPanel, ahead += step) {
    const VecU left = load_as<VecU>(panel), right = load_as<VecU>(panel + kLanes);
    if constexpr (!Near) {
      __builtin_prefetch(ahead, 0, 2);
    } else if constexpr (R > kRowsOfStream) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + kLine, 0, 2);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VecU input = VecU{} + *at[r];
      low[r] = add_products(low[r], left, input);
      high[r] = add_products(high[r], right, input);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    sums[2 * r] = low[r];
    sums[2 * r + 1] = high[r];
  }
}

}  // namespace bw
