// Sixteen 32-bit lanes in the compiler's own vector types, so that one source serves AVX-512, AVX2, NEON and the rest.
//
// A lane of a bfloat16 operand holds two values (a "unit"): the one with the lower index in the low half.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__FMA__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace bw {

constexpr int64_t kLanes = 16;
constexpr float kRounding = 12582912.0f;  // 1.5 * 2^23: adding it rounds a small number to a whole one

typedef float VecF __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t VecI __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t VecU __attribute__((vector_size(64), aligned(4), may_alias));

// What the processor computes at a time: a vector, or half of one. What takes most of the time is written with registers,
// since compilers do not keep the halves of a vector in them.
// Arrays of registers stay in registers only if all loops over them are unrolled, which GCC does early enough if told to.
#if defined(__AVX512F__)
constexpr int64_t kWidth = 16;
#else
constexpr int64_t kWidth = 8;
#endif
constexpr int kRegisters = kLanes / kWidth;  // for a vector
constexpr int64_t kRegisterBytes = kWidth * 4;

typedef float RegF __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
typedef int32_t RegI __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
typedef uint32_t RegU __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));

template <class R>
R load_as(const void* from) {
  R out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

template <class R>
void store_register(void* to, R x) {
  std::memcpy(to, &x, sizeof x);
}

// The same of all registers of vectors.
template <class F, class... V>
inline VecF by_registers(const F& f, const V&... x) {
  VecF out;
  for (int64_t at = 0; at < static_cast<int64_t>(sizeof out); at += kRegisterBytes)
    store_register(reinterpret_cast<char*>(&out) + at, f(load_as<RegF>(reinterpret_cast<const char*>(&x) + at)...));
  return out;
}

struct bf16 {
  uint16_t bits;
};

inline VecI lane_numbers() { return VecI{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

constexpr uint32_t kAllLanes = (uint64_t{1} << kLanes) - 1;

inline VecI lanes_between(int64_t begin, int64_t end) {
  return (lane_numbers() >= static_cast<int32_t>(begin)) & (lane_numbers() < static_cast<int32_t>(end));
}

// The lanes whose bits are set.
inline VecI lanes_of(uint32_t bits) { return ((VecI{} + static_cast<int32_t>(bits)) >> lane_numbers() & 1) != 0; }

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

// x in every lane.
inline RegF spread(float x) {
#if defined(__AVX512F__)
  return (RegF)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (RegF)_mm256_set1_ps(x);
#else
  return RegF{} + x;
#endif
}

inline VecF broadcast(float x) {
  VecF out;
  for (int64_t at = 0; at < kLanes; at += kWidth) store_register(reinterpret_cast<float*>(&out) + at, spread(x));
  return out;
}

inline VecF load(const float* from) {
  VecF out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

inline RegF load_register(const float* from) { return load_as<RegF>(from); }

// Compilers convert vectors of small numbers in pieces, so instructions are named where there are some.
inline RegF load_register(const bf16* from) {
#if defined(__AVX512F__)
  return (RegF)((RegU)_mm512_cvtepu16_epi32(load_as<__m256i>(from)) << 16);
#else
  typedef uint16_t Half __attribute__((vector_size(kRegisterBytes / 2)));
  return (RegF)(__builtin_convertvector(load_as<Half>(from), RegU) << 16);
#endif
}

inline VecF load(const bf16* from) {
  VecF out;
  for (int64_t at = 0; at < kLanes; at += kWidth)
    store_register(reinterpret_cast<float*>(&out) + at, load_register(from + at));
  return out;
}

inline void store_register(bf16* to, RegF x) {
#if defined(__AVX512BF16__)
  auto packed = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(to, &packed, sizeof packed);
#else
  typedef uint16_t Half __attribute__((vector_size(kRegisterBytes / 2)));
  const RegU wide = (RegU)x, even = (wide + 0x7fff + (wide >> 16 & 1)) >> 16, nan = wide >> 16 | 0x40;
  const RegI is_nan = (RegI)((wide & 0x7fffffff) > 0x7f800000);
  const Half half = __builtin_convertvector((RegU)(is_nan ? (RegI)nan : (RegI)even), Half);
  std::memcpy(to, &half, sizeof half);
#endif
}

inline void store(float* to, VecF x) { std::memcpy(to, &x, sizeof x); }

inline void store(bf16* to, VecF x) {
  for (int64_t at = 0; at < kLanes; at += kWidth)
    store_register(to + at, load_as<RegF>(reinterpret_cast<const float*>(&x) + at));
}

inline RegF multiply_add(RegF acc, RegF a, RegF b) {
#if defined(__AVX512F__)
  return (RegF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#elif defined(__FMA__)
  return (RegF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc);
#else
  return acc + a * b;
#endif
}

template <class I, class F>
inline F select(I mask, F yes, F no) {
  return mask ? yes : no;
}

// The greater one; b where one of them is NaN.
inline RegF max(RegF a, RegF b) {
#if defined(__AVX512F__)
  return (RegF)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (RegF)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select((RegI)(a > b), a, b);
#endif
}

// The smaller one; b where one of them is NaN.
inline RegF min(RegF a, RegF b) {
#if defined(__AVX512F__)
  return (RegF)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (RegF)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select((RegI)(a < b), a, b);
#endif
}

// Whether any lane is at least `least`.
inline bool reaches(VecF x, float least) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
#else
  RegI any = {};
  for (int64_t at = 0; at < kLanes; at += kWidth)
    any |= (RegI)(load_as<RegF>(reinterpret_cast<const float*>(&x) + at) >= spread(least));
#if defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)any, (__m256i)any);
#else
  bool found = false;
  for (int64_t lane = 0; lane < kWidth; ++lane) found |= any[lane] != 0;
  return found;
#endif
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

inline float sum(RegF x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  for (int64_t width = kWidth / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) x[lane] += x[lane + width];
  return x[0];
#endif
}

inline int32_t total(const VecI& x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t out = 0;
  for (int64_t lane = 0; lane < kLanes; ++lane) out += x[lane];
  return out;
#endif
}

inline float max(RegF x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int64_t lane = 1; lane < kWidth; ++lane) most = x[lane] > most ? x[lane] : most;
  return most;
#endif
}

// A polynomial of least relative error on [0, 1] for 2^x, which is 1 at 0.
template <int Degree>
inline RegF exp2_polynomial(RegF x) {
  static_assert(Degree == 3 || Degree == 5);
  if constexpr (Degree == 3) {
    RegF p = spread(7.7067068216e-2f);
    p = multiply_add(spread(2.2764496264e-1f), p, x);
    p = multiply_add(spread(6.9511679284e-1f), p, x);
    return multiply_add(spread(1.0f), p, x);
  } else {
    RegF p = spread(1.8686067607e-3f);
    p = multiply_add(spread(9.0142106267e-3f), p, x);
    p = multiply_add(spread(5.5801302347e-2f), p, x);
    p = multiply_add(spread(2.4016458078e-1f), p, x);
    p = multiply_add(spread(6.9315114849e-1f), p, x);
    return multiply_add(spread(1.0f), p, x);
  }
}

// 2^x for x ≤ 0, with AVX-512 for any x: 2^floor(x), times a polynomial of the rest of it. The relative error is about 1.5 ulp with degree 5, and
// 9e-5 with degree 3, a twentieth of what rounding to bfloat16 adds. Below -126 it is 0 or, with AVX-512, a denormal number.
template <int Degree = 5>
inline RegF exp2(RegF x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  const RegF r = (RegF)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
  return (RegF)_mm512_scalef_ps((__m512)exp2_polynomial<Degree>(r), (__m512)x);
#else
  const RegF given = x;
  const RegI tiny = (RegI)(x < -126.0f);
  x = select(tiny, spread(-126.0f), x);
  const RegF magic = spread(kRounding);
  RegF n = (x + magic) - magic;
  n = n - select((RegI)(n > x), spread(1.0f), RegF{});
  const RegI exponent = __builtin_convertvector(n, RegI) << 23;
  const RegF result = select(tiny, RegF{}, (RegF)((RegI)exp2_polynomial<Degree>(x - n) + exponent));
  return select((RegI)(given != given), given, result);
#endif
}

// e^x to about 2 ulp: x = n ln 2 + r, and the Cephes polynomial for e^r on |r| ≤ ln 2 / 2. 0 when
// that is nearest, without AVX-512 already below -87. NaN must reach the logits, where it is noticed.
inline RegF exp(RegF x) {
#if defined(__AVX512F__)
  x = max(spread(-104.0f), min(spread(88.0f), x));
#else
  const RegI tiny = (RegI)(x < -87.0f);
  x = max(spread(-87.0f), min(spread(88.0f), x));
#endif
  const RegF magic = spread(kRounding);
  const RegF shifted = multiply_add(magic, x, spread(1.44269504088896341f));
  const RegF n = shifted - magic;
  RegF r = multiply_add(x, n, spread(-0.693359375f));
  r = multiply_add(r, n, spread(2.12194440e-4f));
  RegF p = spread(1.9875691500e-4f);
  p = multiply_add(spread(1.3981999507e-3f), p, r);
  p = multiply_add(spread(8.3334519073e-3f), p, r);
  p = multiply_add(spread(4.1665795894e-2f), p, r);
  p = multiply_add(spread(1.6666665459e-1f), p, r);
  p = multiply_add(spread(5.0000001201e-1f), p, r);
  p = multiply_add(r, p, r * r) + 1.0f;
#if defined(__AVX512F__)
  return (RegF)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const RegI exponent = ((RegI)shifted - (RegI)magic) << 23;
  return select((RegI)(x != x), x, select(tiny, RegF{}, (RegF)((RegI)p + exponent)));
#endif
}

#if !defined(__AVX512F__)
inline float sum(const VecF& x) {
  const float* lanes = reinterpret_cast<const float*>(&x);
  return sum(load_register(lanes) + load_register(lanes + kWidth));
}

inline float max(const VecF& x) {
  const float* lanes = reinterpret_cast<const float*>(&x);
  return max(max(load_register(lanes), load_register(lanes + kWidth)));
}

inline VecF multiply_add(const VecF& acc, const VecF& a, const VecF& b) {
  return by_registers([](RegF x, RegF y, RegF z) { return multiply_add(x, y, z); }, acc, a, b);
}

inline VecF max(const VecF& a, const VecF& b) {
  return by_registers([](RegF x, RegF y) { return max(x, y); }, a, b);
}

inline VecF exp2(const VecF& x) {
  return by_registers([](RegF y) { return exp2(y); }, x);
}

inline VecF exp(const VecF& x) {
  return by_registers([](RegF y) { return exp(y); }, x);
}
#endif

}  // namespace bw
