// Products of rows with a weight that was packed once (packing.py).
//
// The columns of the product lie in panels of 32, two vectors: for each unit of the inputs 32 units, one for each column.
// Up to 12 rows are multiplied with a panel at a time, which fills the registers. An output is one sum over the inputs in
// their order, whatever the number of rows, so it is bitwise the same in any company.
//
// Inputs are bfloat16, two to a unit, summed in float; or int8, four to a unit, summed exactly: each row and each column
// has a scale. The processor multiplies unsigned with signed bytes, so a row holds its values + 128, and 128 times the
// sum of the column is taken off again.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>

#include "quantization.h"

namespace bw {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kMostRows = 12;
constexpr int64_t kGroupBytes = 320 * 1024;  // panels that are used together stay in the second-level cache

struct u8 {
  uint8_t bits;
};

struct Linear {
  const uint32_t* panels;  // [panels][units of inputs][kPanel]
  const float* bias;       // [outputs] or null
  const float* scales;     // int8: [outputs padded to panels]
  const int32_t* sums;     // int8: [outputs padded to panels], 128 * sum over the inputs
  int64_t inputs, outputs;
};

// Rows of `inputs` values each, one after another.
template <class E>
struct Rows {
  const E* values;
  const float* scales;  // int8: of each row
  int64_t count;
};

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr bool kHasProducts = true;

inline VecI dot_bytes(VecI acc, VecU a, uint32_t b) {
  return (VecI)_mm512_dpbusd_epi32((__m512i)acc, _mm512_set1_epi32(static_cast<int32_t>(b)), (__m512i)a);
}
#else
constexpr bool kHasProducts = false;

inline VecI dot_bytes(VecI acc, VecU, uint32_t) { return acc; }
#endif

template <class E>
struct Sum;

template <>
struct Sum<bf16> {
  using Vec = VecF;
  static Vec add(Vec acc, VecU weights, uint32_t input) { return dot_units<bf16>(acc, weights, input); }
};

template <>
struct Sum<u8> {
  using Vec = VecI;
  static Vec add(Vec acc, VecU weights, uint32_t input) { return dot_bytes(acc, weights, input); }
};

// sums[r] = row r · panel. Meanwhile `ahead`, what is needed next, is fetched `step` bytes a unit.
template <class E, int R>
void multiply_tile(const uint32_t* rows, int64_t units, const uint32_t* panel, const char* ahead, int64_t step,
                   typename Sum<E>::Vec* sums) {
  typename Sum<E>::Vec low[R] = {}, high[R] = {};
  for (int64_t u = 0; u < units; ++u) {
    const VecU left = load_units(panel + u * kPanel), right = load_units(panel + u * kPanel + kLanes);
    __builtin_prefetch(ahead + u * step, 0, 2);
    for (int r = 0; r < R; ++r) {
      const uint32_t input = rows[r * units + u];
      low[r] = Sum<E>::add(low[r], left, input);
      high[r] = Sum<E>::add(high[r], right, input);
    }
  }
  for (int r = 0; r < R; ++r) {
    sums[2 * r] = low[r];
    sums[2 * r + 1] = high[r];
  }
}

template <class E, int... R>
void multiply_tile(int64_t count, const uint32_t* rows, int64_t units, const uint32_t* panel, const char* ahead,
                   int64_t step, typename Sum<E>::Vec* sums, std::integer_sequence<int, R...>) {
  using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, const char*, int64_t, typename Sum<E>::Vec*);
  static constexpr Tile tiles[] = {multiply_tile<E, R + 1>...};
  tiles[count - 1](rows, units, panel, ahead, step, sums);
}

inline VecF finished(VecF sum, const Linear& w, const Rows<bf16>&, int64_t, int64_t column) {
  return w.bias == nullptr ? sum : sum + load(w.bias + column);
}

inline VecF finished(VecI sum, const Linear& w, const Rows<u8>& x, int64_t row, int64_t column) {
  VecI offset;
  std::memcpy(&offset, w.sums + column, sizeof offset);
  const VecF exact = __builtin_convertvector(sum - offset, VecF);
  const VecF scaled = exact * x.scales[row] * load(w.scales + column);
  return w.bias == nullptr ? scaled : scaled + load(w.bias + column);
}

// The panels that a thread goes through for each tile of rows before it turns to the next group of them.
struct Groups {
  int64_t panels, count;

  Groups(int64_t panels, int64_t bytes, int threads) : panels(panels) {
    const int64_t fitting = std::max<int64_t>(1, kGroupBytes / bytes);
    const int64_t least = (panels + fitting - 1) / fitting;
    count = std::min(panels, (least + threads - 1) / threads * threads);  // as many for each thread
  }

  int64_t first(int64_t group) const { return group * panels / count; }
};

// For all threads of a team: `done(row, column, low, high)` gets the outputs column..column+15 and +16..+31 of a row.
// It returns when all are done. Meanwhile the beginning of `next`, the weight that is needed next, is fetched.
template <class E, class Done>
void multiply(const Linear& w, const Rows<E>& x, const Linear& next, int threads, const Done& done) {
  constexpr int64_t per = 4 / sizeof(E);
  const int64_t units = w.inputs / per, size = units * kPanel, bytes = size * 4;
  const Groups groups((w.outputs + kPanel - 1) / kPanel, bytes, threads);
  const int64_t tiles = (x.count + kMostRows - 1) / kMostRows;
  const uint32_t* rows = reinterpret_cast<const uint32_t*>(x.values);
#pragma omp for schedule(dynamic, 1)
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t first = groups.first(g), last = groups.first(g + 1), later = groups.first(g + threads) - first;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t from = t * x.count / tiles, count = (t + 1) * x.count / tiles - from;
      for (int64_t p = first; p < last; ++p) {
        const uint32_t* ahead = w.panels + (p + later) * size;
        if (p + later >= groups.panels) ahead = next.panels + (p + later - groups.panels) * size;
        typename Sum<E>::Vec sums[2 * kMostRows];
        multiply_tile<E>(count, rows + from * units, units, w.panels + p * size,
                         reinterpret_cast<const char*>(ahead) + t * bytes / tiles, kPanel * 4 / tiles, sums,
                         std::make_integer_sequence<int, kMostRows>());
        for (int64_t r = 0; r < count; ++r) {
          const int64_t column = p * kPanel;
          done(from + r, column, finished(sums[2 * r], w, x, from + r, column),
               finished(sums[2 * r + 1], w, x, from + r, column + kLanes));
        }
      }
    }
  }
}

// The Hadamard transform of N vectors, lane by lane, in place, without its scale.
template <int N>
inline __attribute__((always_inline)) void hadamard(VecF* x) {
  if constexpr (N > 1) {
    hadamard<N / 2>(x);
    hadamard<N / 2>(x + N / 2);
#pragma GCC unroll 16
    for (int v = 0; v < N / 2; ++v) {
      const VecF a = x[v], b = x[v + N / 2];
      x[v] = a + b;
      x[v + N / 2] = a - b;
    }
  }
}

template <int N>
void mix(float* x, int64_t dim) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(N));
  for (int64_t d = 0; d < dim; d += N * kLanes) {
    VecF v[N];
#pragma GCC unroll 32
    for (int i = 0; i < N; ++i) v[i] = load(x + d + i * kLanes);
    hadamard<N>(v);
#pragma GCC unroll 32
    for (int i = 0; i < N; ++i) store(x + d + i * kLanes, v[i] * scale);
  }
}

// The Hadamard transform of each `vectors` vectors, lane by lane, in place; `vectors` is a power of two up to 32.
inline void mix(float* x, int64_t dim, int64_t vectors) {
  switch (vectors) {
    case 2: return mix<2>(x, dim);
    case 4: return mix<4>(x, dim);
    case 8: return mix<8>(x, dim);
    case 16: return mix<16>(x, dim);
    case 32: return mix<32>(x, dim);
  }
}

// x [dim] as bytes + 128, the largest 127. Returns the scale that gives the values back.
template <class T>
float quantize(const T* x, int64_t dim, u8* out) {
  const Quantization found = quantization_of(x, dim, 127.0f);
  for (int64_t d = 0; d < dim; d += kLanes) store_bytes(out + d, rounded(load(x + d) * found.inverse) + 128);
  return found.scale;
}

}  // namespace bw
