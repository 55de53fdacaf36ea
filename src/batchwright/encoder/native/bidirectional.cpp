// Attention of an encoder over sequences that lie side by side in one flat row of tokens: every token sees every token
// of its own sequence and no other. Parallel over (sequence, head).
//
// Keys and values of one head are first laid out so that both products read whole vectors (a "unit" is one float or
// two bfloat16, see simd.h):
//   keys   [block of 16 keys][unit of head_dim][key in block]
//   values [unit of keys][head_dim]
// A query row's scores over all keys are kept at once: no rescaling, and what a row computes depends on its own
// sequence alone, not on the tile or the batch that it came in.
#include <algorithm>
#include <limits>
#include <vector>

#include "units.h"

namespace bw {
namespace {

constexpr int64_t kBlock = kLanes;
constexpr int kRows = 8;     // query rows side by side
constexpr int kColumns = 2;  // vectors of scores or outputs side by side

// Scores lie in groups of keys, [group][query row][key], so that the rows of a group are at distances known when this
// is compiled: with eight of them in registers the processor has none left for addresses. The distances are no powers
// of two, which would all fall into one set of the cache.
constexpr int64_t kGroup = 256;
constexpr int64_t kStride = kGroup + kBlock;
constexpr int64_t kMostUnits = 256;  // of a query: packed_attention.py allows no more
constexpr int64_t kQueryStride = kMostUnits + kBlock;

constexpr float kNever = -std::numeric_limits<float>::max();

template <class T>
constexpr int64_t kPerUnit = 4 / sizeof(T);

struct Problem {
  const void* qkv;         // [tokens][stride]: queries, keys, values, each heads * head_dim
  void* out;               // [tokens][heads * head_dim]
  const int32_t* starts;   // [sequences]: first token
  const int32_t* lengths;  // [sequences]
  int64_t sequences, heads, head_dim;
  float scale;
};

inline void store_units(uint32_t* to, VecU x) { std::memcpy(to, &x, sizeof x); }

// e^x for x ≤ 0, to about 2 ulp; below -87 it stays at e^-87, which is nothing beside the greatest weight, 1.
inline VecF exp_of_negative(VecF x) {
#if defined(__AVX512F__)
  x = (VecF)_mm512_max_ps(_mm512_set1_ps(-87.0f), (__m512)x);  // of the two it gives the second when that is NaN
  const VecF n = (VecF)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 0);
  VecF r = multiply_add(x, n, broadcast(-0.693359375f));
  r = multiply_add(r, n, broadcast(2.12194440e-4f));
  VecF p = multiply_add(broadcast(1.3981999507e-3f), broadcast(1.9875691500e-4f), r);
  p = multiply_add(broadcast(8.3334519073e-3f), p, r);
  p = multiply_add(broadcast(4.1665795894e-2f), p, r);
  p = multiply_add(broadcast(1.6666665459e-1f), p, r);
  p = multiply_add(broadcast(5.0000001201e-1f), p, r);
  p = multiply_add(r, p, r * r) + 1.0f;
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return exp(x);
#endif
}

// Each lane's neighbour at distance S.
template <int S>
VecF swapped(VecF x) {
  return __builtin_shufflevector(x, x, 0 ^ S, 1 ^ S, 2 ^ S, 3 ^ S, 4 ^ S, 5 ^ S, 6 ^ S, 7 ^ S, 8 ^ S, 9 ^ S, 10 ^ S,
                                 11 ^ S, 12 ^ S, 13 ^ S, 14 ^ S, 15 ^ S);
}

// In four steps, not lane after lane as in simd.h: with few keys these are what a row waits for.
inline float total(VecF x) {
  x += swapped<8>(x);
  x += swapped<4>(x);
  x += swapped<2>(x);
  x += swapped<1>(x);
  return x[0];
}

inline float greatest(VecF x) {
  x = max(x, swapped<8>(x));
  x = max(x, swapped<4>(x));
  x = max(x, swapped<2>(x));
  return max(x, swapped<1>(x))[0];
}

inline VecU low_halves(const bf16* from) { return (VecU)load(from) >> 16; }
inline VecU high_halves(const bf16* from) { return (VecU)load(from); }

// One (sequence, head) after another; each thread has one, with scratch memory that grows to the longest sequence.
template <class T>
class Head {
 public:
  explicit Head(const Problem& problem)
      : p_(problem), width_(problem.heads * problem.head_dim), units_(problem.head_dim / kPerUnit<T>) {}

  void run(int64_t sequence, int64_t head) {
    length_ = p_.lengths[sequence];
    blocks_ = (length_ + kBlock - 1) / kBlock;
    rows_ = static_cast<const T*>(p_.qkv) + p_.starts[sequence] * 3 * width_ + head * p_.head_dim;
    out_ = static_cast<T*>(p_.out) + p_.starts[sequence] * width_ + head * p_.head_dim;
    keys_.resize(std::max<size_t>(keys_.size(), blocks_ * kBlock * units_));
    values_.resize(std::max<size_t>(values_.size(), blocks_ * kBlock / kPerUnit<T> * p_.head_dim));
    const size_t groups = (length_ + kGroup - 1) / kGroup;
    scores_.resize(std::max(scores_.size(), groups * kRows * kStride));
    weights_.resize(std::max(weights_.size(), groups * kRows * kStride));
    lay_out_keys();
    lay_out_values();
    int64_t row = 0;
    for (; row + kRows <= length_; row += kRows) tile<kRows>(row);
    if (row + 4 <= length_) tile<4>(row), row += 4;
    if (row + 2 <= length_) tile<2>(row), row += 2;
    if (row < length_) tile<1>(row);
  }

 private:
  void lay_out_keys() {
    for (int64_t key = 0; key < blocks_ * kBlock; ++key) {
      uint32_t* to = keys_.data() + key / kBlock * kBlock * units_ + key % kBlock;
      const auto* from = reinterpret_cast<const uint32_t*>(rows_ + key * 3 * width_ + width_);
      for (int64_t u = 0; u < units_; ++u) to[u * kBlock] = key < length_ ? from[u] : 0;
    }
  }

  void lay_out_values() {
    const T* values = rows_ + 2 * width_;
    for (int64_t key = 0; key < blocks_ * kBlock; key += kPerUnit<T>) {
      uint32_t* to = values_.data() + key / kPerUnit<T> * p_.head_dim;
      for (int64_t d = 0; d < p_.head_dim; d += kLanes) {
        VecU both = {};
        if constexpr (kPerUnit<T> == 1) {
          if (key < length_) both = load_as<VecU>(values + key * 3 * width_ + d);
        } else {
          if (key < length_) both = low_halves(values + key * 3 * width_ + d);
          if (key + 1 < length_) both |= high_halves(values + (key + 1) * 3 * width_ + d);
        }
        store_units(to + d, both);
      }
    }
  }

  // R query rows from `row` on.
  template <int R>
  void tile(int64_t row) {
    for (int r = 0; r < R; ++r)
      std::memcpy(queries_ + r * kQueryStride, rows_ + (row + r) * 3 * width_, p_.head_dim * sizeof(T));
    int64_t block = 0;
    for (; block + kColumns <= blocks_; block += kColumns) score<R, kColumns>(block);
    for (; block < blocks_; ++block) score<R, 1>(block);
    float shares[R];
    for (int r = 0; r < R; ++r) shares[r] = 1.0f / weigh(r);
    int64_t d = 0;
    for (; d + kColumns * kLanes <= p_.head_dim; d += kColumns * kLanes) mix<R, kColumns>(row, d, shares);
    for (; d < p_.head_dim; d += kLanes) mix<R, 1>(row, d, shares);
  }

  // Where the scores or weights of a row and a block stand; a pair of blocks never spans two groups.
  static int64_t place(int64_t row, int64_t block) {
    return (block * kBlock / kGroup * kRows + row) * kStride + block * kBlock % kGroup;
  }

  // acc[r][v] += a register of units · a unit of each row, `stride` apart.
  template <class U, int R, int V>
  static void add_units(RegF (&acc)[R][V], int v, const uint32_t* units, const uint32_t* rows, int64_t stride) {
    const RegU all = load_as<RegU>(units);
    for (int part = 0; part < Units<U>::kParts; ++part) {
      const auto own = Units<U>::part(all, part);
      for (int r = 0; r < R; ++r)
        acc[r][v] = Units<U>::add(acc[r][v], own, Units<U>::part(RegU{} + rows[r * stride], part));
    }
  }

  template <int R, int B>
  void score(int64_t block) {
    RegF acc[R][B * kRegisters] = {};
    const uint32_t* keys = keys_.data() + block * kBlock * units_;
    for (int64_t u = 0; u < units_; ++u)
      for (int v = 0; v < B * kRegisters; ++v)
        add_units<T>(acc, v, keys + (v / kRegisters * units_ + u) * kBlock + v % kRegisters * kWidth,
                        queries_ + u, kQueryStride);
    float* scores = scores_.data() + place(0, block);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < B * kRegisters; ++v) store_register(scores + r * kStride + v * kWidth, acc[r][v]);
  }

  // Weights e^(scale * (score - highest)) of a row's keys, and their sum; after the last key the weight is as good as 0.
  float weigh(int64_t row) {
    const VecI lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int64_t end = blocks_ - 1;
    const VecI valid = (VecI)(lanes < static_cast<int32_t>(length_ - end * kBlock));
    const VecF last = select(valid, load(scores_.data() + place(row, end)), broadcast(kNever));
    VecF highest = last;
    for (int64_t b = 0; b < end; ++b) highest = max(load(scores_.data() + place(row, b)), highest);
    const VecF most = broadcast(-greatest(highest) * p_.scale), scale = broadcast(p_.scale);
    VecF sums = {};
    for (int64_t b = 0; b <= end; ++b) {
      const VecF score = b == end ? last : load(scores_.data() + place(row, b));
      const VecF weight = exp_of_negative(multiply_add(most, score, scale));
      sums += weight;
      bw::store(weights_.data() + place(row, b), weight);
    }
    return total(sums);
  }

  template <int R, int C>
  void mix(int64_t row, int64_t d, const float* shares) {
    RegF acc[R][C * kRegisters] = {};
    const uint32_t* values = values_.data() + d;
    for (int64_t block = 0; block < blocks_; block += kGroup / kBlock) {
      const auto* weights = reinterpret_cast<const uint32_t*>(weights_.data() + place(0, block));
      const int64_t units = std::min(kGroup, (blocks_ - block) * kBlock) / kPerUnit<T>;
      for (int64_t u = 0; u < units; ++u, values += p_.head_dim) {
        for (int v = 0; v < C * kRegisters; ++v)
          add_units<T>(acc, v, values + v * kWidth, weights + u, kStride / kPerUnit<T>);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < C * kRegisters; ++v)
        store_register(out_ + (row + r) * width_ + d + v * kWidth, acc[r][v] * spread(shares[r]));
  }

  const Problem& p_;
  const int64_t width_, units_;
  int64_t length_ = 0, blocks_ = 0;
  const T* rows_ = nullptr;
  T* out_ = nullptr;
  uint32_t queries_[kRows * kQueryStride];
  std::vector<uint32_t> keys_, values_;
  std::vector<float> scores_;
  std::vector<T> weights_;
};

template <class T>
void attend(const Problem& problem) {
#pragma omp parallel
  {
    Head<T> head(problem);
#pragma omp for schedule(dynamic) collapse(2)
    for (int64_t sequence = 0; sequence < problem.sequences; ++sequence)
      for (int64_t index = 0; index < problem.heads; ++index) head.run(sequence, index);
  }
}

}  // namespace
}  // namespace bw

#define BW_BIDIRECTIONAL(NAME, T)                                                                               \
  extern "C" void bw_attend_bidirectional_##NAME(const void* qkv, void* out, const int32_t* starts,             \
                                                 const int32_t* lengths, int64_t sequences, int64_t heads,      \
                                                 int64_t head_dim, float scale) {                               \
    bw::attend<T>({qkv, out, starts, lengths, sequences, heads, head_dim, scale});                              \
  }

BW_BIDIRECTIONAL(f32, float)
BW_BIDIRECTIONAL(bf16, bw::bf16)
