// The two products of attention, for a strip: up to 12 query rows that go through the same chunk of keys side by side.
#pragma once

#include <algorithm>
#include <utility>

#include "simd.h"

namespace bw {

constexpr int64_t kBlock = 16;   // keys in a block: one vector
constexpr int64_t kChunk = 128;  // keys between two rescalings
constexpr int64_t kStrip = 12;   // rows: two vectors of sums for each fill the registers
constexpr int64_t kSums = 24;

// bfloat16 queries over keys and values of 8 bits. Each key and each value of a head has a scale, the greatest of its
// numbers / 127. Queries and softmax weights are rounded to 16 bits, products are summed exactly.
struct Int8 {};

// How a cache of T is read. A unit holds the numbers that one multiplication takes for each of 16 lanes. What one head
// keeps of a block is `units` units and, if kScaled, a float32 scale for each key.
template <class T>
struct Cached {
  using Row = T;  // type of queries and outputs
  using Sum = VecF;
  static constexpr int64_t kPerUnit = 4 / sizeof(T), kUnitBytes = 64;
  static constexpr bool kScaled = false;
  static VecU load(const char* from) { return load_units(from); }
  static Sum dot(Sum acc, VecU a, uint32_t b) { return dot_units<T>(acc, a, b); }
};

template <>
struct Cached<Int8> {
  using Row = bf16;
  using Sum = VecI;
  static constexpr int64_t kPerUnit = 2, kUnitBytes = 32;
  static constexpr bool kScaled = true;
  static VecU load(const char* from) { return load_pairs(from); }
  static Sum dot(Sum acc, VecU a, uint32_t b) { return dot_pairs(acc, a, b); }
};

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
VecF block_scales(const char* block, int64_t head_dim) {
  return load(reinterpret_cast<const float*>(block + head_bytes<T>(head_dim)) - kBlock);
}

// scores[r][16·block ..) = query[r] · the 16 keys of a block, for B blocks side by side: a few rows alone would leave the
// multipliers waiting for their own last results.
template <class T, int R, int B>
void score_blocks(const uint32_t* query, int64_t head_dim, const Blocks& blocks, float* scores) {
  using C = Cached<T>;
  const int64_t units = head_dim / C::kPerUnit;
  typename C::Sum acc[R][B] = {};
  const char *keys[B], *later[B];
  for (int b = 0; b < B; ++b) keys[b] = blocks[b].keys, later[b] = blocks.later(b).keys;
  for (int64_t u = 0; u < units; ++u) {
    VecU k[B];
    for (int b = 0; b < B; ++b) {
      k[b] = C::load(keys[b] + u * C::kUnitBytes);
      __builtin_prefetch(later[b] + u * C::kUnitBytes, 0, 3);
    }
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) acc[r][b] = C::dot(acc[r][b], k[b], query[r * units + u]);
  }
  for (int b = 0; b < B; ++b) {
    [[maybe_unused]] VecF scales;
    if constexpr (C::kScaled) scales = block_scales<T>(blocks[b].keys, head_dim);
    for (int r = 0; r < R; ++r) {
      float* to = scores + r * kChunk + b * kBlock;
      if constexpr (C::kScaled) store(to, __builtin_convertvector(acc[r][b], VecF) * scales);
      else store(to, acc[r][b]);
    }
  }
}

template <class T, int R, int B>
int64_t score_from(const uint32_t* query, int64_t head_dim, const Blocks& blocks, int64_t block, int64_t count,
                   float* scores) {
  if constexpr (R * B <= kSums)
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
  constexpr int64_t per = C::kPerUnit, units = kBlock / per, stride = kChunk / per, bytes = C::kUnitBytes;
  const int64_t row_bytes = head_dim / kLanes * bytes, from = column / kLanes * bytes;
  typename C::Sum acc[R][J] = {};
  if constexpr (!C::kScaled)
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < J; ++j) acc[r][j] = load(out + r * head_dim + j * kLanes);
  const auto add = [&](const char* row, int64_t unit, uint32_t mask) {
    VecU v[J];
    for (int j = 0; j < J; ++j) v[j] = C::load(row + j * bytes) & mask;
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < J; ++j) acc[r][j] = C::dot(acc[r][j], v[j], weights[r * stride + unit]);
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
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) {
      float* to = out + r * head_dim + j * kLanes;
      if constexpr (C::kScaled)
        store(to, multiply_add(load(to), __builtin_convertvector(acc[r][j], VecF), broadcast(scales[r])));
      else
        store(to, acc[r][j]);
    }
  }
}

template <class T, int R>
void add_values(const uint32_t* weights, const float* scales, const Blocks& blocks, int64_t keys, int64_t head_dim,
                float* out) {
  constexpr int J = R > 6 ? 2 : 4;
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
