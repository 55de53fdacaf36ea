// The likeliest token of a row, without the product of the row with the whole head.
//
// The head is kept a second time in 8 bits: half the bytes to read, and twice as many products at a time. With x̂ and ŵ
// for what 8 bits leave of a row x and of a column w of the head, no product is far from that of the rounded ones:
//   |x·w - x̂·ŵ| ≤ |x|·|w - ŵ| + |x - x̂|·|ŵ|     (Cauchy and Schwarz, twice)
// So only the columns whose upper bound reaches the best lower bound can be the likeliest: a dozen of 49,152. They are
// multiplied as they are, each sum in the order of product.h: the outcome is bitwise that of the whole product.
//
// Where a row has a mask, its columns without a bit are none: neither a bound nor a candidate.
//
// Both sides are turned first by an orthogonal matrix, a Hadamard matrix on each `mixed` vectors. That changes no product,
// and spreads outliers, which would take the 8 bits to themselves.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "grouped.h"

namespace bw {

struct Screen {
  Linear rough;          // the head turned, in 8 bits; its bias is null, or 0 and -infinity behind the last column
  const float* lengths;  // [outputs padded to panels] |ŵ|
  const float* errors;   // [outputs padded to panels] |w - ŵ|, and what sums can lose in rounding for |x| = 1
  const bf16* columns;   // [outputs][inputs] as they are
  int64_t mixed;         // vectors; a power of two up to 32
};

// The Hadamard transform over the lanes of a vector, without its scale.
inline VecF mix_lanes(VecF x) {
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const VecI added = (lane_numbers() & distance) == 0;
    const VecF other = exchanged(x, distance);
    x = other + select(added, x, -x);
  }
  return x;
}

// Which columns can be the likeliest of a row, of those that a thread has gone through.
struct alignas(64) Candidates {
  struct Column {
    int32_t number;
    float upper;
  };

  float least = -std::numeric_limits<float>::max();  // what the upper bound of the greatest product must reach
  std::vector<Column> columns;
};

// Rows of which only the likeliest token is wanted: all are prepared, then each group of columns is gone through, and then
// each row's token is chosen.
class Screening {
 public:
  // `rows` [count][inputs], which are read later; `masks` [count] has those of rows, of `words`, or null for a row.
  Screening(const Screen* screen, const bf16* rows, int64_t count, std::vector<const uint32_t*> masks, int64_t words,
            int threads)
      : screen_(screen), rows_(rows), count_(count), masks_(std::move(masks)), words_(words), found_(threads) {
    if (count == 0) return;
    values_.resize(count * screen->rough.inputs);
    scales_.resize(count);
    lengths_.resize(count);
    errors_.resize(count);
  }

  // Rounds a row to 8 bits.
  void prepare(int64_t row) {
    const int64_t dim = screen_->rough.inputs;
    thread_local std::vector<float> turned;
    turned.resize(dim);
    for (int64_t d = 0; d < dim; d += kLanes) store(&turned[d], mix_lanes(load(rows_ + row * dim + d)) * 0.25f);
    mix(turned.data(), turned.data(), dim, screen_->mixed);
    u8* values = values_.data() + row * dim;
    const float scale = quantize(turned.data(), dim, values);
    VecF length = {}, error = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
      const VecF x = load(&turned[d]), rest = x - load_rounded(values + d) * scale;
      length = multiply_add(length, x, x);
      error = multiply_add(error, rest, rest);
    }
    scales_[row] = scale;
    lengths_[row] = std::sqrt(sum(length)) * kRoundedUp;
    errors_[row] = std::sqrt(sum(error)) * kRoundedUp;
  }

  // The product of the rounded rows with the rounded head; `next` and `threads` as in GroupedProduct.
  GroupedProduct<u8> product(const Linear& next, int threads) const {
    return {screen_->rough, {values_.data(), scales_.data(), count_}, next, threads};
  }

  // Goes through the columns of a group of `product`. No other thread may have the number `thread`, which is below `threads`.
  void find(const GroupedProduct<u8>& product, int64_t group, int thread) {
    std::vector<Candidates>& found = found_[thread];
    found.resize(count_);
    product.compute(group, [this, &found](int64_t row, int64_t column, const VecF& low, const VecF& high) {
      if (!has_bounds(row)) return;
      consider(row, column, low, found[row]);
      consider(row, column + kLanes, high, found[row]);
    });
  }

  // The greatest product of a row, rounded to bfloat16, and its first column. NaN: the row is not finite.
  void choose(int64_t row, float* greatest, int64_t* likeliest) {
    *greatest = -std::numeric_limits<float>::infinity();
    *likeliest = 0;
    std::vector<int32_t> numbers;
    if (has_bounds(row)) {
      float least = -std::numeric_limits<float>::max();
      for (const auto& found : found_)
        if (!found.empty()) least = std::max(least, found[row].least);
      for (const auto& found : found_) {
        if (found.empty()) continue;
        for (const Candidates::Column& column : found[row].columns)
          if (column.upper >= least) numbers.push_back(column.number);
      }
      std::sort(numbers.begin(), numbers.end());
    } else {
      for (int64_t column = 0; column < screen_->rough.outputs; ++column)
        if (allowed(row, column) & 1) numbers.push_back(static_cast<int32_t>(column));
    }
    for (size_t first = 0; first < numbers.size(); first += kLanes)
      take_greatest(row, &numbers[first], std::min<int64_t>(kLanes, numbers.size() - first), greatest, likeliest);
  }

 private:
  // Not with NaN or infinity, nor where squares are too small or too large for a float.
  bool has_bounds(int64_t row) const { return lengths_[row] > kLeastLength && lengths_[row] < kMostLength; }

  // The bits of a row's mask from a column on, for a vector of columns.
  uint32_t allowed(int64_t row, int64_t column) const {
    if (masks_[row] == nullptr) return ~0u;
    return column / 32 < words_ ? masks_[row][column / 32] >> column % 32 : 0;
  }

  static constexpr float kRoundedUp = 1.0f + 1e-4f;
  static constexpr float kLeastLength = 1e-12f, kMostLength = 1e15f;
  // Two numbers that become one in bfloat16 differ by less than this part of either.
  static constexpr float kBf16Step = 0.0079f;
  // What is smaller may be taken for 0; many times over, for the products of a sum.
  static constexpr float kTiny = 1e-30f;

  void consider(int64_t row, int64_t column, const VecF& product, Candidates& found) {
    const uint32_t bits = allowed(row, column) & kAllLanes;
    if (bits == 0) return;
    const VecF slack = multiply_add(load(screen_->errors + column) * lengths_[row], load(screen_->lengths + column),
                                    broadcast(errors_[row]));
    VecF upper = product + slack, lower_bounds = product - slack;
    if (bits != kAllLanes) {
      const VecI is_allowed = lanes_of(bits);
      const VecF none = broadcast(-std::numeric_limits<float>::infinity());
      upper = select(is_allowed, upper, none);
      lower_bounds = select(is_allowed, lower_bounds, none);
    }
    if (!reaches(upper, found.least)) return;
    const float lower = max(lower_bounds);
    found.least = std::max(found.least, lower - std::abs(lower) * kBf16Step - kTiny);
    for (int64_t lane = 0; lane < kLanes; ++lane)
      if (upper[lane] >= found.least) found.columns.push_back({static_cast<int32_t>(column + lane), upper[lane]});
  }

  // Each lane multiplies the row with a column; of equal products the first column wins.
  void take_greatest(int64_t row, const int32_t* numbers, int64_t count, float* greatest, int64_t* likeliest) const {
    const int64_t units = screen_->rough.inputs / 2;
    const uint32_t* x = reinterpret_cast<const uint32_t*>(rows_) + row * units;
    const uint32_t* columns[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane)
      columns[lane] = reinterpret_cast<const uint32_t*>(screen_->columns) + numbers[std::min(lane, count - 1)] * units;
    using U = Units<bf16>;
    VecF products;
    for (int64_t first = 0; first < kLanes; first += kWidth) {
      RegF acc = {};
      for (int64_t u = 0; u < units; ++u) {
        RegU weights;
        for (int64_t lane = 0; lane < kWidth; ++lane) weights[lane] = columns[first + lane][u];
        for (int part = 0; part < U::kParts; ++part)
          acc = U::add(acc, U::part(weights, part), U::part(RegU{} + x[u], part));
      }
      std::memcpy(reinterpret_cast<char*>(&products) + first * 4, &acc, sizeof acc);
    }
    bf16 rounded[kLanes];
    store(rounded, products);
    for (int64_t lane = 0; lane < count; ++lane) {
      const float product = to_float(rounded[lane]);
      if (product != product) *greatest = product;
      if (product > *greatest) *greatest = product, *likeliest = numbers[lane];
    }
  }

  const Screen* const screen_;
  const bf16* const rows_;
  const int64_t count_;
  const std::vector<const uint32_t*> masks_;
  const int64_t words_;
  std::vector<u8> values_;
  std::vector<float> scales_, lengths_, errors_;  // of each row: of 8 bits; |x|; |x - x̂|
  std::vector<std::vector<Candidates>> found_;    // [threads][rows], empty for a thread that found none
};

}  // namespace bw
