// Products of rows with a weight whose numbers have 4 or 8 bits and a scale for each group of 32 inputs (weight_groups.py).
//
// Rows have 8 bits, and a scale for each group as well, so outliers among 32 values take their levels from these only. The
// products of a group are summed exactly, the groups in float, in their order: an output is bitwise the same in any
// company. Numbers of the weight are stored without a sign, as some processors multiply them: those of 8 bits are 128 too
// large, which is taken off again; those of 4 bits have an offset for each group, which is what 0 stands for.
#pragma once

#include <type_traits>
#include <utility>

#include "product.h"
#include "row_pointers.h"

namespace bw {

constexpr int64_t kGrouped = 32;               // inputs of a group
constexpr int64_t kGroupUnits = kGrouped / 4;  // units of four bytes
constexpr int64_t kScalesBytes = kLanes * 2;   // a float16 for each column of a vector

// A byte of a row whose groups have scales.
struct g8 {
  int8_t bits;
};

// Of a group of a row. Each member has the type in which all lanes of a register get it straight from memory.
struct RowGroup {
  float scale;
  float sum;       // of its numbers
  int32_t excess;  // -128 * sum: added to its products with numbers that are 128 too large
};

// Bytes of the numbers of a group in 16 columns.
template <int Bits>
constexpr int64_t kNumberBytes = kGrouped * kLanes * Bits / 8;

// Bytes of a group in 16 columns: its numbers, their scales, and with 4 bits their offsets.
template <int Bits>
constexpr int64_t kBytesOfGroup = kNumberBytes<Bits> + (Bits == 4 ? 2 : 1) * kScalesBytes;

// Bytes of 16 columns.
template <int Bits>
constexpr int64_t column_bytes(int64_t groups) {
  return groups * kBytesOfGroup<Bits>;
}

// A register of float16 numbers, as float.
inline RegF load_half(const char* from) {
#if defined(__AVX512F__)
  return (RegF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (RegF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint16_t Half __attribute__((vector_size(kWidth * 2)));
  const RegU half = __builtin_convertvector(load_as<Half>(from), RegU);
  // The exponent is moved to where float32 has it, and its bias is multiplied in, which is exact for small numbers too.
  const RegU moved = (half & 0x7fff) << 13 | (half & 0x8000) << 16;
  return (RegF)moved * spread(5.192296858534828e33f);
#endif
}

// How the products of a group are summed. `add` adds, for each column, the products of four of its numbers, which have no
// sign, with the four of a row that each lane of `row` holds; `total` returns sums of 32 bits.
template <int Bits>
struct GroupSum {
  static RegI add(RegI acc, RegU numbers, RegU row) {
#if defined(__AVX512VNNI__)
    return (RegI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)numbers, (__m512i)row);
#else
    // Every other byte at a time, as numbers of 16 bits.
    typedef int16_t Numbers __attribute__((vector_size(kRegisterBytes)));
    acc = Units<Shorts>::add(acc, numbers & 0x00ff00ff, (RegU)((Numbers)row << 8 >> 8));
    return Units<Shorts>::add(acc, numbers >> 8 & 0x00ff00ff, (RegU)((Numbers)row >> 8));
#endif
  }
  static RegI total(RegI acc) { return acc; }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Each lane holds two sums of 16 bits, which hold the products of a group: each of two of a unit's four numbers.
template <>
struct GroupSum<4> {
  typedef int16_t Numbers __attribute__((vector_size(kRegisterBytes)));
  static_assert(kGrouped / 2 * 15 * 127 < 1 << 15);

  static RegI add(RegI acc, RegU numbers, RegU row) {
    return (RegI)((Numbers)acc + (Numbers)_mm256_maddubs_epi16((__m256i)numbers, (__m256i)row));
  }
  static RegI total(RegI acc) { return Units<Shorts>::add(RegI{}, (RegU)acc, (RegU)(Numbers{} + 1)); }
};
#endif

// Rows that are multiplied at a time: each takes the sums of a group and those of all groups.
constexpr int64_t kMostGroupedRows = kWidth == 16 ? 12 : 3;

// sums[r] = row r · 16 columns. Meanwhile `ahead` is fetched, `step` bytes a group: what is `Near` is needed at once.
template <int Bits, int R, bool Near>
void multiply_groups(const g8* values, const RowGroup* row_groups, int64_t groups, const char* columns,
                     const char* ahead, int64_t step, VecF* sums) {
  constexpr int V = kRegisters;
  RowPointers<R> rows(reinterpret_cast<const uint32_t*>(values), groups * kGroupUnits);
  RowPointers<R, const RowGroup> of_rows(row_groups, groups);
  RegF total[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) total[r][v] = RegF{};
  for (int64_t g = 0; g < groups; ++g, columns += kBytesOfGroup<Bits>, ahead += step) {
    if constexpr (!Near || R > kRowsOfStream)
      for (int64_t line = 0; line < step; line += kLine) __builtin_prefetch(ahead + line, 0, 2);
    RegI acc[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] = RegI{} + (Bits == 8 ? of_rows[r]->excess : 0);
#pragma GCC unroll 16
    for (int64_t u = 0; u < kNumberBytes<Bits> / 64; ++u) {
      RegU low[V], high[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const RegU packed = load_as<RegU>(columns + u * 64 + v * kRegisterBytes);
        low[v] = Bits == 8 ? packed : packed & 0x0f0f0f0f;
        high[v] = packed >> 4 & 0x0f0f0f0f;
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const RegU row = RegU{} + rows[r][u];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) acc[r][v] = GroupSum<Bits>::add(acc[r][v], low[v], row);
        if constexpr (Bits == 4) {
          const RegU later = RegU{} + rows[r][u + kGroupUnits / 2];
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) acc[r][v] = GroupSum<Bits>::add(acc[r][v], high[v], later);
        }
      }
    }
    const char* scales = columns + kNumberBytes<Bits>;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const RegF scale = load_half(scales + v * kWidth * 2);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        RegF part = __builtin_convertvector(GroupSum<Bits>::total(acc[r][v]), RegF) * scale;
        if constexpr (Bits == 4)
          part = multiply_add(part, load_half(scales + kScalesBytes + v * kWidth * 2), spread(of_rows[r]->sum));
        total[r][v] = multiply_add(total[r][v], part, spread(of_rows[r]->scale));
      }
    }
    rows.advance(kGroupUnits);
    of_rows.advance(1);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v)
      store_register(reinterpret_cast<char*>(sums + r) + v * kRegisterBytes, total[r][v]);
}

// A tile of `count` rows.
template <int Bits, bool Near, int... R>
void multiply_groups(int64_t count, const g8* values, const RowGroup* row_groups, int64_t groups, const char* columns,
                     const char* ahead, int64_t step, VecF* sums, std::integer_sequence<int, R...>) {
  using Tile = void (*)(const g8*, const RowGroup*, int64_t, const char*, const char*, int64_t, VecF*);
  static constexpr Tile tiles[] = {multiply_groups<Bits, R + 1, Near>...};
  tiles[count - 1](values, row_groups, groups, columns, ahead, step, sums);
}

template <int Bits, bool Near>
void multiply_groups(int64_t count, const g8* values, const RowGroup* row_groups, int64_t groups, const char* columns,
                     const char* ahead, int64_t step, VecF* sums) {
  multiply_groups<Bits, Near>(count, values, row_groups, groups, columns, ahead, step, sums,
                              std::make_integer_sequence<int, kMostGroupedRows>());
}

// What the rows of a product are scaled by: one for a row, or one for each of its groups.
template <class E>
using RowScales = std::conditional_t<std::is_same_v<E, g8>, RowGroup, float>;

template <class E>
constexpr int64_t scales_of_row(int64_t inputs) {
  return std::is_same_v<E, g8> ? inputs / kGrouped : 1;
}

template <>
struct Rows<g8> {
  const g8* values;
  const RowGroup* groups;  // of each row, one after another
  int64_t count;
};

template <>
constexpr int64_t kMostRows<g8> = kMostGroupedRows;

template <>
class GroupedProduct<g8> {
 public:
  GroupedProduct(const Linear& w, const Rows<g8>& x, const Linear& next, int threads)
      : w_(w), x_(x), parts_(w, threads), next_(next, threads) {}

  int64_t count() const { return parts_.count(); }

  template <class Done>
  void compute(int64_t part, const Done& done) const {
    w_.bits == 4 ? compute<4>(part, done) : compute<8>(part, done);
  }

 private:
  template <int Bits, class Done>
  void compute(int64_t part, const Done& done) const {
    const int64_t groups = w_.inputs / kGrouped, bytes = column_bytes<Bits>(groups);
    const int64_t first = parts_.first(part), last = parts_.first(part + 1);
    const char* after = parts_.after(part, next_);
    const int64_t tiles = (x_.count + kMostGroupedRows - 1) / kMostGroupedRows;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t from = t * x_.count / tiles, count = (t + 1) * x_.count / tiles - from;
      const g8* values = x_.values + from * w_.inputs;
      const RowGroup* row_groups = x_.groups + from * groups;
      for (int64_t p = first; p < last; ++p) {
        VecF sums[2][kMostGroupedRows];
        for (int64_t half = 0; half < 2; ++half) {
          const char* columns = parts_.panel(p) + half * bytes;
          if (tiles == 1) {
            multiply_groups<Bits, true>(count, values, row_groups, groups, columns, columns + kNear,
                                        kBytesOfGroup<Bits>, sums[half]);
          } else {
            const char* ahead = after + ((p - first) * 2 + half) * bytes + t * bytes / tiles;
            multiply_groups<Bits, false>(count, values, row_groups, groups, columns, ahead,
                                         piece_bytes(kBytesOfGroup<Bits>, tiles), sums[half]);
          }
        }
        for (int64_t r = 0; r < count; ++r) {
          const int64_t column = p * kPanel;
          done(from + r, column, finished(sums[0][r], column), finished(sums[1][r], column + kLanes));
        }
      }
    }
    if (tiles == 1 && parts_.ends_range(part)) fetch_near(after);
  }

  VecF finished(VecF sum, int64_t column) const { return w_.bias == nullptr ? sum : sum + load(w_.bias + column); }

  const Linear& w_;
  const Rows<g8> x_;
  const Groups parts_, next_;
};

// x [dim] in 8 bits, with a scale for each group: the greatest of its values is 127.
template <class T>
void quantize_groups(const T* x, int64_t dim, g8* out, RowGroup* groups) {
  for (int64_t g = 0; g < dim / kGrouped; ++g) {
    const T* from = x + g * kGrouped;
    const Quantization found = quantization_of(from, kGrouped, 127.0f);
    VecI sum = {};
    for (int64_t d = 0; d < kGrouped; d += kLanes) {
      const VecI numbers = rounded(load(from + d) * found.inverse);
      sum += numbers;
      store_bytes(out + g * kGrouped + d, numbers);
    }
    const int32_t whole = total(sum);
    // Without a sign, so that what NaN is rounded to may exceed 32 bits: its scale is NaN.
    groups[g] = {found.scale, static_cast<float>(whole), static_cast<int32_t>(-128u * static_cast<uint32_t>(whole))};
  }
}

}  // namespace bw
