// The choice of tokens: the likeliest of a row, or a drawn one. A token's weight in a draw is
// e^((logit - greatest) / temperature), so the likeliest weighs 1. Weights are summed in groups of kGroup, always from the
// first token on: a row's draw depends on nothing but the row.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "choose_rows.h"
#include "ranked_weights.h"

namespace bw {
namespace {

constexpr int64_t kGroup = 128;

struct Likeliest {
  float logit;  // NaN when the row holds one
  int64_t token;  // the first of equal ones
};

template <class T>
Likeliest likeliest_of(const T* logits, int64_t dim) {
  const int64_t whole = dim / kLanes * kLanes;
  VecF most = broadcast(-INFINITY);
  VecI at = {}, nan = {};
  for (int64_t d = 0; d < whole; d += kLanes) {
    const VecF v = load(logits + d);
    const VecI above = (VecI)(v > most);
    nan |= (VecI)(v != v);
    most = select(above, v, most);
    at = (at & ~above) | ((VecI{} + static_cast<int32_t>(d)) & above);
  }
  Likeliest found = {-INFINITY, 0};
  bool spoilt = false;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t token = at[lane] + lane;
    spoilt |= nan[lane] != 0;
    if (most[lane] > found.logit || (most[lane] == found.logit && token < found.token)) found = {most[lane], token};
  }
  for (int64_t d = whole; d < dim; ++d) {
    const float v = to_float(logits[d]);
    spoilt |= v != v;
    if (v > found.logit) found = {v, d};
  }
  if (spoilt) found.logit = NAN;
  return found;
}

struct Choice {
  float greatest, temperature, min_p;
  int64_t top_k;  // 0: all
  double top_p, uniform;
};

template <class T>
class Row {
 public:
  Row(const T* logits, int64_t dim, const Choice& choice) : logits_(logits), dim_(dim), c_(choice) {}

  int64_t draw() { return c_.top_k > 0 || c_.top_p < 1.0 ? draw_ranked() : draw_direct(); }

 private:
  int64_t groups() const { return (dim_ + kGroup - 1) / kGroup; }

  // exponents and weights of a group; past the end of the row the weight is 0
  void weigh(int64_t group, float* exponents, float* weights) const {
    const int64_t start = group * kGroup, whole = std::min(dim_ - start, kGroup) / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) store(exponents + i, scaled(load(logits_ + start + i)));
    for (int64_t i = whole; i < kGroup; ++i)
      exponents[i] = start + i < dim_ ? (to_float(logits_[start + i]) - c_.greatest) / c_.temperature
                                      : -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const VecF w = exp(load(exponents + i));
      store(weights + i, select((VecI)(w >= c_.min_p), w, VecF{}));
    }
  }

  VecF scaled(VecF logits) const { return (logits - c_.greatest) / c_.temperature; }

  int64_t draw_direct() const {
    float exponents[kGroup], weights[kGroup];
    std::vector<double> ends(groups());
    double total = 0;
    for (int64_t g = 0; g < groups(); ++g) {
      weigh(g, exponents, weights);
      VecF acc = {};
      for (int64_t i = 0; i < kGroup; i += kLanes) acc += load(weights + i);
      total += sum(acc);
      ends[g] = total;
    }
    const double target = c_.uniform * total;
    int64_t group = std::upper_bound(ends.begin(), ends.end(), target) - ends.begin();
    // Rounding can put the target at the very end: then the last group that weighs anything is meant.
    group = std::min<int64_t>(group, std::lower_bound(ends.begin(), ends.end(), total) - ends.begin());
    weigh(group, exponents, weights);
    double before = group > 0 ? ends[group - 1] : 0.0;
    int64_t last = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      if (weights[i] > 0) last = i;
      before += weights[i];
      if (before > target && weights[i] > 0) break;
    }
    return group * kGroup + last;
  }

  int64_t draw_ranked() const {
    float exponents[kGroup];
    thread_local std::vector<float> weights;
    weights.resize(groups() * kGroup);
    double mass = 0;
    for (int64_t g = 0; g < groups(); ++g) {
      float* of_group = weights.data() + g * kGroup;
      weigh(g, exponents, of_group);
      VecF acc = {};
      for (int64_t i = 0; i < kGroup; i += kLanes) acc += load(of_group + i);
      mass += sum(acc);
    }
    RankedWeights ranked(weights.data(), weights.size());
    if (c_.top_k > 0) return draw_among(ranked.greatest(c_.top_k));
    const double kept = ranked.at_mass(c_.top_p * mass).through;
    return ranked.at_mass(above(c_.uniform * kept)).token;
  }

  int64_t draw_among(const std::vector<WeightedToken>& found) const {
    double mass = 0, kept = 0, before = 0;
    for (const WeightedToken& each : found) mass += each.weight;
    size_t count = 0;
    for (; count < found.size() && (count == 0 || kept < c_.top_p * mass); ++count) kept += found[count].weight;
    for (size_t i = 0; i < count; ++i) {
      before += found[i].weight;
      if (before > c_.uniform * kept) return found[i].token;
    }
    return found[count - 1].token;
  }

  static double above(double x) { return std::nextafter(x, std::numeric_limits<double>::infinity()); }

  const T* logits_;
  const int64_t dim_;
  const Choice c_;
};

// How tokens are drawn, for each row that draws one.
struct Choices {
  const float *temperatures, *min_p;
  const int64_t* top_k;
  const double *top_p, *uniforms;

  Choice of(int32_t place, float greatest) const {
    return {greatest, temperatures[place], min_p[place], top_k[place], top_p[place], uniforms[place]};
  }
};

// `places` [rows] among `choices`, negative where the likeliest token is wanted; null if it is for all rows. Of a row whose
// greatest logit is not finite no token is drawn.
template <class T>
void choose_rows(const T* logits, int64_t rows, int64_t stride, int64_t dim, const int32_t* places,
                 const Choices& choices, float* greatest, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* of_row = logits + row * stride;
    const Likeliest likeliest = likeliest_of(of_row, dim);
    greatest[row] = likeliest.logit;
    tokens[row] = likeliest.token;
    if (places != nullptr && places[row] >= 0 && std::isfinite(likeliest.logit))
      tokens[row] = Row<T>(of_row, dim, choices.of(places[row], likeliest.logit)).draw();
  }
}

// Minus infinity for the tokens whose bit in a row's mask is 0.
template <class T>
void mask_rows(T* logits, int64_t stride, int64_t dim, const int64_t* rows, int64_t count, const uint32_t* masks,
               int64_t words) {
  const VecF none = broadcast(-std::numeric_limits<float>::infinity());
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    T* row = logits + rows[i] * stride;
    const uint32_t* mask = masks + i * words;
    const int64_t whole = dim / kLanes * kLanes;
    for (int64_t start = 0; start < whole; start += kLanes) {
      const uint32_t bits = start / 32 < words ? mask[start / 32] >> start % 32 & kAllLanes : 0;
      if (bits == kAllLanes) continue;
      store(row + start, bits == 0 ? none : select(lanes_of(bits), load(row + start), none));
    }
    for (int64_t token = whole; token < dim; ++token)
      if (token / 32 >= words || !(mask[token / 32] >> token % 32 & 1)) store(row + token, none[0]);
  }
}

}  // namespace
}  // namespace bw

#define BW_SAMPLING(NAME, T)                                                                                          \
  extern "C" void bw_choose_rows_##NAME(const T* logits, int64_t rows, int64_t stride, int64_t dim,                   \
                                        const int32_t* places, const float* temperatures, const float* min_p,         \
                                        const int64_t* top_k, const double* top_p, const double* uniforms,            \
                                        float* greatest, int64_t* tokens) {                                           \
    bw::choose_rows<T>(logits, rows, stride, dim, places, {temperatures, min_p, top_k, top_p, uniforms}, greatest,    \
                       tokens);                                                                                       \
  }                                                                                                                    \
  extern "C" void bw_mask_rows_##NAME(T* logits, int64_t stride, int64_t dim, const int64_t* rows, int64_t count,      \
                                      const uint32_t* masks, int64_t words) {                                          \
    bw::mask_rows<T>(logits, stride, dim, rows, count, masks, words);                                                  \
  }

BW_SAMPLING(f32, float)
BW_SAMPLING(bf16, bw::bf16)
