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

template <class T>
constexpr int64_t kPerUnit = 4 / sizeof(T);

// The blocks of one chunk, which lie anywhere in memory.
struct Blocks {
  const uint32_t* keys[kChunk / kBlock];
  const uint32_t* values[kChunk / kBlock];
};

// scores[r][16·block ..) = query[r] · the 16 keys of a block, for B blocks side by side: a few rows alone would leave the
// multipliers waiting for their own last results.
// Meanwhile the keys of `ahead`, at the same places of the chunk that comes next, are fetched.
template <class T, int R, int B>
void score_blocks(const uint32_t* query, int64_t units, const Blocks& chunk, const Blocks& ahead, int64_t block,
                  float* scores) {
  VecF acc[R][B] = {};
  for (int64_t u = 0; u < units; ++u) {
    VecU k[B];
    for (int b = 0; b < B; ++b) {
      k[b] = load_units(chunk.keys[block + b] + u * kBlock);
      __builtin_prefetch(ahead.keys[block + b] + u * kBlock, 0, 3);
    }
    for (int r = 0; r < R; ++r)
      for (int b = 0; b < B; ++b) acc[r][b] = dot_units<T>(acc[r][b], k[b], query[r * units + u]);
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(scores + r * kChunk + (block + b) * kBlock, acc[r][b]);
}

template <class T, int R, int B>
int64_t score_from(const uint32_t* query, int64_t units, const Blocks& chunk, const Blocks& ahead, int64_t block,
                   int64_t blocks, float* scores) {
  if constexpr (R * B <= kSums)
    for (; block + B <= blocks; block += B) score_blocks<T, R, B>(query, units, chunk, ahead, block, scores);
  return block;
}

// The scores of R rows with the first `blocks` blocks of `chunk`.
template <class T, int R>
void score_strip(const uint32_t* query, int64_t units, const Blocks& chunk, const Blocks& ahead, int64_t blocks,
                 float* scores) {
  int64_t b = score_from<T, R, 8>(query, units, chunk, ahead, 0, blocks, scores);
  b = score_from<T, R, 4>(query, units, chunk, ahead, b, blocks, scores);
  b = score_from<T, R, 2>(query, units, chunk, ahead, b, blocks, scores);
  score_from<T, R, 1>(query, units, chunk, ahead, b, blocks, scores);
}

// out[r][column ..+16·J) += weights[r] · values, over the first `keys` keys of a chunk. No more is read: what lies behind
// them in the last block may be NaN. Meanwhile the values of `ahead` are fetched.
template <class T, int R, int J>
void add_columns(const uint32_t* weights, const Blocks& chunk, const Blocks& ahead, int64_t keys, int64_t head_dim,
                 int64_t column, float* out) {
  constexpr int64_t per = kPerUnit<T>, units = kBlock / per, stride = kChunk / per;
  VecF acc[R][J];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) acc[r][j] = load(out + r * head_dim + j * kLanes);
  const auto add = [&](const uint32_t* row, int64_t unit, uint32_t mask) {
    VecU v[J];
    for (int j = 0; j < J; ++j) v[j] = load_units(row + j * kLanes) & mask;
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < J; ++j) acc[r][j] = dot_units<T>(acc[r][j], v[j], weights[r * stride + unit]);
  };
  const int64_t whole = keys / per;
  for (int64_t first = 0; first < whole; first += units) {
    const uint32_t* values = chunk.values[first / units] + column;
    const uint32_t* later = ahead.values[first / units] + column;
    const int64_t count = std::min(units, whole - first);
    for (int64_t u = 0; u < count; ++u) {
      for (int j = 0; j < J; ++j) __builtin_prefetch(later + u * head_dim + j * kLanes, 0, 3);
      add(values + u * head_dim, first + u, ~0u);
    }
  }
  if (keys % per) add(chunk.values[whole / units] + whole % units * head_dim + column, whole, 0xffffu);
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < J; ++j) store(out + r * head_dim + j * kLanes, acc[r][j]);
}

template <class T, int R>
void add_values(const uint32_t* weights, const Blocks& chunk, const Blocks& ahead, int64_t keys, int64_t head_dim,
                float* out) {
  constexpr int J = R > 6 ? 2 : 4;
  int64_t column = 0;
  for (; column + J * kLanes <= head_dim; column += J * kLanes)
    add_columns<T, R, J>(weights, chunk, ahead, keys, head_dim, column, out + column);
  for (; column < head_dim; column += kLanes)
    add_columns<T, R, 1>(weights, chunk, ahead, keys, head_dim, column, out + column);
}

// A strip of `rows` rows: scores [rows][kChunk] of query [rows][units].
template <class T, int... R>
void score_strip(int64_t rows, const uint32_t* query, int64_t units, const Blocks& chunk, const Blocks& ahead,
                 int64_t blocks, float* scores, std::integer_sequence<int, R...>) {
  using Score = void (*)(const uint32_t*, int64_t, const Blocks&, const Blocks&, int64_t, float*);
  static constexpr Score strips[] = {score_strip<T, R + 1>...};
  strips[rows - 1](query, units, chunk, ahead, blocks, scores);
}

// A strip of `rows` rows: weights [rows][kChunk] of T, out [rows][head_dim].
template <class T, int... R>
void add_values(int64_t rows, const uint32_t* weights, const Blocks& chunk, const Blocks& ahead, int64_t keys,
                int64_t head_dim, float* out, std::integer_sequence<int, R...>) {
  using Add = void (*)(const uint32_t*, const Blocks&, const Blocks&, int64_t, int64_t, float*);
  static constexpr Add strips[] = {add_values<T, R + 1>...};
  strips[rows - 1](weights, chunk, ahead, keys, head_dim, out);
}

}  // namespace bw
