// Rounding rows to whole numbers with one scale: the greatest value becomes `most`.
#pragma once

#include "simd.h"

namespace bw {

// `inverse` makes whole numbers of a row, `scale` gives the row back: NaN if it holds NaN or infinity.
struct Quantization {
  float inverse, scale;

  // `largest` is the greatest absolute value; `spoilt` is NaN if there is NaN or infinity, else 0.
  Quantization(float largest, float spoilt, float most) {
    // The inverse of anything smaller would be infinite, so it becomes 0, with any scale.
    const bool some = largest > 1e-30f;
    inverse = some ? most / largest : 0.0f;
    scale = (some ? largest / most : 1.0f) + spoilt;
  }
};

// Of x [dim]; `dim` is a multiple of 16.
template <class T>
Quantization quantization_of(const T* x, int64_t dim, float most) {
  RegF largest = {}, spoilt = {};
  for (int64_t d = 0; d < dim; d += kWidth) {
    const RegF v = load_register(x + d);
    largest = max(largest, max(v, -v));
    spoilt += v * spread(0.0f);
  }
  return {max(largest), sum(spoilt), most};
}

// x, whole numbers once rounded, below 2^22 in size.
inline VecI rounded(VecF x) {
  const VecF magic = broadcast(kRounding);
  return (VecI)(x + magic) - (VecI)magic;
}

inline void store_shorts(int16_t* to, VecI x) {
#if defined(__AVX512F__)
  const __m256i shorts = _mm512_cvtepi32_epi16((__m512i)x);
#else
  typedef int16_t Shorts __attribute__((vector_size(32)));
  const Shorts shorts = __builtin_convertvector(x, Shorts);
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
