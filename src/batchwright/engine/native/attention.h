// Paged attention over a ragged batch, parallel over (sequences, KV head, tile of query tokens).
//
// Each query row walks the keys from position 0 in chunks of kChunk, with an online softmax. What a row computes
// depends on its own keys alone, not on the strip, the tile, the chunk of the prompt or the batch that it came in:
// masked keys that are finite add exact zeros. So finite outputs are bitwise the same in any company.
//
// Cache layout, chosen so that both products read whole vectors (a "unit" is one float or two smaller numbers):
//   keys   [block][kv head][unit of head_dim][key in block]
//   values [block][kv head][unit of keys][head_dim]
// and in 8 bits behind both [block][kv head] the scales of its 16 keys.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "quantization.h"
#include "sharing.h"

namespace bw {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kInt16Max = 32767;  // of queries and weights in 16 bits

// Computes one item after another; each thread has one, with scratch memory for the largest item.
template <class T>
class Tile {
  using C = Cached<T>;
  using Row = typename C::Row;

 public:
  Tile(const Problem& problem, const AttentionPlan& plan)
      : p_(problem), plan_(plan), group_(problem.heads / problem.kv_heads), units_(problem.head_dim / kPerUnit<T>) {
    const int64_t most = std::max(kTileRows, group_);
    query_.resize(most * units_);
    out_.resize(most * p_.head_dim);
    scores_.resize(kStrip<T> * kChunk);
    weights_.resize(kStrip<T> * kChunk / kPerUnit<T>);
    factors_.resize(most);
    sums_.resize(most * kWidth);
    highest_.resize(most);
    seen_.resize(most);
    to_.resize(most);
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
    list_ranges();
    list_blocks(next);
    for (const KeyRange& range : ranges_) {
      const int64_t strips = (range.rows + kStrip<T> - 1) / kStrip<T>;
      for (int64_t s = 0; s < strips; ++s) {
        const int64_t from = s * range.rows / strips, to = (s + 1) * range.rows / strips;
        pass(range.row + from, to - from, range);
      }
    }
    for (int64_t r = 0; r < rows_; ++r) write(r);
  }

 private:
  // Some rows of the tile at the keys of `sequence` from `chunk` to before `end`.
  struct KeyRange {
    int32_t sequence;
    int64_t row, rows, chunk, end;
    int64_t at;  // of `blocks_`: where its blocks begin
  };

  using Strips = std::make_integer_sequence<int, kStrip<T>>;

  void begin(const Item& item) {
    item_ = item;
    rows_ = item.sequences * item.tokens * group_;
    std::fill_n(highest_.begin(), rows_, kNever);
    std::fill_n(sums_.begin(), rows_ * kWidth, 0.0f);
    std::fill_n(out_.begin(), rows_ * p_.head_dim, 0.0f);
    int64_t r = 0;
    for (int64_t i = 0; i < item.sequences; ++i) {
      const int32_t s = sequence(item, i);
      for (int64_t token = item.token; token < item.token + item.tokens; ++token) {
        const int64_t row = p_.starts[s] + token, head = item.kv_head * group_;
        const Row* query = static_cast<const Row*>(p_.query) + row * p_.query_stride + head * p_.head_dim;
        Row* to = static_cast<Row*>(p_.out) + (row * p_.heads + head) * p_.head_dim;
        for (int64_t h = 0; h < group_; ++h, ++r) {
          factors_[r] = p_.scale * take_query(query + h * p_.head_dim, &query_[r * units_]);
          to_[r] = to + h * p_.head_dim;
          seen_[r] = static_cast<int32_t>(position(s, token) + 1);
        }
      }
    }
  }

  // Copies a query; returns what its scores are to be multiplied with.
  float take_query(const Row* query, uint32_t* to) const {
    if constexpr (!C::kScaled) {
      std::memcpy(to, query, p_.head_dim * sizeof(Row));
      return 1.0f;
    } else {
      const Quantization found = quantization_of(query, p_.head_dim, kInt16Max);
      int16_t* shorts = reinterpret_cast<int16_t*>(to);
      for (int64_t d = 0; d < p_.head_dim; d += kWidth)
        store_shorts(shorts + d, load_register(query + d) * spread(found.inverse));
      return found.scale;
    }
  }

  // First the chunks that all sequences of the item share, then each one's own.
  void list_ranges() {
    ranges_.clear();
    for (int64_t chunk = first_key(item_); chunk < item_.shared; chunk += kChunk)
      ranges_.push_back({sequence(item_, 0), 0, rows_, chunk, chunk + kChunk, 0});
    const int64_t rows = item_.tokens * group_;
    for (int64_t i = 0; i < item_.sequences; ++i) {
      const int32_t s = sequence(item_, i);
      const int64_t last = position(s, item_.token + item_.tokens);
      for (int64_t chunk = std::max<int64_t>(item_.shared, first_chunk(item_, s)); chunk < last; chunk += kChunk)
        ranges_.push_back({s, i * rows, rows, chunk, std::min(last, chunk + kChunk), 0});
    }
  }

  // The blocks of all ranges one after another, and the first ones of `next`, so that there is always something ahead.
  void list_blocks(const Item& next) {
    blocks_.clear();
    for (KeyRange& range : ranges_) {
      range.at = blocks_.size();
      add_blocks(range.sequence, range.chunk, range.end, item_.kv_head);
    }
    ahead_ = std::min<int64_t>(blocks_.size(), kChunk / kBlock);
    const int32_t s = sequence(next, 0);
    const int64_t first = first_key(next), last = position(s, next.token + next.tokens);
    add_blocks(s, first, std::min(last, first + kChunk), next.kv_head);
    blocks_.resize(blocks_.size() + ahead_, blocks_.back());
  }

  // The first key of the first chunk that the item reads.
  int64_t first_key(const Item& item) const {
    int64_t chunk = first_chunk(item, sequence(item, 0));
    for (int64_t i = 1; i < item.sequences; ++i) chunk = std::min(chunk, first_chunk(item, sequence(item, i)));
    return chunk;
  }

  // The first key of the first chunk that a row of sequence `s` sees.
  int64_t first_chunk(const Item& item, int32_t s) const {
    return p_.window > 0 ? std::max<int64_t>(0, position(s, item.token) - p_.window + 1) / kChunk * kChunk : 0;
  }

  int32_t sequence(const Item& item, int64_t i) const { return plan_.order[item.first + i]; }

  // Where the `token`th of the step's tokens of sequence `s` stands in the sequence.
  int64_t position(int32_t s, int64_t token) const { return p_.contexts[s] - p_.rows(s) + token; }

  void add_blocks(int32_t s, int64_t from, int64_t end, int64_t kv_head) {
    const int64_t size = head_bytes<T>(p_.head_dim);
    const int32_t* table = p_.tables + s * p_.table_stride;
    const char* keys = static_cast<const char*>(p_.keys) + kv_head * size;
    const char* values = static_cast<const char*>(p_.values) + kv_head * size;
    for (int64_t b = from / kBlock; b * kBlock < end; ++b) {
      const int64_t at = table[b] * p_.kv_heads * size;
      blocks_.push_back({keys + at, values + at});
    }
  }

  // The rows row..row+count-1 go through what they see of the range's keys.
  void pass(int64_t row, int64_t count, const KeyRange& range) {
    const Blocks chunk{&blocks_[range.at], ahead_};
    const int32_t most = *std::max_element(&seen_[row], &seen_[row] + count);
    const int64_t keys = std::min<int64_t>(most, range.end) - range.chunk, blocks = (keys + kBlock - 1) / kBlock;
    if (keys <= 0) return;
    score_strip<T>(count, &query_[row * units_], p_.head_dim, chunk, blocks, scores_.data(), Strips());
    if (p_.softcap > 0) cap(row, count, blocks);
    mask(row, count, range.chunk, blocks);
    if constexpr (C::kScaled) {
      take_value_scales(chunk, keys);
      find_largest_scales(row, count, range.chunk, keys);
    }
    online_softmax(row, count, blocks);
    add_values<T>(count, weights_.data(), scales_, chunk, keys, p_.head_dim, &out_[row * p_.head_dim], Strips());
  }

  void cap(int64_t row, int64_t count, int64_t blocks) {
    for (int64_t r = 0; r < count; ++r)
      for (int64_t k = 0; k < blocks * kBlock; ++k)
        scores_[r * kChunk + k] = p_.softcap * std::tanh(scores_[r * kChunk + k] * factors_[row + r] / p_.softcap);
  }

  // Only the blocks from the end of a row's keys on, and those that begin before its window, are touched.
  void mask(int64_t row, int64_t count, int64_t chunk, int64_t blocks) {
    for (int64_t r = 0; r < count; ++r) {
      float* scores = &scores_[r * kChunk];
      const int64_t end = seen_[row + r] - chunk;  // of the keys that it sees in this chunk
      for (int64_t b = std::max<int64_t>(0, end) / kBlock; b < blocks; ++b)
        hide(scores + b * kBlock, 0, end - b * kBlock);
      const int64_t begin = p_.window > 0 ? end - p_.window : 0;
      for (int64_t b = 0; b < blocks && b * kBlock < begin; ++b)
        hide(scores + b * kBlock, begin - b * kBlock, kBlock);
    }
  }

  // All 16 scores but those from `begin` to before `end`.
  static void hide(float* scores, int64_t begin, int64_t end) {
    store(scores, select(lanes_between(begin, end), load(scores), broadcast(kNever)));
  }

  // Scores become weights; the rows' running maxima, sums and outputs are rescaled to the new maxima.
  void online_softmax(int64_t row, int64_t count, int64_t blocks) {
    constexpr float kLog2E = 1.44269504088896341f;
    constexpr int kDegree = std::is_same_v<T, float> ? 5 : 3;  // bfloat16, and values in 8 bits, have 8 significant bits
    float old[kLanes] = {}, here[kLanes] = {}, highest[kLanes] = {}, factor[kLanes] = {};
    float base[kLanes], shrink[kLanes], peak[kLanes];
    for (int64_t r = 0; r < count; ++r) {
      RegF most = load_register(&scores_[r * kChunk]);
      for (int64_t k = kWidth; k < blocks * kBlock; k += kWidth)
        most = max(most, load_register(&scores_[r * kChunk + k]));
      old[r] = highest_[row + r];
      here[r] = max(most);
      highest_[row + r] = highest[r] = std::max(here[r], old[r]);
      factor[r] = p_.softcap > 0 ? kLog2E : factors_[row + r] * kLog2E;
    }
    // A row that has seen nothing, since all of the chunk lies before its window, has the maximum kNever.
    const VecF nothing = broadcast(kNever);
    store(base, select((VecI)(load(highest) == nothing), VecF{}, load(highest) * load(factor)));
    const VecF change = select((VecI)(load(old) == nothing), nothing, load(old) - load(highest));
    store(shrink, exp2(change * load(factor)));  // exactly 1 where the maximum stays
    if constexpr (C::kScaled) {
      // The greatest weight of the chunk; most of them are small where the maximum lies in another one.
      const VecF below = select((VecI)(load(here) == nothing), nothing, load(here) - load(highest));
      store(peak, exp2(below * load(factor)));
    }
    for (int64_t r = 0; r < count; ++r) {
      float rounding = 0.0f;
      if constexpr (C::kScaled) {
        // A weight times its scale is at most the greatest of both.
        const Quantization found(largest_scales_[r] * peak[r], kInt16Max);
        rounding = found.inverse;
        scales_[r] = found.scale;
      }
      RegF total = load_register(&sums_[(row + r) * kWidth]) * spread(shrink[r]);
      for (int64_t k = r * kChunk; k < r * kChunk + blocks * kBlock; k += kWidth) {
        const RegF w = exp2<kDegree>(multiply_add(spread(-base[r]), load_register(&scores_[k]), spread(factor[r])));
        total += w;
        if constexpr (C::kScaled)
          store_rounded(reinterpret_cast<int16_t*>(weights_.data()) + k,
                        w * load_register(&value_scales_[k - r * kChunk]) * spread(rounding));
        else
          store_register(reinterpret_cast<T*>(weights_.data()) + k, w);
      }
      store_register(&sums_[(row + r) * kWidth], total);
      if (shrink[r] != 1.0f) {
        float* out = &out_[(row + r) * p_.head_dim];
        for (int64_t d = 0; d < p_.head_dim; d += kWidth)
          store_register(out + d, load_register(out + d) * spread(shrink[r]));
      }
    }
  }

  // The scales of a chunk's values; 0 behind its last key, where none have been written.
  void take_value_scales(const Blocks& chunk, int64_t keys) {
    for (int64_t k = 0; k < keys; k += kBlock) {
      const VecF scales = load(block_scales<T>(chunk[k / kBlock].values, p_.head_dim));
      store(&value_scales_[k], select(lanes_between(0, keys - k), scales, VecF{}));
    }
  }

  // The greatest scale among the values of a chunk that each row sees. A scale that is not finite spoils all rows of the
  // strip.
  void find_largest_scales(int64_t row, int64_t count, int64_t chunk, int64_t keys) {
    const float largest = largest_value_scale(0, keys);
    for (int64_t r = 0; r < count; ++r) {
      const int64_t end = std::min(keys, seen_[row + r] - chunk);
      const int64_t begin = p_.window > 0 ? std::max<int64_t>(0, seen_[row + r] - chunk - p_.window) : 0;
      const float own = begin == 0 && end == keys ? largest : largest_value_scale(begin, end);
      largest_scales_[r] = own + largest * 0.0f;
    }
  }

  float largest_value_scale(int64_t begin, int64_t end) const {
    Largest largest;
    for (int64_t k = begin / kBlock * kBlock; k < end; k += kBlock) {
      const VecF scales = select(lanes_between(begin - k, end - k), load(&value_scales_[k]), VecF{});
      for (int64_t at = 0; at < kLanes; at += kWidth)
        largest.see(load_register(reinterpret_cast<const float*>(&scales) + at));
    }
    return largest.value();
  }

  void write(int64_t r) {
    const RegF inverse = spread(1.0f / sum(load_register(&sums_[r * kWidth])));
    const float* out = &out_[r * p_.head_dim];
    for (int64_t d = 0; d < p_.head_dim; d += kWidth) store_register(to_[r] + d, load_register(out + d) * inverse);
  }

  // What exceeds the greatest number, by rounding, becomes it.
  static void store_rounded(int16_t* to, RegF x) { store_shorts(to, min(x, spread(kInt16Max))); }

  Problem p_;
  const AttentionPlan& plan_;
  const int64_t group_, units_;
  Item item_{};
  int64_t rows_ = 0, ahead_ = 0;
  std::vector<KeyRange> ranges_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> query_, weights_;
  std::vector<float> out_, scores_, sums_, highest_;
  float value_scales_[kChunk] = {};  // of the values of a chunk
  float largest_scales_[kStrip<T>] = {};  // by each row of a strip: of the values that it sees in the chunk
  float scales_[kStrip<T>] = {};  // by each row of a strip: its weights in 16 bits are multiplied with this
  std::vector<float> factors_;  // by each row: its scores are multiplied with this
  std::vector<int32_t> seen_;  // by each row: keys up to its own position
  std::vector<Row*> to_;
};

// For all threads of a team. A thread takes the KV heads of the same rows together, since they lie side by side, unless
// others would have nothing to do.
template <class T>
void attend(Tile<T>& tile, const std::vector<Item>& items, int64_t heads, int threads) {
  const int64_t count = static_cast<int64_t>(items.size()), together = count < heads * threads ? 1 : heads;
#pragma omp for schedule(dynamic, 1)
  for (int64_t first = 0; first < count; first += together) {
    const Item& later = items[std::min(first + together * threads, count - 1)];
    for (int64_t i = first; i < first + together; ++i)
      tile.run(items[i], i + 1 < first + together ? items[i + 1] : later);
  }
}

}  // namespace bw
