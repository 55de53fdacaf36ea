// Where the rows of a tile are read.
#pragma once

#include <cstdint>

namespace bw {

// Pointers to one place in each of R rows, `stride` numbers apart, that move along the rows together.
//
// They are kept as one pointer for each three rows: processors add a register, once or twice, to an address. A pointer for
// each row does not fit the general registers, and compilers then keep some of them in vector registers, from which they
// are moved by what multiplies (7% of the time of a tile of 12 rows).
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
      __asm__("" : "+r"(pointers_[i]));  // compilers would turn them into one for each row
    }
  }

 private:
  static constexpr int kRowsOfPointer = 3, kPointers = (R + kRowsOfPointer - 1) / kRowsOfPointer;

  T* pointers_[kPointers];
  const int64_t stride_;
};

}  // namespace bw
