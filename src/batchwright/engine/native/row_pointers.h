// Where the rows of a tile are read.
#pragma once

#include <cstdint>

namespace bw {

// Pointers to one place in each of R rows, `stride` elements apart, that move along the rows together.
//
// An address on x86 may be a pointer plus once or twice the stride, so one pointer reaches three rows. With a pointer for
// each row there are more than general registers: compilers keep some of them in vector registers, and moving those back
// takes turns of the multipliers (7% of the time of a tile of 12 rows).
template <int R, class T = const uint32_t>
class RowPointers {
 public:
  RowPointers(T* rows, int64_t stride) : stride_(stride) {
#pragma GCC unroll 8
    for (int i = 0; i < kPointers; ++i) pointers_[i] = rows + i * kRowsOfPointer * stride;
  }

  T* operator[](int row) const {
    return pointers_[row / kRowsOfPointer] + row % kRowsOfPointer * stride_;
  }

  void advance(int64_t count) {
#pragma GCC unroll 8
    for (int i = 0; i < kPointers; ++i) {
      pointers_[i] += count;
      __asm__("" : "+r"(pointers_[i]));  // or compilers keep a pointer for each row again
    }
  }

 private:
  static constexpr int kRowsOfPointer = 3, kPointers = (R + kRowsOfPointer - 1) / kRowsOfPointer;

  T* pointers_[kPointers];
  const int64_t stride_;
};

}  // namespace bw
