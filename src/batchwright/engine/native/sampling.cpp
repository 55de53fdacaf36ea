// Drawing tokens: each row in two passes over its logits, nothing the size of the vocabulary written.
//
// A token's weight is e^((logit - greatest) / temperature), so the likeliest weighs 1. Weights are summed in groups of
// kGroup, always from the first token on: a row's draw depends on nothing but the row.
#include <algorithm>
#include <limits>
#include <vector>

#include "simd.h"

namespace bw {
namespace {

constexpr int64_t kGroup = 128;
// A token is among the candidates of a cutoff when its weight is at least e^-cutoff.
constexpr float kCutoffs[] = {2.0f, 4.0f, 8.0f, 16.0f};
constexpr int kNumCutoffs = 4;

struct Choice {
  float greatest, temperature, min_p;
  int64_t top_k;  // 0: all
  double top_p, uniform;
};

struct Candidate {
  float weight;
  int32_t token;
};

template <class T>
class Row {
 public:
  Row(const T* logits, int64_t dim, const Choice& choice) : logits_(logits), dim_(dim), c_(choice) {}

  int64_t draw() { return c_.top_k > 0 || c_.top_p < 1.0 ? draw_sorted() : draw_direct(); }

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

  int64_t draw_sorted() const {
    std::vector<Candidate> found = candidates();
    std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
      return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
    });
    if (c_.top_k > 0 && static_cast<int64_t>(found.size()) > c_.top_k) found.resize(c_.top_k);
    double mass = left_;
    if (c_.top_k > 0) {
      mass = 0;
      for (const Candidate& candidate : found) mass += candidate.weight;
    }
    const double nucleus = c_.top_p * mass;
    double kept = 0;
    size_t count = 0;
    for (; count < found.size() && (count == 0 || kept < nucleus); ++count) kept += found[count].weight;
    const double target = c_.uniform * kept;
    double before = 0;
    for (size_t i = 0; i < count; ++i) {
      before += found[i].weight;
      if (before > target) return found[i].token;
    }
    return found[count - 1].token;
  }

  // All that top-k and top-p can reach, and few more: those above the highest cutoff that leaves enough.
  std::vector<Candidate> candidates() const {
    float exponents[kGroup], weights[kGroup];
    double mass[kNumCutoffs] = {};
    int64_t count[kNumCutoffs] = {};
    left_ = 0;
    for (int64_t g = 0; g < groups(); ++g) {
      weigh(g, exponents, weights);
      VecF all = {}, above[kNumCutoffs] = {};
      VecI number[kNumCutoffs] = {};
      for (int64_t i = 0; i < kGroup; i += kLanes) {
        const VecF w = load(weights + i), e = load(exponents + i);
        all += w;
        for (int j = 0; j < kNumCutoffs; ++j) {
          const VecI in = (VecI)(e >= -kCutoffs[j]) & (VecI)(w > 0.0f);
          above[j] += select(in, w, VecF{});
          number[j] -= in;
        }
      }
      left_ += sum(all);
      for (int j = 0; j < kNumCutoffs; ++j) {
        mass[j] += sum(above[j]);
        for (int64_t lane = 0; lane < kLanes; ++lane) count[j] += number[j][lane];
      }
    }
    float cutoff = std::numeric_limits<float>::infinity();
    for (int j = kNumCutoffs - 1; j >= 0; --j)
      if (c_.top_k > 0 ? count[j] >= c_.top_k : mass[j] >= c_.top_p * left_) cutoff = kCutoffs[j];
    std::vector<Candidate> found;
    for (int64_t g = 0; g < groups(); ++g) {
      weigh(g, exponents, weights);
      for (int64_t i = 0; i < kGroup; ++i)
        if (weights[i] > 0 && exponents[i] >= -cutoff)
          found.push_back({weights[i], static_cast<int32_t>(g * kGroup + i)});
    }
    return found;
  }

  const T* logits_;
  const int64_t dim_;
  const Choice c_;
  mutable double left_ = 0;  // of the whole row, what min-p leaves
};

template <class T>
void draw_rows(const T* logits, int64_t stride, int64_t dim, const int64_t* rows, int64_t count, const float* greatest,
               const float* temperatures, const float* min_p, const int64_t* top_k, const double* top_p,
               const double* uniforms, int64_t* tokens) {
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < count; ++i) {
    const Choice choice = {greatest[i], temperatures[i], min_p[i], top_k[i], top_p[i], uniforms[i]};
    tokens[i] = Row<T>(logits + rows[i] * stride, dim, choice).draw();
  }
}

// Minus infinity for the tokens whose bit in a row's mask is 0.
template <class T>
void mask_rows(T* logits, int64_t stride, int64_t dim, const int64_t* rows, int64_t count, const uint32_t* masks,
               int64_t words) {
  T none;
  store(&none, -std::numeric_limits<float>::infinity());
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    T* row = logits + rows[i] * stride;
    const uint32_t* mask = masks + i * words;
    for (int64_t start = 0; start < dim; start += 32) {
      const uint32_t bits = start / 32 < words ? mask[start / 32] : 0;
      if (bits == ~0u) continue;
      const int64_t end = std::min<int64_t>(dim - start, 32);
      for (int64_t token = 0; token < end; ++token)
        if (!(bits >> token & 1)) row[start + token] = none;
    }
  }
}

}  // namespace
}  // namespace bw

#define BW_SAMPLING(NAME, T)                                                                                          \
  extern "C" void bw_draw_rows_##NAME(const T* logits, int64_t stride, int64_t dim, const int64_t* rows,              \
                                      int64_t count, const float* greatest, const float* temperatures,                \
                                      const float* min_p, const int64_t* top_k, const double* top_p,                  \
                                      const double* uniforms, int64_t* tokens) {                                      \
    bw::draw_rows<T>(logits, stride, dim, rows, count, greatest, temperatures, min_p, top_k, top_p, uniforms,         \
                     tokens);                                                                                         \
  }                                                                                                                    \
  extern "C" void bw_mask_rows_##NAME(T* logits, int64_t stride, int64_t dim, const int64_t* rows, int64_t count,      \
                                      const uint32_t* masks, int64_t words) {                                          \
    bw::mask_rows<T>(logits, stride, dim, rows, count, masks, words);                                                  \
  }

BW_SAMPLING(f32, float)
BW_SAMPLING(bf16, bw::bf16)
