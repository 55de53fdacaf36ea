// What stands between and after the matrix products, each one pass over its rows: norms, the gated activation, the
// greatest logit.
#include <cmath>

#include "rows.h"

namespace bw {
namespace {

// residual += delta (unless delta is null); out = residual / rms(residual) * weight. `dim` is a multiple of 16.
template <class T>
void add_rms_norm(const T* delta, T* residual, const T* weight, T* out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    T* x = residual + row * dim;
    if (delta != nullptr)
      for (int64_t d = 0; d < dim; d += kLanes) bw::store(x + d, load(x + d) + load(delta + row * dim + d));
    rms_norm(x, weight, out + row * dim, dim, eps);
  }
}

// Each head of each row divided by its own rms, in place: rows `stride` apart, `heads` heads of `head_dim`.
template <class T>
void head_rms_norm(T* x, const T* weight, int64_t rows, int64_t stride, int64_t heads, int64_t head_dim, float eps) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t h = 0; h < heads; ++h) {
      T* head = x + row * stride + h * head_dim;
      rms_norm(head, weight, head, head_dim, eps);
    }
  }
}

// out = silu(gate) * up, where each row of gate_up is [gate, up], each `dim` wide.
template <class T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t dim) {
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * dim;
    for (int64_t d = 0; d < dim; d += kLanes)
      bw::store(out + row * dim + d, silu(load(gate + d)) * load(gate + dim + d));
  }
}

}  // namespace
}  // namespace bw

#define BW_ELEMENTWISE(NAME, T)                                                                                   \
  extern "C" void bw_add_rms_norm_##NAME(const T* delta, T* residual, const T* weight, T* out, int64_t rows,      \
                                         int64_t dim, float eps) {                                                \
    bw::add_rms_norm<T>(delta, residual, weight, out, rows, dim, eps);                                            \
  }                                                                                                               \
  extern "C" void bw_head_rms_norm_##NAME(T* x, const T* weight, int64_t rows, int64_t stride, int64_t heads,     \
                                          int64_t head_dim, float eps) {                                          \
    bw::head_rms_norm<T>(x, weight, rows, stride, heads, head_dim, eps);                                          \
  }                                                                                                               \
  extern "C" void bw_silu_mul_##NAME(const T* gate_up, T* out, int64_t rows, int64_t dim) {                       \
    bw::silu_mul<T>(gate_up, out, rows, dim);                                                                     \
  }

BW_ELEMENTWISE(f32, float)
BW_ELEMENTWISE(bf16, bw::bf16)
