// Paged attention over a ragged batch, parallel over (sequence, KV head, tile of query tokens).
//
// Each query row walks the keys from position 0 in chunks of kChunk, with an online softmax. What a row computes
// depends on its own keys alone, not on the tile, the chunk of the prompt or the batch that it came in: masked keys
// add exact zeros. So outputs are bitwise the same in any company.
//
// Cache layout, chosen so that both products read whole vectors (a "unit" is one float or two bfloat16, see simd.h):
//   keys   [block][kv head][unit of head_dim][key in block]
//   values [block][kv head][unit of keys][head_dim]
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace bw {

constexpr int64_t kBlock = 16;   // keys in a block: one vector
constexpr int64_t kChunk = 128;  // keys between two rescalings
constexpr int64_t kTileRows = 48;
constexpr float kNever = -std::numeric_limits<float>::infinity();

template <class T>
constexpr int64_t kPerUnit = 4 / sizeof(T);

struct Problem {
  const void* query;       // [rows][query_stride]
  const void* keys;
  const void* values;
  void* out;               // [rows][heads * head_dim]
  const int32_t* tables;   // [sequences][table_stride]
  const int32_t* starts;   // [sequences + 1]: first query row
  const int32_t* contexts; // [sequences]: keys, those of this step included
  int64_t sequences, query_stride, table_stride, heads, kv_heads, head_dim;
  int64_t window;  // keys a query sees, itself included; 0: all
  float scale, softcap;
};

struct Item {
  int32_t sequence, kv_head, token, tokens;
};

// The blocks of one chunk, which lie anywhere in memory.
struct Blocks {
  const uint32_t* keys[kChunk / kBlock];
  const uint32_t* values[kChunk / kBlock];
};

// scores[r][b·16 ..) = query[r] · the 16 keys of block b, for B blocks side by side: a few rows alone would leave the
// multipliers waiting for their own last results.
// Meanwhile the keys of `ahead`, at the same places of the chunk that comes next, are fetched.
template <class T, int R, int B>
void score_blocks(const uint32_t* query, int64_t units, const Blocks& chunk, const Blocks& ahead, int64_t block,
                  float* scores) {
  VecF acc[R][B] = {};
  for (int64_t u = 0; u < units; ++u) {
    for (int b = 0; b < B; ++b) {
      const VecU k = load_units(chunk.keys[block + b] + u * kBlock);
      __builtin_prefetch(ahead.keys[block + b] + u * kBlock, 0, 3);
      for (int r = 0; r < R; ++r) acc[r][b] = dot_units<T>(acc[r][b], k, query[r * units + u]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int b = 0; b < B; ++b) store(scores + r * kChunk + (block + b) * kBlock, acc[r][b]);
}

template <class T, int R, int B>
void score_rows(const uint32_t* query, int64_t units, const Blocks& chunk, const Blocks& ahead, int64_t blocks,
                float* scores) {
  int64_t b = 0;
  for (; b + B <= blocks; b += B) score_blocks<T, R, B>(query, units, chunk, ahead, b, scores);
  for (; b < blocks; ++b) score_blocks<T, R, 1>(query, units, chunk, ahead, b, scores);
}

// out[r][column..column+64) += weights[r] · values, over all keys of a chunk; meanwhile the values of `ahead` are fetched.
template <class T, int R>
void add_values(const uint32_t* weights, const Blocks& chunk, const Blocks& ahead, int64_t blocks, int64_t head_dim,
                int64_t column, float* out) {
  constexpr int64_t units = kBlock / kPerUnit<T>;
  VecF acc[R][4];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 4; ++j) acc[r][j] = load(out + r * head_dim + j * kLanes);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t u = 0; u < units; ++u) {
      const uint32_t* row = chunk.values[b] + u * head_dim + column;
      VecU v[4];
      for (int j = 0; j < 4; ++j) {
        v[j] = load_units(row + j * kLanes);
        __builtin_prefetch(ahead.values[b] + u * head_dim + column + j * kLanes, 0, 3);
      }
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < 4; ++j)
          acc[r][j] = dot_units<T>(acc[r][j], v[j], weights[r * kChunk + b * units + u]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < 4; ++j) store(out + r * head_dim + j * kLanes, acc[r][j]);
}

// The last head_dim % 64 columns, a vector at a time.
template <class T>
void add_values_tail(const uint32_t* weights, int64_t blocks, const uint32_t* const* values, int64_t head_dim,
                     int64_t rows, int64_t column, float* out) {
  constexpr int64_t units = kBlock / kPerUnit<T>;
  for (int64_t r = 0; r < rows; ++r) {
    VecF acc = load(out + r * head_dim);
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t u = 0; u < units; ++u)
        acc = dot_units<T>(acc, load_units(values[b] + u * head_dim + column), weights[r * kChunk + b * units + u]);
    store(out + r * head_dim, acc);
  }
}

// Computes one item after another; each thread has one, with scratch memory for the largest item.
template <class T>
class Tile {
 public:
  explicit Tile(const Problem& problem)
      : p_(problem), group_(problem.heads / problem.kv_heads), units_(problem.head_dim / kPerUnit<T>) {
    const int64_t most = std::max(kTileRows, group_);
    query_.resize(most * units_);
    out_.resize(most * p_.head_dim);
    last_.resize(kBlock / kPerUnit<T> * p_.head_dim);
    scores_.resize(most * kChunk);
    weights_.resize(most * kChunk);
    sums_.resize(most * kLanes);
    highest_.resize(most);
  }

  // From now on the keys and values of another layer.
  void read(const void* keys, const void* values, int64_t window) {
    p_.keys = keys;
    p_.values = values;
    p_.window = window;
  }

  // `next` is the item that this thread is likely to get next.
  void run(const Item& item, const Item& next) {
    begin(item);
    const int64_t last = position_ + item_.tokens;  // keys before this
    for (int64_t chunk = first_chunk(item); chunk < last; chunk += kChunk) {
      const int64_t blocks = (std::min(last - chunk, kChunk) + kBlock - 1) / kBlock;
      gather(item, chunk, chunk_);
      if (chunk + kChunk < last) gather(item, chunk + kChunk, ahead_);
      else gather(next, first_chunk(next), ahead_);
      hide_unwritten(chunk, blocks);
      score(blocks);
      for (int64_t r = 0; r < rows_; ++r) soften(r, chunk, blocks);
      accumulate(blocks);
    }
    for (int64_t r = 0; r < rows_; ++r) write(r);
  }

 private:
  void begin(const Item& item) {
    item_ = item;
    rows_ = item.tokens * group_;
    position_ = position(item);
    std::fill_n(highest_.begin(), rows_, kNever);
    std::fill_n(sums_.begin(), rows_ * kLanes, 0.0f);
    std::fill_n(out_.begin(), rows_ * p_.head_dim, 0.0f);
    for (int64_t r = 0; r < rows_; ++r)
      std::memcpy(&query_[r * units_], query_row(r), p_.head_dim * sizeof(T));
  }

  const T* query_row(int64_t r) const {
    const int64_t row = p_.starts[item_.sequence] + item_.token + r / group_;
    const int64_t head = item_.kv_head * group_ + r % group_;
    return static_cast<const T*>(p_.query) + row * p_.query_stride + head * p_.head_dim;
  }

  int64_t position(const Item& item) const {
    return p_.contexts[item.sequence] - (p_.starts[item.sequence + 1] - p_.starts[item.sequence]) + item.token;
  }

  // The first key of the first chunk that a row of the item sees.
  int64_t first_chunk(const Item& item) const {
    return p_.window > 0 ? std::max<int64_t>(0, position(item) - p_.window + 1) / kChunk * kChunk : 0;
  }

  // Places after the last block of the sequence get its table's padding, block 0.
  void gather(const Item& item, int64_t chunk, Blocks& to) const {
    const int64_t table = item.sequence * p_.table_stride, first = chunk / kBlock;
    for (int64_t b = 0; b < kChunk / kBlock; ++b) {
      const int64_t block = first + b < p_.table_stride ? p_.tables[table + first + b] : 0;
      const int64_t at = (block * p_.kv_heads + item.kv_head) * kBlock * units_;
      to.keys[b] = static_cast<const uint32_t*>(p_.keys) + at;
      to.values[b] = static_cast<const uint32_t*>(p_.values) + at;
    }
  }

  void hide_unwritten(int64_t chunk, int64_t blocks) {
    const int64_t filled = p_.contexts[item_.sequence] - (chunk + (blocks - 1) * kBlock);
    if (filled < kBlock) chunk_.values[blocks - 1] = without_rest(chunk_.values[blocks - 1], filled);
  }

  // The values of a block with zeros after the first `filled` keys. What an earlier owner of the block left there gets
  // a weight of zero, which would not hide its NaN.
  const uint32_t* without_rest(const uint32_t* values, int64_t filled) {
    constexpr int64_t per = kPerUnit<T>;
    const int64_t whole = filled / per * p_.head_dim;
    std::fill(last_.begin() + whole, last_.end(), 0);
    std::memcpy(last_.data(), values, whole * sizeof(uint32_t));
    if (filled % per)
      for (int64_t d = 0; d < p_.head_dim; ++d) last_[whole + d] = values[whole + d] & 0xffffu;
    return last_.data();
  }

  void score(int64_t blocks) {
    for (int64_t r = 0; r < rows_;) {
      const int64_t left = rows_ - r;
      const int64_t take = left >= 12 ? 12 : left >= 6 ? 6 : left >= 3 ? 3 : 1;
      const uint32_t* query = &query_[r * units_];
      float* to = &scores_[r * kChunk];
      if (take == 12) score_rows<T, 12, 1>(query, units_, chunk_, ahead_, blocks, to);
      else if (take == 6) score_rows<T, 6, 2>(query, units_, chunk_, ahead_, blocks, to);
      else if (take == 3) score_rows<T, 3, 4>(query, units_, chunk_, ahead_, blocks, to);
      else score_rows<T, 1, 8>(query, units_, chunk_, ahead_, blocks, to);
      r += take;
    }
  }

  // Scores become weights; the row's running maximum, sum and output are rescaled to the new maximum.
  void soften(int64_t r, int64_t chunk, int64_t blocks) {
    float* scores = &scores_[r * kChunk];
    const int32_t seen = static_cast<int32_t>(position_ + r / group_ + 1);  // keys up to its own position
    const int32_t from = p_.window > 0 ? std::max<int32_t>(0, seen - static_cast<int32_t>(p_.window)) : 0;
    const VecI lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    VecF most = broadcast(kNever);
    for (int64_t b = 0; b < blocks; ++b) {
      VecF s = load(scores + b * kBlock) * p_.scale;
      if (p_.softcap > 0)
        for (int64_t i = 0; i < kLanes; ++i) s[i] = p_.softcap * std::tanh(s[i] / p_.softcap);
      const VecI key = lane + static_cast<int32_t>(chunk + b * kBlock);
      s = select((VecI)((key < seen) & (key >= from)), s, broadcast(kNever));
      store(scores + b * kBlock, s);
      most = max(most, s);
    }
    const float highest = std::max(max(most), highest_[r]);
    if (highest == kNever) {  // nothing seen yet: all of the chunk lies before the window
      std::fill_n(weights_.begin() + r * kChunk, kChunk, 0u);
      return;
    }
    const float shrink = highest_[r] == kNever ? 0.0f : std::exp(highest_[r] - highest);
    highest_[r] = highest;
    VecF total = load(&sums_[r * kLanes]) * shrink;
    T* weights = reinterpret_cast<T*>(&weights_[r * kChunk]);
    for (int64_t b = 0; b < blocks; ++b) {
      const VecF w = exp(load(scores + b * kBlock) - highest);
      total += w;
      bw::store(weights + b * kBlock, w);
    }
    bw::store(&sums_[r * kLanes], total);
    if (shrink != 1.0f) {
      float* out = &out_[r * p_.head_dim];
      for (int64_t d = 0; d < p_.head_dim; d += kLanes) bw::store(out + d, load(out + d) * shrink);
    }
  }

  void accumulate(int64_t blocks) {
    const int64_t wide = p_.head_dim / 64 * 64;
    for (int64_t column = 0; column < wide; column += 64) {
      for (int64_t r = 0; r < rows_;) {
        const int64_t left = rows_ - r;
        float* out = &out_[r * p_.head_dim + column];
        const uint32_t* weights = &weights_[r * kChunk];
        if (left >= 6) { add<6>(weights, blocks, column, out); r += 6; }
        else if (left >= 3) { add<3>(weights, blocks, column, out); r += 3; }
        else { add<1>(weights, blocks, column, out); r += 1; }
      }
    }
    for (int64_t column = wide; column < p_.head_dim; column += kLanes)
      add_values_tail<T>(weights_.data(), blocks, chunk_.values, p_.head_dim, rows_, column, &out_[column]);
  }

  template <int R>
  void add(const uint32_t* weights, int64_t blocks, int64_t column, float* out) {
    add_values<T, R>(weights, chunk_, ahead_, blocks, p_.head_dim, column, out);
  }

  void write(int64_t r) {
    const int64_t row = p_.starts[item_.sequence] + item_.token + r / group_;
    const int64_t head = item_.kv_head * group_ + r % group_;
    T* to = static_cast<T*>(p_.out) + (row * p_.heads + head) * p_.head_dim;
    const float inverse = 1.0f / sum(load(&sums_[r * kLanes]));
    const float* out = &out_[r * p_.head_dim];
    for (int64_t d = 0; d < p_.head_dim; d += kLanes) bw::store(to + d, load(out + d) * inverse);
  }

  Problem p_;
  const int64_t group_, units_;
  Item item_{};
  int64_t rows_ = 0, position_ = 0;
  std::vector<uint32_t> query_, weights_, last_;
  std::vector<float> out_, scores_, sums_, highest_;
  Blocks chunk_{}, ahead_{};
};

// Later tiles see more keys: the longest work goes first, so that no thread is left with it at the end.
inline std::vector<Item> attention_items(const Problem& p) {
  const int64_t tokens = std::max<int64_t>(1, kTileRows / (p.heads / p.kv_heads));
  std::vector<Item> items;
  for (int64_t s = p.sequences; s-- > 0;) {
    const int32_t rows = p.starts[s + 1] - p.starts[s];
    for (int64_t token = (rows - 1) / tokens * tokens; token >= 0; token -= tokens)
      for (int32_t head = 0; head < p.kv_heads; ++head)
        items.push_back({static_cast<int32_t>(s), head, static_cast<int32_t>(token),
                         std::min<int32_t>(tokens, rows - static_cast<int32_t>(token))});
  }
  return items;
}

// For all threads of a team. A thread takes the KV heads of a sequence together, since they lie side by side.
template <class T>
void attend(Tile<T>& tile, const std::vector<Item>& items, int64_t heads, int threads) {
  const int64_t count = static_cast<int64_t>(items.size());
#pragma omp for schedule(dynamic, 1)
  for (int64_t first = 0; first < count; first += heads) {
    const Item& later = items[std::min(first + heads * threads, count - 1)];
    for (int64_t i = first; i < first + heads; ++i) tile.run(items[i], i + 1 < first + heads ? items[i + 1] : later);
  }
}

}  // namespace bw
