// The attention of attention.h as functions, and what writes its cache.
#include <omp.h>

#include "rows.h"

namespace bw {
namespace {

template <class T>
void attend_all(const Problem& p) {
  const AttentionPlan plan = attention_plan(p, omp_get_max_threads());
#pragma omp parallel
  {
    Tile<T> tile(p, plan);
    attend<T>(tile, plan.items, p.kv_heads, omp_get_num_threads());
  }
}

template <class T>
void rope_and_store_rows(typename Cached<T>::Row* qkv, int64_t rows, const HeadShape& shape, const float* cosines,
                         const float* sines, const int64_t* positions, const int64_t* slots, void* keys, void* values) {
  const int64_t half = shape.head_dim / 2;
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    rope_and_store<T>(qkv + row * shape.width(), shape, cosines + positions[row] * half,
                          sines + positions[row] * half, {keys, values, shape, slots[row]});
}

// Put keys and values into the cache: [rows][kv_heads][head_dim], rows `stride` apart.
template <class T>
void store_rows(const typename Cached<T>::Row* k, const typename Cached<T>::Row* v, int64_t rows, int64_t k_stride,
                int64_t v_stride, int64_t kv_heads, int64_t head_dim, const int64_t* slots, void* keys, void* values) {
  const HeadShape shape{0, kv_heads, head_dim};
#pragma omp parallel for schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    CacheSlot<T> to(keys, values, shape, slots[row]);
    for (int64_t h = 0; h < kv_heads; ++h) {
      to.store_key(h, k + row * k_stride + h * head_dim);
      to.store_value(h, v + row * v_stride + h * head_dim);
    }
  }
}

}  // namespace
}  // namespace bw

#define BW_ATTENTION(NAME, T)                                                                                      \
  extern "C" void bw_attend_##NAME(const void* query, const void* keys, const void* values, void* out,             \
                                   const int32_t* tables, const int32_t* starts, const int32_t* contexts,          \
                                   int64_t sequences, int64_t query_stride, int64_t table_stride, int64_t heads,   \
                                   int64_t kv_heads, int64_t head_dim, int64_t window, float scale,                \
                                   float softcap) {                                                                \
    bw::attend_all<T>({query, keys, values, out, tables, starts, contexts, sequences, query_stride, table_stride,      \
                   heads, kv_heads, head_dim, window, scale, softcap});                                            \
  }                                                                                                                \
  extern "C" void bw_rope_and_store_##NAME(bw::Cached<T>::Row* qkv, int64_t rows, int64_t heads, int64_t kv_heads, \
                                           int64_t head_dim, const float* cosines, const float* sines,             \
                                           const int64_t* positions, const int64_t* slots, void* keys,             \
                                           void* values) {                                                         \
    bw::rope_and_store_rows<T>(qkv, rows, {heads, kv_heads, head_dim}, cosines, sines, positions, slots, keys, values); \
  }                                                                                                                \
  extern "C" void bw_store_rows_##NAME(const bw::Cached<T>::Row* k, const bw::Cached<T>::Row* v, int64_t rows,     \
                                       int64_t k_stride, int64_t v_stride, int64_t kv_heads, int64_t head_dim,     \
                                       const int64_t* slots, void* keys, void* values) {                           \
    bw::store_rows<T>(k, v, rows, k_stride, v_stride, kv_heads, head_dim, slots, keys, values);                    \
  }

BW_ATTENTION(f32, float)
BW_ATTENTION(bf16, bw::bf16)
// Beside the compiled layers only tests call these.
BW_ATTENTION(int8, bw::Int8)
