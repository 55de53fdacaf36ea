// The two products of attention, for a strip: some query rows that go through the same chunk of keys side by side.
#pragma once

#include <algorithm>
#include <utility>

#include "row_pointers.h"
#include "units.h"

namespace bw {

constexpr int64_t kBlock = 16;   // keys in a block: one vector
constexpr int64_t kChunk = 128;  // keys between two rescalings
// bfloat16 queries over keys and values of 8 bits. Each key and each value of a head has a scale, the greatest of its
// numbers / 127. Queries and softmax weights are rounded to 16 bits, products are summed exactly.
struct Int8 {};

// How a cache of T is read. A unit holds the numbers that are multiplied together. What one head keeps of a block is units
// of `kUnitBytes` for each of 16 lanes and, if kScaled, a float32 scale for each key.
template <class T>
struct Cached : Units<T> {
  using Row = T;  // type of queries and outputs
  static constexpr int64_t kPerUnit = 4 / sizeof(T), kUnitBytes = 64;
  static constexpr bool kScaled = false;
  static RegU load(const char* from) { return load_as<RegU>(from); }
};

template <>
struct Cached<Int8> : Units<Shorts> {
  using Row = bf16;
  static constexpr int64_t kPerUnit = 2, kUnitBytes = 32;
  static constexpr bool kScaled = true;
  static RegU load(const char* from) { return load_bytes_as_shorts(from); }
};

// Most rows of a strip. With two registers of sums for each nearly all are taken; widening bfloat16 takes some more.
template <class T>
constexpr int64_t kStrip = kWidth == 16 ? 12 : Cached<T>::kParts == 1 ? 6 : 4;
template <class T>
constexpr int64_t kSums = 2 * kStrip<T>;

template <class T>
constexpr int64_t kPerUnit = Cached<T>::kPerUnit;

// Bytes that one head keeps of a block, of keys or of values.
template <class T>
constexpr int64_t head_bytes(int64_t head_dim) {
  const int64_t units = kBlock * head_dim / (kLanes * kPerUnit<T>);
  return units * Cached<T>::kUnitBytes + (Cached<T>::kScaled ? kBlock * static_cast<int64_t>(sizeof(float)) : 0);
}

// What one head keeps of a block; blocks lie anywhere in memory.
struct Block {
  const char* keys;
  const char* values;
};

// Blocks that are read, one after another, and `ahead` blocks behind each the one that is fetched meanwhile.
struct Blocks {
  const Block* first;
  int64_t ahead;

  const Block& operator[](int64_t b) const { return first[b]; }
  const Block& later(int64_t b) const { return first[b + ahead]; }
  Blocks from(int64_t b) const { return {first + b, ahead}; }
};

// The scales of what a head keeps of a block, which lie at the end of it.
template <class T>
const float* block_scales(const char* block, int64_t head_dim) {
  return reinterpret_cast<const float*>(block + head_bytes<T>(head_dim)) - kBlock;
}

// scores[r][16·block ..) = query[r] · the 16 keys of a block, for B blocks side by side: a few rows alone would leave the
// multipliers waiting for their own last results.
template <class T, int R, int B>
void score_blocks(const uint32_t* query, int64_t head_dim, const Blocks& blocks, float* scores) {
  using C = Cached<T>;
  constexpr int V = B * kRegisters;
  constexpr int64_t bytes = C::kUnitBytes / kRegisters;
  const int64_t units = head_dim / C::kPerUnit;
  typename C::Sum acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = typename C::Sum{};
  const char* keys[B];
  for (int b = 0; b < B; ++b) {
    keys[b] = blocks[b].keys;
    if constexpr (C::kScaled) {
      __builtin_prefetch(block_scales<T>(blocks.later(b).keys, head_dim), 0, 2);
      __builtin_prefetch(block_scales<T>(blocks.later(b).values, head_dim), 0, 2);
    }
  }
  RowPointers<R> at(query, units);
  // The later blocks are fetched one after another: a pointer to each of them would leave too few registers.
  for (int b = 0; b < B; ++b) {
    const char* later = blocks.later(b).keys;
    for (int64_t u = b * units / B; u < (b + 1) * units / B; ++u, later += B * C::kUnitBytes) {
      // Into the second-level cache: the first one can wait for few lines at a time. With numbers of 8 bits each line is
      // fetched twice, which is faster than once: measured.
      for (int i = 0; i < B; ++i) __builtin_prefetch(later + i * C::kUnitBytes, 0, 2);
#pragma GCC unroll 2
      for (int part = 0; part < C::kParts; ++part) {
        typename C::Part k[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
          k[v] = C::part(C::load(keys[v / kRegisters] + u * C::kUnitBytes + v % kRegisters * bytes), part);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const typename C::Part q = C::part(RegU{} + *at[r], part);
#pragma GCC unroll 16
          for (int v = 0; v < V; ++v) acc[r][v] = C::add(acc[r][v], k[v], q);
        }
      }
      at.advance(1);
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < V; ++v) {
    [[maybe_unused]] RegF scales;
    if constexpr (C::kScaled)
      scales = load_as<RegF>(block_scales<T>(blocks[v / kRegisters].keys, head_dim) + v % kRegisters * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float* to = scores + r * kChunk + v * kWidth;
      if constexpr (C::kScaled) store_register(to, __builtin_convertvector(acc[r][v], RegF) * scales);
      else store_register(to, acc[r][v]);
    }
  }
}

template <class T, int R, int B>
int64_t score_from(const uint32_t* query, int64_t head_dim, const Blocks& blocks, int64_t block, int64_t count,
                   float* scores) {
  if constexpr (R * B * kRegisters <= kSums<T>)
    for (; block + B <= count; block += B)
      score_blocks<T, R, B>(query, head_dim, blocks.from(block), scores + block * kBlock);
  return block;
}

// The scores of R rows with `count` blocks.
template <class T, int R>
void score_strip(const uint32_t* query, int64_t head_dim, const Blocks& blocks, int64_t count, float* scores) {
  int64_t b = score_from<T, R, 8>(query, head_dim, blocks, 0, count, scores);
  b = score_from<T, R, 4>(query, head_dim, blocks, b, count, scores);
  b = score_from<T, R, 2>(query, head_dim, blocks, b, count, scores);
  score_from<T, R, 1>(query, head_dim, blocks, b, count, scores);
}

// out[r][column ..+16·J) += weights[r] · values, over the first `keys` keys of `blocks`; Int8: times scales[r]. No more is
// read: what lies behind them in the last block may be NaN.
template <class T, int R, int J>
void add_columns(const uint32_t* weights, const float* scales, const Blocks& blocks, int64_t keys, int64_t head_dim,
                 int64_t column, float* out) {
  using C = Cached<T>;
  constexpr int V = J * kRegisters;
  constexpr int64_t per = C::kPerUnit, units = kBlock / per, stride = kChunk / per, bytes = C::kUnitBytes;
  const int64_t row_bytes = head_dim / kLanes * bytes, from = column / kLanes * bytes;
  typename C::Sum acc[R][V];
  RowPointers<R, float> to(out, head_dim);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      if constexpr (C::kScaled) acc[r][v] = typename C::Sum{};
      else acc[r][v] = load_as<RegF>(to[r] + v * kWidth);
    }
  const auto add = [&](const char* row, int64_t unit, uint32_t mask) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int part = 0; part < C::kParts; ++part) {
      typename C::Part values[V];
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) values[v] = C::part(C::load(row + v * bytes / kRegisters) & mask, part);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const typename C::Part w = C::part(RegU{} + weights[r * stride + unit], part);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[r][v] = C::add(acc[r][v], values[v], w);
      }
    }
  };
  const int64_t whole = keys / per;
  for (int64_t first = 0; first < whole; first += units) {
    const char* values = blocks[first / units].values + from;
    const char* later = blocks.later(first / units).values + from;
    const int64_t count = std::min(units, whole - first);
    for (int64_t u = 0; u < count; ++u) {
      for (int j = 0; j < J; ++j) __builtin_prefetch(later + u * row_bytes + j * bytes, 0, 2);
      add(values + u * row_bytes, first + u, ~0u);
    }
  }
  if (keys % per) add(blocks[whole / units].values + whole % units * row_bytes + from, whole, 0xffffu);
  to.advance(0);  // or compilers keep a pointer for each row during the loop
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      float* sums = to[r] + v * kWidth;
      if constexpr (C::kScaled)
        store_register(sums, multiply_add(load_register(sums), __builtin_convertvector(acc[r][v], RegF), spread(scales[r])));
      else
        store_register(sums, acc[r][v]);
    }
}

template <class T, int R>
void add_values(const uint32_t* weights, const float* scales, const Blocks& blocks, int64_t keys, int64_t head_dim,
                float* out) {
  constexpr int most = kSums<T> / (R * kRegisters), J = most >= 4 ? 4 : most >= 2 ? 2 : 1;
  int64_t column = 0;
  for (; column + J * kLanes <= head_dim; column += J * kLanes)
    add_columns<T, R, J>(weights, scales, blocks, keys, head_dim, column, out + column);
  for (; column < head_dim; column += kLanes)
    add_columns<T, R, 1>(weights, scales, blocks, keys, head_dim, column, out + column);
}

// A strip of `rows` rows: scores [rows][kChunk] of query [rows][units].
template <class T, int... R>
void score_strip(int64_t rows, const uint32_t* query, int64_t head_dim, const Blocks& blocks, int64_t count,
                 float* scores, std::integer_sequence<int, R...>) {
  using Score = void (*)(const uint32_t*, int64_t, const Blocks&, int64_t, float*);
  static constexpr Score strips[] = {score_strip<T, R + 1>...};
  strips[rows - 1](query, head_dim, blocks, count, scores);
}

// A strip of `rows` rows: weights [rows][kChunk] of T, out [rows][head_dim].
template <class T, int... R>
void add_values(int64_t rows, const uint32_t* weights, const float* scales, const Blocks& blocks, int64_t keys,
                int64_t head_dim, float* out, std::integer_sequence<int, R...>) {
  using Add = void (*)(const uint32_t*, const float*, const Blocks&, int64_t, int64_t, float*);
  static constexpr Add strips[] = {add_values<T, R + 1>...};
  strips[rows - 1](weights, scales, blocks, keys, head_dim, out);
}

}  // namespace bw
