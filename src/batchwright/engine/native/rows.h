// What happens to one row between two products: norms, rotation, writing the cache, the gated activation.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention.h"

namespace bw {

inline float inverse_rms(float squares, int64_t dim, float eps) {
  return 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
}

// out = x / rms(x) * weight; `dim` is a multiple of 16, and `out` may be `x`.
template <class T, class Out>
void rms_norm(const T* x, const T* weight, Out* out, int64_t dim, float eps) {
  RegF squares = {};
  for (int64_t d = 0; d < dim; d += kWidth) {
    const RegF v = load_register(x + d);
    squares = multiply_add(squares, v, v);
  }
  const RegF scale = spread(inverse_rms(sum(squares), dim, eps));
  for (int64_t d = 0; d < dim; d += kWidth)
    store_register(out + d, load_register(x + d) * scale * load_register(weight + d));
}

inline VecF silu(const VecF& x) {
  return by_registers([](RegF y) { return y / (exp(-y) + spread(1.0f)); }, x);
}

// The same to within 2e-4, a tenth of what rounding to bfloat16 adds.
inline VecF rough_silu(const VecF& x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  const RegF y = (RegF)x;
  const RegF grown = exp2<3>(y * spread(-1.44269504088896341f)) + spread(1.0f);
  return (VecF)(y * (RegF)_mm512_rcp14_ps((__m512)grown));
#else
  return silu(x);
#endif
}

struct HeadShape {
  int64_t heads, kv_heads, head_dim;

  int64_t queries() const { return heads * head_dim; }
  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }  // of q, k and v side by side
};

// to[i * N + place] = x[i] for all i below `count`, a multiple of 16. Nothing else is written: what lies between may be
// another thread's to write.
template <int64_t N, class T>
void store_every(T* to, const T* x, int64_t count, int64_t place) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (N == 2 && sizeof(T) == 2) {
    const __mmask32 mask = place == 0 ? 0x55555555u : 0xaaaaaaaau;
    const __m128i bits = _mm_cvtsi32_si128(place == 0 ? 0 : 16);
    for (; i < count; i += 16)
      _mm512_mask_storeu_epi16(to + i * N, mask,
                               _mm512_sll_epi32(_mm512_cvtepu16_epi32(load_as<__m256i>(x + i)), bits));
  } else if constexpr (N == 2 && sizeof(T) == 1) {
    const __mmask64 mask = place == 0 ? 0x5555555555555555u : 0xaaaaaaaaaaaaaaaau;
    const __m128i bits = _mm_cvtsi32_si128(place == 0 ? 0 : 8);
    for (; i + 32 <= count; i += 32)
      _mm512_mask_storeu_epi8(to + i * N, mask,
                              _mm512_sll_epi16(_mm512_cvtepu8_epi16(load_as<__m256i>(x + i)), bits));
  }
#endif
  for (; i < count; ++i) to[i * N + place] = x[i];
}

// Where a cache of T keeps the keys and values of one token.
template <class T>
class CacheSlot {
 public:
  using Row = typename Cached<T>::Row;

  CacheSlot(void* keys, void* values, const HeadShape& shape, int64_t slot)
      : head_dim_(shape.head_dim), bytes_(head_bytes<T>(shape.head_dim)), offset_(slot % kBlock) {
    const int64_t block = slot / kBlock * shape.kv_heads * bytes_;
    keys_ = static_cast<char*>(keys) + block;
    values_ = static_cast<char*>(values) + block;
  }

  void store_key(int64_t head, const Row* x) {
    store(keys_ + head * bytes_, x, [this](char* block, const Number* numbers, int64_t first, int64_t end) {
      constexpr int64_t unit = kPer * sizeof(Number);
      for (int64_t u = first / kPer; u < end / kPer; ++u, numbers += kPer)
        std::memcpy(block + (u * kBlock + offset_) * unit, numbers, unit);
    });
  }

  void store_value(int64_t head, const Row* x) {
    store(values_ + head * bytes_, x, [this](char* block, const Number* numbers, int64_t first, int64_t end) {
      Number* to = reinterpret_cast<Number*>(block) + (offset_ / kPer * head_dim_ + first) * kPer;
      store_every<kPer>(to, numbers, end - first, offset_ % kPer);
    });
  }

  // The lines that will be written: another's tokens share them, so they are read first.
  void prefetch(const HeadShape& shape) const {
    constexpr int64_t line = 64, unit = Cached<T>::kUnitBytes;
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      const char* keys = keys_ + h * bytes_ + offset_ * unit / kBlock;
      const char* values = values_ + h * bytes_ + offset_ / kPer * head_dim_ * unit / kLanes;
      for (int64_t at = 0; at < head_dim_ / kPer * unit; at += line) __builtin_prefetch(keys + at, 1);
      for (int64_t at = 0; at < head_dim_ * unit / kLanes; at += line) __builtin_prefetch(values + at, 1);
      if constexpr (Cached<T>::kScaled) {
        __builtin_prefetch(keys_ + (h + 1) * bytes_ - line, 1);
        __builtin_prefetch(values_ + (h + 1) * bytes_ - line, 1);
      }
    }
  }

 private:
  static constexpr int64_t kPer = kPerUnit<T>;
  using Number = std::conditional_t<Cached<T>::kScaled, int8_t, Row>;

  // Calls `put` with the numbers of x [head_dim] from `first` to before `end`. In 8 bits, their scale goes to those of the
  // other tokens; NaN and infinity become a scale of NaN.
  template <class Put>
  void store(char* block, const Row* x, const Put& put) {
    if constexpr (Cached<T>::kScaled) {
      const Quantization found = quantization_of(x, head_dim_, 127.0f);
      int8_t numbers[kAtOnce];
      for (int64_t first = 0, end; first < head_dim_; first = end) {
        end = std::min(head_dim_, first + kAtOnce);
        for (int64_t d = first; d < end; d += kLanes)
          store_bytes(numbers + d - first, rounded(load(x + d) * found.inverse));
        put(block, numbers, first, end);
      }
      reinterpret_cast<float*>(block + bytes_)[offset_ - kBlock] = found.scale;
    } else {
      put(block, x, 0, head_dim_);
    }
  }

  static constexpr int64_t kAtOnce = 128;
  char* keys_;
  char* values_;
  int64_t head_dim_, bytes_, offset_;
};

// Rotates the queries and keys of `qkv` in place; keys and values go to the cache. `cosines` and `sines` are of the row's
// position.
template <class T>
void rope_and_store(typename Cached<T>::Row* qkv, const HeadShape& shape, const float* cosines, const float* sines,
                    CacheSlot<T> to) {
  const int64_t half = shape.head_dim / 2, whole = half % kLanes == 0 ? half : 0;
  for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h) {
    auto* x = qkv + h * shape.head_dim;
    for (int64_t d = 0; d < whole; d += kWidth) {
      const RegF a = load_register(x + d), b = load_register(x + d + half);
      const RegF c = load_register(cosines + d), s = load_register(sines + d);
      store_register(x + d, a * c - b * s);
      store_register(x + d + half, b * c + a * s);
    }
    for (int64_t d = whole; d < half; ++d) {
      const float a = to_float(x[d]), b = to_float(x[d + half]);
      store(x + d, a * cosines[d] - b * sines[d]);
      store(x + d + half, b * cosines[d] + a * sines[d]);
    }
    if (h >= shape.heads) to.store_key(h - shape.heads, x);
  }
  for (int64_t h = 0; h < shape.kv_heads; ++h)
    to.store_value(h, qkv + (shape.heads + shape.kv_heads + h) * shape.head_dim);
}

}  // namespace bw
