// Tiles for processors with vectors of 256 bits that multiply floats, and pairs of 16-bit numbers: AVX2 with FMA.
// bfloat16 is widened as it is multiplied, exactly, and so are bytes; rows are widened before, once for all panels.
#pragma once

namespace bw {

#if defined(__AVX2__) && defined(__FMA__)
constexpr bool kHasProducts = true;
#else
constexpr bool kHasProducts = false;
#endif
// Two vectors of sums for each row, and the panel's, fill 16 registers; widening and adding bytes takes more of them.
template <class E>
constexpr int64_t kMostRows = std::is_same_v<E, bf16> ? 6 : 4;

typedef float Floats __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(32), aligned(4), may_alias));
typedef int16_t Numbers __attribute__((vector_size(32), aligned(4), may_alias));

inline Floats add_products(Floats acc, Floats a, Floats b) {
#if defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc);
#else
  return acc + a * b;
#endif
}

inline Ints add_products(Ints acc, Numbers a, Numbers b) {
#if defined(__AVX2__)
  return acc + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const Ints x = (Ints)a, y = (Ints)b;
  return acc + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

inline Ints load_ints(const uint32_t* from) {
  Ints out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// A unit holds two parts, which are multiplied one after the other: of bfloat16 a value each, of bytes every other one.
template <class E>
struct Parts;

template <>
struct Parts<bf16> {
  using Acc = Floats;
  static Floats first(Ints unit) { return (Floats)(unit << 16); }
  static Floats second(Ints unit) { return (Floats)(unit & static_cast<int32_t>(0xffff0000)); }
  static void widen(uint32_t unit, uint32_t* out) {
    out[0] = unit << 16;
    out[1] = unit & 0xffff0000u;
  }
};

template <>
struct Parts<u8> {
  using Acc = Ints;
  static Numbers first(Ints unit) { return (Numbers)unit << 8 >> 8; }
  static Numbers second(Ints unit) { return (Numbers)unit >> 8; }
  static void widen(uint32_t unit, uint32_t* out) {
    out[0] = unit & 0x00ff00ffu;
    out[1] = unit >> 8 & 0x00ff00ffu;
  }
};

// The rows of a tile as they are multiplied, each part of a unit by itself, in `room`.
template <class E>
const uint32_t* tile_inputs(const uint32_t* rows, int64_t count, int64_t units, std::vector<uint32_t>& room) {
  room.resize(2 * count * units);
  for (int64_t u = 0; u < count * units; ++u) Parts<E>::widen(rows[u], &room[2 * u]);
  return room.data();
}

// sums[r] of R rows with V vectors of the panel.
template <class E, int R, int V>
void multiply_columns(const uint32_t* rows, int64_t units, const uint32_t* panel, const char* ahead, int64_t step,
                      char* sums) {
  using P = Parts<E>;
  typename P::Acc acc[R][V] = {};
  for (int64_t u = 0; u < units; ++u) {
    const uint32_t* at = panel + u * kPanel;
    __builtin_prefetch(ahead + u * step, 0, 2);
    const auto add = [&](auto part, int64_t place) __attribute__((always_inline)) {
      decltype(part(Ints{})) weights[V];
      for (int v = 0; v < V; ++v) weights[v] = part(load_ints(at + 8 * v));
      for (int r = 0; r < R; ++r) {
        const Ints input = Ints{} + static_cast<int32_t>(rows[2 * (r * units + u) + place]);
        for (int v = 0; v < V; ++v) acc[r][v] = add_products(acc[r][v], weights[v], (decltype(weights[0] + weights[0]))input);
      }
    };
    add([](Ints unit) { return P::first(unit); }, 0);
    add([](Ints unit) { return P::second(unit); }, 1);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) std::memcpy(sums + r * kPanel * 4 + v * 32, &acc[r][v], 32);
}

// sums[r] = row r · panel. Meanwhile `ahead`, what is needed next, is fetched `step` bytes a unit.
template <class E, int R>
void multiply_tile(const uint32_t* rows, int64_t units, const uint32_t* panel, const char* ahead, int64_t step,
                   typename Sum<E>::Vec* sums) {
  constexpr int V = R < 3 ? 4 : 2;  // few rows alone would wait for their own last sums
  for (int64_t first = 0; first < kPanel; first += 8 * V)
    multiply_columns<E, R, V>(rows, units, panel + first, ahead + first * units * step / kPanel,
                              step * 8 * V / kPanel, reinterpret_cast<char*>(sums) + first * 4);
}

}  // namespace bw
