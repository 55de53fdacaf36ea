// Sixteen 32-bit lanes in the compiler's own vector types, so that one source serves AVX-512, AVX2, NEON and the rest.
//
// A lane of a bfloat16 operand holds two values (a "unit"): the one with the lower index in the low half.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace bw {

constexpr int64_t kLanes = 16;
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds a small number to a whole one

typedef float VecF __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t VecI __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t VecU __attribute__((vector_size(64), aligned(4), may_alias));

struct bf16 {
  uint16_t bits;
};

inline VecI lane_numbers() { return VecI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
  uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &wide, 4);
  return out;
}

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 round_bf16(float x) {
  uint32_t wide;
  std::memcpy(&wide, &x, 4);
  if (x != x) return {static_cast<uint16_t>((wide >> 16) | 0x40)};
  return {static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
}

inline void store(float* to, float x) { *to = x; }
inline void store(bf16* to, float x) { *to = round_bf16(x); }

inline VecF broadcast(float x) { return VecF{} + x; }

inline VecF load(const float* from) {
  VecF out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline VecF load(const bf16* from) {
  typedef uint16_t Half __attribute__((vector_size(32)));
  Half half;
  std::memcpy(&half, from, sizeof half);
  return (VecF)(__builtin_convertvector(half, VecU) << 16);
}

inline void store(float* to, VecF x) { std::memcpy(to, &x, sizeof x); }

inline void store(bf16* to, VecF x) {
#if defined(__AVX512BF16__)
  auto packed = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &packed, sizeof packed);
#else
  for (int64_t lane = 0; lane < kLanes; ++lane) to[lane] = round_bf16(x[lane]);
#endif
}

inline VecU load_units(const void* from) {
  VecU out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline VecF multiply_add(VecF acc, VecF a, VecF b) {
#if defined(__AVX512F__)
  return (VecF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#else
  return acc + a * b;
#endif
}

// acc += a * b in every lane, `a` a vector of units of T and `b` one unit for all lanes.
template <class T>
VecF dot_units(VecF acc, VecU a, uint32_t b);

template <>
inline VecF dot_units<float>(VecF acc, VecU a, uint32_t b) {
  return multiply_add(acc, (VecF)a, (VecF)(VecU{} + b));
}

template <>
inline VecF dot_units<bf16>(VecF acc, VecU a, uint32_t b) {
#if defined(__AVX512BF16__)
  return (VecF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)(VecU{} + b));
#else
  VecU wide = VecU{} + b;
  acc = multiply_add(acc, (VecF)(a << 16), (VecF)(wide << 16));
  return multiply_add(acc, (VecF)(a & 0xffff0000u), (VecF)(wide & 0xffff0000u));
#endif
}

// acc += the two products of 16-bit numbers in every lane.
inline VecI dot_pairs(VecI acc, VecU a, uint32_t b) {
#if defined(__AVX512VNNI__)
  return (VecI)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, _mm512_set1_epi32(static_cast<int32_t>(b)));
#else
  const VecI wide = VecI{} + static_cast<int32_t>(b), left = (VecI)a;
  return acc + (left << 16 >> 16) * (wide << 16 >> 16) + (left >> 16) * (wide >> 16);
#endif
}

// 32 signed bytes as pairs of 16-bit numbers.
inline VecU load_pairs(const void* from) {
  typedef int8_t Bytes __attribute__((vector_size(32)));
  typedef int16_t Shorts __attribute__((vector_size(64)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return (VecU)__builtin_convertvector(bytes, Shorts);
}

inline VecF select(VecI mask, VecF yes, VecF no) {
  return mask ? yes : no;
}

// The greater one; b where one of them is NaN.
inline VecF max(VecF a, VecF b) {
#if defined(__AVX512F__)
  return (VecF)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select((VecI)(a > b), a, b);
#endif
}

// The smaller one; b where one of them is NaN.
inline VecF min(VecF a, VecF b) {
#if defined(__AVX512F__)
  return (VecF)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return select((VecI)(a < b), a, b);
#endif
}

// Whether any lane is at least `least`.
inline bool reaches(VecF x, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
#else
  bool any = false;
  for (int64_t lane = 0; lane < kLanes; ++lane) any |= x[lane] >= least;
  return any;
#endif
}

// Lane i gets what lane i ^ distance has.
inline VecF exchanged(VecF x, int distance) {
#if defined(__AVX512F__)
  return (VecF)_mm512_permutexvar_ps((__m512i)(lane_numbers() ^ distance), (__m512)x);
#else
  VecF out;
  for (int64_t lane = 0; lane < kLanes; ++lane) out[lane] = x[lane ^ distance];
  return out;
#endif
}

inline float sum(VecF x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) total += x[lane];
  return total;
#endif
}

inline float max(VecF x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int64_t lane = 1; lane < kLanes; ++lane) most = x[lane] > most ? x[lane] : most;
  return most;
#endif
}

// 2^x for x ≤ 0 to about 1.5 ulp: 2^floor(x), and for the rest of it a polynomial of least relative error on [0, 1] that is
// 1 at 0. Below -126 it is 0 or, with AVX-512, a denormal number.
inline VecF exp2(VecF x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  const VecF r = (VecF)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
  const VecF given = x;
  const VecI tiny = (VecI)(x < -126.0f);
  x = select(tiny, broadcast(-126.0f), x);
  const VecF magic = broadcast(kRounding);
  VecF n = (x + magic) - magic;
  n = n - select((VecI)(n > x), broadcast(1.0f), VecF{});
  const VecF r = x - n;
#endif
  VecF p = broadcast(1.8686067607e-3f);
  p = multiply_add(broadcast(9.0142106267e-3f), p, r);
  p = multiply_add(broadcast(5.5801302347e-2f), p, r);
  p = multiply_add(broadcast(2.4016458078e-1f), p, r);
  p = multiply_add(broadcast(6.9315114849e-1f), p, r);
  p = multiply_add(broadcast(1.0f), p, r);
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  const VecI exponent = __builtin_convertvector(n, VecI) << 23;
  const VecF result = select(tiny, VecF{}, (VecF)((VecI)p + exponent));
  return select((VecI)(given != given), given, result);
#endif
}

// e^x to about 2 ulp: x = n ln 2 + r, and the Cephes polynomial for e^r on |r| ≤ ln 2 / 2. 0 when
// that is nearest, without AVX-512 already below -87. NaN must reach the logits, where it is noticed.
inline VecF exp(VecF x) {
#if defined(__AVX512F__)
  x = max(broadcast(-104.0f), min(broadcast(88.0f), x));
#else
  const VecI tiny = (VecI)(x < -87.0f);
  x = max(broadcast(-87.0f), min(broadcast(88.0f), x));
#endif
  const VecF magic = broadcast(kRounding);
  const VecF shifted = multiply_add(magic, x, broadcast(1.44269504088896341f));
  const VecF n = shifted - magic;
  VecF r = multiply_add(x, n, broadcast(-0.693359375f));
  r = multiply_add(r, n, broadcast(2.12194440e-4f));
  VecF p = broadcast(1.9875691500e-4f);
  p = multiply_add(broadcast(1.3981999507e-3f), p, r);
  p = multiply_add(broadcast(8.3334519073e-3f), p, r);
  p = multiply_add(broadcast(4.1665795894e-2f), p, r);
  p = multiply_add(broadcast(1.6666665459e-1f), p, r);
  p = multiply_add(broadcast(5.0000001201e-1f), p, r);
  p = multiply_add(r, p, r * r) + 1.0f;
#if defined(__AVX512F__)
  return (VecF)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const VecI exponent = ((VecI)shifted - (VecI)magic) << 23;
  return select((VecI)(x != x), x, select(tiny, VecF{}, (VecF)((VecI)p + exponent)));
#endif
}

}  // namespace bw
