// Units, what 32 bits hold, multiplied in registers. A unit has one or two parts, multiplied one after the other.
#pragma once

#include "simd.h"

// The processor multiplies pairs of bfloat16, and four bytes at a time, in vectors of 512 bits.
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define BW_BFLOAT16
#endif

namespace bw {

struct Shorts {};  // pairs of 16-bit numbers

template <class T>
struct Units;

template <>
struct Units<float> {
  using Sum = RegF;
  using Part = RegF;
  static constexpr int kParts = 1;
  static Part part(RegU units, int) { return (RegF)units; }
  static Sum add(Sum acc, Part a, Part b) { return multiply_add(acc, a, b); }
};

template <>
struct Units<bf16> {
  using Sum = RegF;
#if defined(BW_BFLOAT16)
  using Part = RegU;
  static constexpr int kParts = 1;
  static Part part(RegU units, int) { return units; }
  static Sum add(Sum acc, Part a, Part b) {
    return (RegF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
#else
  using Part = RegF;
  static constexpr int kParts = 2;
  static Part part(RegU units, int which) { return (RegF)(which == 0 ? units << 16 : units & 0xffff0000u); }
  static Sum add(Sum acc, Part a, Part b) { return multiply_add(acc, a, b); }
#endif
};

template <>
struct Units<Shorts> {
  using Sum = RegI;
  using Part = RegU;
  static constexpr int kParts = 1;
  static Part part(RegU units, int) { return units; }
  static Sum add(Sum acc, Part a, Part b) {
#if defined(__AVX512VNNI__)
    return (RegI)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return acc + (RegI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return acc + (RegI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    const RegI x = (RegI)a, y = (RegI)b;
    return acc + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
  }
};

// Signed bytes as units of 16-bit numbers.
inline RegU load_bytes_as_shorts(const void* from) {
#if defined(__AVX512BW__)
  return (RegU)_mm512_cvtepi8_epi16(load_as<__m256i>(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(kRegisterBytes / 2)));
  typedef int16_t Numbers __attribute__((vector_size(kRegisterBytes)));
  return (RegU)__builtin_convertvector(load_as<Bytes>(from), Numbers);
#endif
}

}  // namespace bw
