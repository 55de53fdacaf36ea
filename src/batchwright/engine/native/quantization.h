// Rounding rows to whole numbers with one scale: the greatest value becomes `most`.
#pragma once

#include <algorithm>
#include <cstring>

#include "simd.h"

namespace bw {

// `inverse` makes whole numbers of a row, `scale` gives the row back: NaN if it holds NaN or infinity.
struct Quantization {
  float inverse, scale;

  // `largest` is the greatest absolute value, or not finite if there is NaN or infinity.
  Quantization(float largest, float most) {
    // The inverse of anything smaller would be infinite, so it becomes 0, with a scale that is as small.
    const bool some = largest > 1e-30f;
    inverse = some ? most / largest : 0.0f;
    scale = (some ? largest / most : 1e-30f) + largest * 0.0f;
  }
};

// The greatest absolute value of what it has seen, or a number that is not finite if there was one. The bits of
// absolute values are in the order of the values, NaN and infinity last.
class Largest {
 public:
  void see(RegF x) {
    const RegI bits = (RegI)x & 0x7fffffff;
    most_ = bits > most_ ? bits : most_;
  }

  float value() const { return max_of(most_); }

 private:
  static float max_of(RegI bits) {
#if defined(__AVX512F__)
    const int32_t most = _mm512_reduce_max_epi32((__m512i)bits);
#else
    int32_t most = bits[0];
    for (int64_t lane = 1; lane < kWidth; ++lane) most = std::max(most, bits[lane]);
#endif
    float out;
    std::memcpy(&out, &most, sizeof out);
    return out;
  }

  RegI most_ = {};
};

// Of x [dim]; `dim` is a multiple of 16.
template <class T>
Quantization quantization_of(const T* x, int64_t dim, float most) {
  Largest largest;
  for (int64_t d = 0; d < dim; d += kWidth) largest.see(load_register(x + d));
  return {largest.value(), most};
}

// x, whole numbers once rounded, below 2^22 in size.
inline RegI rounded(RegF x) {
  const RegF magic = spread(kRounding);
  return (RegI)(x + magic) - (RegI)magic;
}
#if !defined(__AVX512F__)
inline VecI rounded(const VecF& x) {
  const VecF magic = broadcast(kRounding);
  return (VecI)(x + magic) - (VecI)magic;
}
#endif

// x, rounded to whole numbers, in 16 bits.
inline void store_shorts(int16_t* to, RegF x) {
  const RegI whole = rounded(x);
#if defined(__AVX512F__)
  const __m256i shorts = _mm512_cvtepi32_epi16((__m512i)whole);
#else
  typedef int16_t Shorts __attribute__((vector_size(kRegisterBytes / 2)));
  const Shorts shorts = __builtin_convertvector(whole, Shorts);
#endif
  std::memcpy(to, &shorts, sizeof shorts);
}

inline void store_bytes(void* to, VecI x) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  const Bytes bytes = __builtin_convertvector(x, Bytes);
#endif
  std::memcpy(to, &bytes, sizeof bytes);
}

}  // namespace bw
