// What happens to one row between two products: norms, rotation, writing the cache, the gated activation.
#pragma once

#include <cmath>

#include "attention.h"

namespace bw {

inline float inverse_rms(float squares, int64_t dim, float eps) {
  return 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
}

// out = x / rms(x) * weight; `dim` is a multiple of 16, and `out` may be `x`.
template <class T, class Out>
void rms_norm(const T* x, const T* weight, Out* out, int64_t dim, float eps) {
  VecF squares = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    const VecF v = load(x + d);
    squares = multiply_add(squares, v, v);
  }
  const float scale = inverse_rms(sum(squares), dim, eps);
  for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(x + d) * scale * load(weight + d));
}

inline VecF silu(VecF x) { return x / (exp(-x) + 1.0f); }

struct HeadShape {
  int64_t heads, kv_heads, head_dim;

  int64_t queries() const { return heads * head_dim; }
  int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }  // of q, k and v side by side
};

// Where the keys and values of one token lie.
template <class T>
class CacheSlot {
 public:
  CacheSlot(T* keys, T* values, const HeadShape& shape, int64_t slot)
      : head_dim_(shape.head_dim), offset_(slot % kBlock) {
    const int64_t block = slot / kBlock * shape.kv_heads * kBlock * head_dim_;
    keys_ = keys + block;
    values_ = values + block;
  }

  void store_key(int64_t head, int64_t d, T x) {
    keys_[head * kBlock * head_dim_ + (d / kPer * kBlock + offset_) * kPer + d % kPer] = x;
  }

  // Dimensions d..d+15; d is a multiple of 16.
  void store_keys(int64_t head, int64_t d, VecF x) {
    alignas(64) uint32_t units[kLanes];
    store(reinterpret_cast<T*>(units), x);
    uint32_t* to = reinterpret_cast<uint32_t*>(keys_ + head * kBlock * head_dim_) + d / kPer * kBlock + offset_;
    for (int64_t unit = 0; unit < kLanes / kPer; ++unit) to[unit * kBlock] = units[unit];
  }

  // The lines that will be written: another's tokens share them, so they are read first.
  void prefetch(const HeadShape& shape) const {
    for (int64_t h = 0; h < shape.kv_heads; ++h) {
      const T* keys = keys_ + h * kBlock * head_dim_;
      const T* values = values_ + h * kBlock * head_dim_ + offset_ / kPer * head_dim_ * kPer;
      for (int64_t d = 0; d < head_dim_; d += kPer) __builtin_prefetch(keys + (d / kPer * kBlock + offset_) * kPer, 1);
      for (int64_t d = 0; d < head_dim_ * kPer; d += 64 / sizeof(T)) __builtin_prefetch(values + d, 1);
    }
  }

  void store_values(int64_t head, const T* x) {
    T* to = values_ + head * kBlock * head_dim_ + offset_ / kPer * head_dim_ * kPer + offset_ % kPer;
    for (int64_t d = 0; d < head_dim_; ++d) to[d * kPer] = x[d];
  }

 private:
  static constexpr int64_t kPer = kPerUnit<T>;
  T* keys_;
  T* values_;
  int64_t head_dim_, offset_;
};

// Rotates the queries of `qkv` in place; rotated keys, and values, go to the cache. `cosines` and `sines` are of the
// row's position.
template <class T>
void rope_and_store(T* qkv, const HeadShape& shape, const float* cosines, const float* sines, CacheSlot<T> to) {
  const int64_t half = shape.head_dim / 2, whole = half % kLanes == 0 ? half : 0;
  for (int64_t h = 0; h < shape.heads + shape.kv_heads; ++h) {
    T* x = qkv + h * shape.head_dim;
    for (int64_t d = 0; d < whole; d += kLanes) {
      const VecF a = load(x + d), b = load(x + d + half), c = load(cosines + d), s = load(sines + d);
      const VecF low = a * c - b * s, high = b * c + a * s;
      if (h < shape.heads) {
        store(x + d, low);
        store(x + d + half, high);
      } else {
        to.store_keys(h - shape.heads, d, low);
        to.store_keys(h - shape.heads, d + half, high);
      }
    }
    for (int64_t d = whole; d < half; ++d) {
      const float a = to_float(x[d]), b = to_float(x[d + half]);
      store(x + d, a * cosines[d] - b * sines[d]);
      store(x + d + half, b * cosines[d] + a * sines[d]);
      if (h >= shape.heads) {
        to.store_key(h - shape.heads, d, x[d]);
        to.store_key(h - shape.heads, d + half, x[d + half]);
      }
    }
  }
  for (int64_t h = 0; h < shape.kv_heads; ++h)
    to.store_values(h, qkv + (shape.heads + shape.kv_heads + h) * shape.head_dim);
}

}  // namespace bw
