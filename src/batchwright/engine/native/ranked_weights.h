// Weights in descending order, without sorting them all: a place in the order is found between two thresholds, by sums
// over what reaches each of several, and only what is left between two of them is sorted. Of equal weights the first
// token goes first.
//
// What top-p keeps of a flat row is tens of thousands of tokens, and the draw wants one of them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace bw {

struct WeightedToken {
  float weight;
  int32_t token;
};

class RankedWeights {
 public:
  struct Place {
    int32_t token;
    double through;  // sum of the weights up to this one
  };

  // Of `weights` [count], positive or 0, a whole number of vectors, which must stay where they are.
  RankedWeights(const float* weights, int64_t count) : weights_(weights), count_(count) {}

  // The first place up to which weights sum up to `mass`; the last one that weighs anything if they come to less.
  Place at_mass(double mass) {
    if (!has_first_) first_ = sums<true>(weights_, count_, kFirst);
    has_first_ = true;
    Interval found = all().part(first_, kFirst, 0.0, mass);
    if (found.amount > static_cast<double>(found.least) * kMany) {
      const Thresholds finer = found.divided();
      found = found.part(sums<true>(weights_, count_, finer), finer, 0.0, mass);
    }
    collect(found);
    const double before = found.before;
    for (int round = 0; round < kRounds && found.amount > static_cast<double>(found.least) * kFew; ++round) {
      const Thresholds finer = found.divided();
      const Interval narrower = found.part(sums<true>(room().weights.data(), kept_, finer), finer, before, mass);
      if (!(narrower.amount > 0)) break;  // the last weight of this interval is what such sums do not reach
      found = narrower;
    }
    const std::vector<WeightedToken> tokens = sorted(found);
    if (tokens.empty()) return {lightest(), found.before};
    Place place{0, found.before};
    for (const WeightedToken& each : tokens) {
      place = {each.token, place.through + each.weight};
      if (place.through >= mass) break;
    }
    return place;
  }

  // The `number` greatest weights in their order, or all that are positive if there are fewer.
  std::vector<WeightedToken> greatest(int64_t number) {
    const double wanted = static_cast<double>(number);
    Interval found = all().part(sums<false>(weights_, count_, kFirst), kFirst, 0.0, wanted);
    for (int round = 0; round < kRounds && found.before + found.amount > 2 * wanted + kFew; ++round) {
      const Thresholds finer = found.divided();
      found = found.part(sums<false>(weights_, count_, finer), finer, 0.0, wanted);
    }
    found.below = all().below;
    collect(found);
    std::vector<WeightedToken> tokens = sorted(found);
    if (static_cast<int64_t>(tokens.size()) > number) tokens.resize(number);
    return tokens;
  }

 private:
  static constexpr int kSteps = 8, kRounds = 4;
  static constexpr int64_t kFew = 64, kMany = 2048;  // which are sorted in no time, and which are not copied in no time

  using Thresholds = std::array<float, kSteps>;  // descending
  using Sums = std::array<double, kSteps>;       // over what reaches each threshold: its weight, or its number

  // e^-1 to e^-16; the likeliest token weighs 1.
  static constexpr Thresholds kFirst = {0.36787944f,   0.13533528f,  0.049787068f,  0.018315639f,
                                        0.0024787522f, 3.354626e-4f, 1.6701701e-5f, 1.12535175e-7f};

  // Weights from `least` on that are below `below`.
  struct Interval {
    float below, least;
    double before, amount;  // sum over those that are not below it, and over these

    // The part in which sums, `offset` added to each, begin to reach `wanted`.
    Interval part(const Sums& sums, const Thresholds& thresholds, double offset, double wanted) const {
      Interval found{below, least, before, amount};
      for (int i = 0; i < kSteps; ++i) {
        const double sum = offset + sums[i];
        // Its own is reached if nothing else is: it was by other sums, which need not be rounded as these are.
        if (sum >= wanted || thresholds[i] == least)
          return {found.below, thresholds[i], found.before, sum - found.before};
        found = {thresholds[i], least, sum, before + amount - sum};
      }
      return found;
    }

    // Thresholds within it, of which the last is its own. Roots need no newer C library, as powers would.
    Thresholds divided() const {
      static_assert(kSteps == 8);
      const double most = std::min(below, 1.0f), step = std::sqrt(std::sqrt(std::sqrt(least / most)));
      Thresholds found;
      double threshold = most;
      for (float& each : found) each = static_cast<float>(threshold *= step);
      found.back() = least;
      return found;
    }
  };

  struct Room {
    std::vector<float> weights;
    std::vector<int32_t> tokens;
  };

  // What a thread copies to, one row after another: making it anew would cost as much as the sums.
  static Room& room() {
    thread_local Room found;
    return found;
  }

  // Whatever is positive.
  static Interval all() {
    constexpr double unknown = std::numeric_limits<double>::infinity();
    return {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::denorm_min(), 0.0, unknown};
  }

  template <bool kOfWeights>
  static Sums sums(const float* weights, int64_t count, const Thresholds& thresholds) {
    constexpr int64_t kBlock = 64 * kLanes;  // that are summed in float
    Sums found{};
    for (int64_t from = 0; from < count; from += kBlock) {
      VecF acc[kSteps] = {};
      for (int64_t i = from; i < std::min(from + kBlock, count); i += kLanes) {
        const VecF w = load(weights + i), each = kOfWeights ? w : broadcast(1.0f);
        for (int j = 0; j < kSteps; ++j) acc[j] += select((VecI)(w >= thresholds[j]), each, VecF{});
      }
      for (int j = 0; j < kSteps; ++j) found[j] += sum(acc[j]);
    }
    return found;
  }

  // Copies the weights of an interval, with their tokens, in the order of these.
  void collect(const Interval& from) {
    if (from.below == kept_below_ && from.least == kept_least_) return;
    kept_below_ = from.below;
    kept_least_ = from.least;
    auto& [weights, tokens] = room();
    if (static_cast<int64_t>(weights.size()) < count_ + kLanes) {
      weights.resize(count_ + kLanes);
      tokens.resize(count_ + kLanes);
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < count_; i += kLanes) {
      if (!reaches(load(weights_ + i), from.least)) continue;
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const float w = weights_[i + lane];
        weights[kept] = w;
        tokens[kept] = static_cast<int32_t>(i + lane);
        kept += w >= from.least && w < from.below;
      }
    }
    kept_ = (kept + kLanes - 1) / kLanes * kLanes;
    std::fill(weights.begin() + kept, weights.begin() + kept_, 0.0f);
  }

  // The last token that weighs anything.
  int32_t lightest() const {
    int64_t found = 0;
    for (int64_t i = 0; i < count_; ++i)
      if (weights_[i] > 0 && (!(weights_[found] > 0) || weights_[i] <= weights_[found])) found = i;
    return static_cast<int32_t>(found);
  }

  // Those of an interval, of which all were collected.
  std::vector<WeightedToken> sorted(const Interval& of) const {
    std::vector<WeightedToken> found;
    bool in_order = true;
    const auto& [weights, tokens] = room();
    for (int64_t i = 0; i < kept_; ++i) {
      const float w = weights[i];
      if (w < of.least || w >= of.below) continue;
      in_order &= found.empty() || found.back().weight >= w;
      found.push_back({w, tokens[i]});
    }
    if (!in_order) {
      std::sort(found.begin(), found.end(), [](const WeightedToken& a, const WeightedToken& b) {
        return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
      });
    }
    return found;
  }

  const float* const weights_;
  const int64_t count_;
  bool has_first_ = false;
  Sums first_{};
  float kept_below_ = 0.0f, kept_least_ = 0.0f;
  int64_t kept_ = 0;  // a whole number of vectors
};

}  // namespace bw
