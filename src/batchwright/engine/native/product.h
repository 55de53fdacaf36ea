// Products of rows with a weight that was packed once (weight_panels.py).
//
// The columns of the product lie in panels of 32, two vectors: for each unit of the inputs 32 units, one for each column.
// As many rows as fill the registers are multiplied with a panel at a time: tile_512.h and tile_widened.h, by processor. An
// output is one sum over the inputs in their order, whatever the number of rows, so it is bitwise the same in any company.
//
// Inputs are bfloat16, two to a unit, summed in float; or int8, four to a unit, summed exactly: each row and each column
// has a scale. Some processors multiply unsigned with signed bytes, so a row holds its values + 128, and 128 times the
// sum of the column is taken off again.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "quantization.h"
#include "ranges.h"
#include "tile.h"

namespace bw {

// Panels that are used together stay in the second-level cache while the next ones come into it.
constexpr int64_t kGroupBytes = 128 * 1024;

struct Linear {
  const uint32_t* panels;  // [panels][units of inputs][kPanel]
  const float* bias;       // [outputs] or null
  const float* scales;     // int8: [outputs padded to panels]
  const int32_t* sums;     // int8: [outputs padded to panels], 128 * sum over the inputs
  int64_t inputs, outputs, panel_bytes;
  int64_t bits;  // of the numbers of a weight in groups (grouped.h)
};

// Rows of `inputs` values each, one after another.
template <class E>
struct Rows {
  const E* values;
  const float* scales;  // int8: of each row
  int64_t count;
};

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

// Bytes ahead of what is multiplied that rows of a single tile fetch: measured. They wait for memory, which is fastest in
// long streams.
constexpr int64_t kNear = 6144;

// The groups of panels of a product: a thread goes through one for each tile of rows before it turns to the next.
class Groups {
 public:
  // `threads`: how many begin at the same time, each with a range of its own.
  Groups(const Linear& w, int threads)
      : memory_(reinterpret_cast<const char*>(w.panels)), bytes_(w.panel_bytes),
        panels_((w.outputs + kPanel - 1) / kPanel), threads_(threads) {
    const int64_t fitting = std::max<int64_t>(1, kGroupBytes / bytes_);
    const int64_t least = (panels_ + fitting - 1) / fitting;
    count_ = std::min(panels_, (least + threads - 1) / threads * threads);  // as many for each thread
  }

  int64_t count() const { return count_; }
  int64_t first(int64_t group) const { return group * panels_ / count_; }
  const char* panel(int64_t number) const { return memory_ + number * bytes_; }

  // Whether a thread turns to the next product after this group.
  bool ends_range(int64_t group) const {
    return group + 1 == range_begin(count_, range_of(group, count_, threads_) + 1, threads_);
  }

  // What the thread needs after this group; `next` are those of the next product.
  const char* after(int64_t group, const Groups& next) const {
    if (!ends_range(group)) return panel(first(group + 1));
    const int64_t range = range_of(group, count_, threads_);
    return next.panel(next.first(range_begin(next.count_, range, threads_)));
  }

 private:
  const char* memory_;
  int64_t bytes_, panels_, count_;
  int threads_;
};

// Fetches the beginning of what comes after a group that few rows were multiplied with.
inline void fetch_near(const char* from) {
  for (int64_t at = 0; at < kNear; at += kLine) __builtin_prefetch(from + at, 0, 2);
}

// The product of rows with a weight, cut in groups of columns. `next` is the weight that is needed after it: its beginning
// is fetched meanwhile. `threads`: how many begin it at the same time.
template <class E>
class GroupedProduct {
 public:
  GroupedProduct(const Linear& w, const Rows<E>& x, const Linear& next, int threads)
      : w_(w), x_(x), units_(w.inputs / kPer), groups_(w, threads), next_(next, threads) {}

  int64_t count() const { return groups_.count(); }

  // `done(row, column, low, high)` gets the outputs column..column+15 and +16..+31 of a row.
  template <class Done>
  void compute(int64_t group, const Done& done) const {
    const int64_t tiles = (x_.count + kMostRows<E> - 1) / kMostRows<E>, bytes = w_.panel_bytes;
    const int64_t first = groups_.first(group), last = groups_.first(group + 1);
    const char* after = groups_.after(group, next_);
    const uint32_t* rows = reinterpret_cast<const uint32_t*>(x_.values);
    thread_local std::vector<uint32_t> room;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t from = t * x_.count / tiles, count = (t + 1) * x_.count / tiles - from;
      const uint32_t* inputs = tile_inputs<E>(rows + from * units_, count, units_, room);
      for (int64_t p = first; p < last; ++p) {
        const char* panel = groups_.panel(p);
        typename Sum<E>::Vec sums[2 * kMostRows<E>];
        if (tiles == 1) {
          multiply_tile<E, true>(count, inputs, units_, panel, panel + kNear, kPanel * 4, sums);
        } else {
          multiply_tile<E, false>(count, inputs, units_, panel, after + (p - first) * bytes + t * bytes / tiles,
                                  piece_bytes(kPanel * 4, tiles), sums);
        }
        for (int64_t r = 0; r < count; ++r) {
          const int64_t column = p * kPanel;
          done(from + r, column, finished(sums[2 * r], w_, x_, from + r, column),
               finished(sums[2 * r + 1], w_, x_, from + r, column + kLanes));
        }
      }
    }
    if (tiles == 1 && groups_.ends_range(group)) fetch_near(after);
  }

 private:
  static constexpr int64_t kPer = 4 / sizeof(E);

  const Linear& w_;
  const Rows<E> x_;
  const int64_t units_;
  const Groups groups_, next_;
};

// For each thread of a team, whose ranges `shares` are; `round` as there. It returns when all is done.
template <class E, class Done>
void multiply(const Linear& w, const Rows<E>& x, const Linear& next, Ranges& shares, int team, uint32_t round,
              const Done& done) {
  const GroupedProduct<E> product(w, x, next, team);
  shares.share(product.count(), omp_get_thread_num(), round, [&](int64_t group) { product.compute(group, done); });
#pragma omp barrier
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

template <int N, class T>
void mix(const T* x, float* out, int64_t dim) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(N));
  for (int64_t d = 0; d < dim; d += N * kLanes) {
    VecF v[N];
#pragma GCC unroll 32
    for (int i = 0; i < N; ++i) v[i] = load(x + d + i * kLanes);
    hadamard<N>(v);
#pragma GCC unroll 32
    for (int i = 0; i < N; ++i) store(out + d + i * kLanes, v[i] * scale);
  }
}

// The Hadamard transform of each `vectors` vectors, lane by lane; `vectors` is a power of two up to 32, `out` may be `x`.
template <class T>
void mix(const T* x, float* out, int64_t dim, int64_t vectors) {
  switch (vectors) {
    case 1: return mix<1>(x, out, dim);
    case 2: return mix<2>(x, out, dim);
    case 4: return mix<4>(x, out, dim);
    case 8: return mix<8>(x, out, dim);
    case 16: return mix<16>(x, out, dim);
    case 32: return mix<32>(x, out, dim);
  }
}

// x [dim] as bytes + 128, the largest 127. Returns the scale that gives the values back.
template <class T>
float quantize(const T* x, int64_t dim, u8* out) {
  const Quantization found = quantization_of(x, dim, 127.0f);
  for (int64_t d = 0; d < dim; d += kLanes) store_bytes(out + d, rounded(load(x + d) * found.inverse) + 128);
  return found.scale;
}

// 16 values that `quantize` has rounded, without their scale.
inline VecF load_rounded(const u8* from) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, VecI) - 128, VecF);
}

}  // namespace bw
