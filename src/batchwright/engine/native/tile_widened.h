// Tiles for processors that multiply floats, and pairs of 16-bit numbers: AVX2 with FMA, AVX-512 without bfloat16.
// bfloat16 is widened as it is multiplied, exactly, and so are bytes; rows are widened before, once for all panels.
#pragma once

#include <type_traits>
#include <vector>

#include "units.h"

namespace bw {

#if defined(__AVX2__) && defined(__FMA__)
constexpr bool kHasProducts = true;
#else
constexpr bool kHasProducts = false;
#endif

// Two registers of sums for each row, and the panel's, take all registers; widening and adding bytes needs some more.
template <class E>
constexpr int64_t kMostRows = kWidth == 16 ? 12 : std::is_same_v<E, bf16> ? 6 : 4;

// How many times as fast as bfloat16 it is, measured with AVX2.
template <class E>
constexpr double kProductRate = std::is_same_v<E, bf16> ? 1 : 1.2;

// With more rows than this in a single tile, panels are prefetched by the program: measured. Registers of 256 bits read half
// of each line of a panel at a time, which the processor prefetches badly by itself.
constexpr int kUnfetchedRows = kWidth == 16 ? kRowsOfStream : 2;

// A unit holds two parts, which are multiplied one after the other: of bfloat16 a value each, of bytes every other one.
template <class E>
struct Widened;

template <>
struct Widened<bf16> : Units<float> {
  static RegF first(RegU unit) { return (RegF)(unit << 16); }
  static RegF second(RegU unit) { return (RegF)(unit & 0xffff0000u); }
  static void widen(uint32_t unit, uint32_t* out) {
    out[0] = unit << 16;
    out[1] = unit & 0xffff0000u;
  }
};

template <>
struct Widened<u8> : Units<Shorts> {
  typedef int16_t Numbers __attribute__((vector_size(kRegisterBytes)));
  static RegU first(RegU unit) { return (RegU)((Numbers)unit << 8 >> 8); }
  static RegU second(RegU unit) { return (RegU)((Numbers)unit >> 8); }
  static void widen(uint32_t unit, uint32_t* out) {
    out[0] = unit & 0x00ff00ffu;
    out[1] = unit >> 8 & 0x00ff00ffu;
  }
};

// The rows of a tile as they are multiplied, each part of a unit by itself, in `room`.
template <class E>
const uint32_t* tile_inputs(const uint32_t* rows, int64_t count, int64_t units, std::vector<uint32_t>& room) {
  room.resize(2 * count * units);
  for (int64_t u = 0; u < count * units; ++u) Widened<E>::widen(rows[u], &room[2 * u]);
  return room.data();
}

// sums[r] of R rows with V registers of the panel.
template <class E, int R, int V, bool Near>
void multiply_columns(const uint32_t* rows, int64_t units, const uint32_t* panel, const char* ahead, int64_t step,
                      char* sums) {
  using W = Widened<E>;
  using Part = typename W::Part;
  typename W::Sum acc[R][V] = {};
  const auto add = [&](const Part(&weights)[V], const uint32_t* inputs) __attribute__((always_inline)) {
    if constexpr (V > R) {
      Part input[R];
      for (int r = 0; r < R; ++r) input[r] = (Part)(RegU{} + inputs[r * 2 * units]);
      for (int v = 0; v < V; ++v)
        for (int r = 0; r < R; ++r) acc[r][v] = W::add(acc[r][v], weights[v], input[r]);
    } else {
      for (int r = 0; r < R; ++r) {
        const Part input = (Part)(RegU{} + inputs[r * 2 * units]);
        for (int v = 0; v < V; ++v) acc[r][v] = W::add(acc[r][v], weights[v], input);
      }
    }
  };
  for (int64_t u = 0; u < units; ++u) {
    const uint32_t* at = panel + u * kPanel;
    if constexpr (!Near) {
      __builtin_prefetch(ahead + u * step, 0, 2);
    } else if constexpr (R > kUnfetchedRows) {
      for (int line = 0; line < V * kRegisterBytes; line += kLine) __builtin_prefetch(ahead + u * step + line, 0, 2);
    }
    Part weights[V];
    for (int v = 0; v < V; ++v) weights[v] = W::first(load_as<RegU>(at + v * kWidth));
    add(weights, rows + 2 * u);
    for (int v = 0; v < V; ++v) weights[v] = W::second(load_as<RegU>(at + v * kWidth));
    add(weights, rows + 2 * u + 1);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store_register(sums + r * kPanel * 4 + v * kRegisterBytes, acc[r][v]);
}

// sums[r] = row r · panel. Meanwhile `ahead` is fetched, `step` bytes a unit: what is `Near` is needed at once.
template <class E, int R, bool Near>
void multiply_tile(const uint32_t* rows, int64_t units, const uint32_t* panel, const char* ahead, int64_t step,
                   typename Sum<E>::Vec* sums) {
  constexpr int whole = kPanel / kWidth;
  constexpr int V = R < (Near ? 4 : 3) ? whole : 2;  // few rows alone would wait for their own last sums
  for (int first = 0; first < kPanel; first += V * kWidth) {
    char* found = reinterpret_cast<char*>(sums) + first * 4;
    if constexpr (Near) {
      multiply_columns<E, R, V, Near>(rows, units, panel + first, ahead + first * 4, step, found);
    } else {
      multiply_columns<E, R, V, Near>(rows, units, panel + first, ahead + first * units * step / kPanel,
                                      piece_bytes(step * V, whole), found);
    }
  }
}

}  // namespace bw
