// All layers of a Llama for one step, in one parallel region. E is what the products multiply, bf16 or u8 (int8 + 128),
// with keys and values in bfloat16 or 8 bits; everything else is bfloat16.
//
// Threads share the work in one of two ways. A batch whose sequences can be dealt out evenly is cut in parts, one for each
// thread, which have nothing to do with each other in this step: nobody waits, and no row moves from one core to another. The weights
// then go through every core, which is worth it when there are many rows to each. Any other batch is computed by all
// threads together: each takes some columns of a product, and they wait for each other between two phases.
#include <omp.h>

#include <type_traits>

#include "product.h"
#include "rows.h"

namespace bw {
namespace {

struct Layer {
  Linear qkv, output, gate_up, down;  // columns of gate_up: 16 of gate, 16 of up, and so on
  const bf16* input_norm;
  const bf16* post_norm;
  const bf16* query_norm;  // null: none, as in all but Qwen3
  const bf16* key_norm;
  void* keys;
  void* values;
  int64_t window;  // 0: all keys
};

struct Model {
  const Layer* layers;
  Linear head;
  const bf16* norm;
  const float* cosines;  // [positions][head_dim / 2]
  const float* sines;
  int64_t num_layers, hidden, intermediate, heads, kv_heads, head_dim;
  int64_t mix;  // int8: vectors of the input of `down` that are mixed with each other, 1: none
  float eps, attention_scale;
};

struct Step {
  bf16* residual;  // [rows][hidden]: embeddings, on which the layers add
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* tables;
  const int32_t* starts;
  const int32_t* contexts;
  const int64_t* logit_rows;
  bf16* logits;  // [logit rows][logits_stride]
  char* scratch;
  double* seconds;  // of products, attention and the rest; null: not wanted
  int64_t rows, sequences, table_stride, num_logit_rows, logits_stride;
};

constexpr int64_t kLeastRows = 24;  // of each part
constexpr int64_t kArrays = 5;      // in a part's scratch memory
constexpr double kEvenly = 1.05;    // the largest part, to their mean
// What it costs to read a value of the cache, in multiplications: measured at 22 GB/s and 460 GFLOP/s a core.
constexpr double kKeyCost = 20;

template <class E>
class Decoder {
  static constexpr bool kQuantized = std::is_same_v<E, u8>;
  using Kept = std::conditional_t<kQuantized, Int8, bf16>;  // keys and values

 public:
  // Computes the sequences from..to-1 of `step`, in the memory from `scratch` on.
  Decoder(const Model& model, const Step& step, int64_t from, int64_t to, char* scratch)
      : m_(model), s_(step), heads_{model.heads, model.kv_heads, model.head_dim}, first_row_(step.starts[from]) {
    const int64_t* logit_rows = s_.logit_rows;
    const int64_t* end = logit_rows + s_.num_logit_rows;
    s_.logit_rows = std::lower_bound(logit_rows, end, first_row_);
    s_.num_logit_rows = std::lower_bound(logit_rows, end, step.starts[to]) - s_.logit_rows;
    s_.logits += (s_.logit_rows - logit_rows) * s_.logits_stride;
    s_.rows = step.starts[to] - first_row_;
    s_.residual += first_row_ * m_.hidden;
    s_.positions += first_row_;
    s_.slots += first_row_;
    s_.sequences = to - from;
    s_.starts += from;
    s_.contexts += from;
    s_.tables += from * s_.table_stride;
    if (from > 0) s_.seconds = nullptr;
    const int64_t rows = s_.rows;
    char* at = scratch;
    input_ = take<E>(at, rows * widest());
    scales_ = take<float>(at, rows);
    qkv_ = take<bf16>(at, rows * heads_.width());
    attended_ = take<bf16>(at, rows * heads_.queries());
    inner_ = take<bf16>(at, rows * m_.intermediate);
    scratch_end_ = at;
  }

  char* scratch_end() const { return scratch_end_; }

  void run(int threads) {
    const Problem all = attention();
    const AttentionPlan plan = attention_plan(all, threads);
    AttentionPlan last_plan;
#pragma omp parallel num_threads(threads)
    {
      lap(kRest);
      Tile<Kept> tile(all, plan);
      const int64_t last = m_.num_layers - 1;
      for (int64_t index = 0; index < last; ++index) {
        const Layer& layer = m_.layers[index];
        project(layer, threads);
        attend_all(layer, tile, plan, threads);
        finish(layer, m_.layers[index + 1].qkv, threads);
      }
      project(m_.layers[last], threads);
#pragma omp single
      {
        drop_rows();
        last_plan = attention_plan(attention(), threads);
      }
      Tile<Kept> last_tile(attention(), last_plan);
      attend_all(m_.layers[last], last_tile, last_plan, threads);
      finish(m_.layers[last], m_.head, threads);
      logits(threads);
    }
  }

 private:
  enum Part { kProducts, kAttention, kRest };

  // Queries; keys and values go to the cache.
  void project(const Layer& layer, int threads) {
    norm_rows(layer.input_norm);
    product(layer.qkv, input(s_.rows), layer.output, threads, writer(qkv_, heads_.width()));
    rotate(layer);
    lap(kRest);
  }

  void attend_all(const Layer& layer, Tile<Kept>& tile, const AttentionPlan& plan, int threads) {
    tile.read(layer.keys, layer.values, layer.window);
    attend<Kept>(tile, plan.items, m_.kv_heads, threads);
    lap(kAttention);
  }

  // What is left of a layer after attention; `next` is the product after it.
  void finish(const Layer& layer, const Linear& next, int threads) {
    product(layer.output, prepared(attended_, heads_.queries(), 1), layer.gate_up, threads, adder());
    norm_rows(layer.post_norm);
    product(layer.gate_up, input(s_.rows), layer.down, threads,
            [this](int64_t row, int64_t column, VecF gate, VecF up) {
              bw::store(inner_ + row * m_.intermediate + column / 2, silu(gate) * up);
            });
    product(layer.down, prepared(inner_, m_.intermediate, m_.mix), next, threads, adder());
  }

  // After the last keys and values, only rows whose logits are wanted matter: most rows of a prompt end here. Attention
  // counts a sequence's rows from its end, so its rows from the first wanted one on are kept.
  void drop_rows() {
    logit_rows_.assign(s_.num_logit_rows, 0);
    starts_.assign(1, 0);
    int64_t kept = 0, logit = 0;
    for (int64_t s = 0; s < s_.sequences; ++s) {
      const int64_t end = s_.starts[s + 1] - first_row_;
      const auto wanted = [&] { return logit < s_.num_logit_rows && s_.logit_rows[logit] - first_row_ < end; };
      const int64_t first = wanted() ? s_.logit_rows[logit] - first_row_ : end;
      for (; wanted(); ++logit) logit_rows_[logit] = kept + s_.logit_rows[logit] - first_row_ - first;
      std::memmove(qkv_ + kept * heads_.width(), qkv_ + first * heads_.width(),
                   (end - first) * heads_.width() * sizeof(bf16));
      std::memmove(s_.residual + kept * m_.hidden, s_.residual + first * m_.hidden,
                   (end - first) * m_.hidden * sizeof(bf16));
      kept += end - first;
      starts_.push_back(static_cast<int32_t>(kept));
    }
    s_.rows = kept;
    s_.starts = starts_.data();
    s_.logit_rows = logit_rows_.data();
    first_row_ = 0;
  }

  void logits(int threads) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s_.num_logit_rows; ++r) norm_row(s_.logit_rows[r] - first_row_, m_.norm, r);
    product(m_.head, input(s_.num_logit_rows), m_.layers[0].qkv, threads, writer(s_.logits, s_.logits_stride));
  }

  template <class Done>
  void product(const Linear& weight, const Rows<E>& rows, const Linear& next, int threads, const Done& done) {
    lap(kRest);
    multiply(weight, rows, next, threads, done);
    lap(kProducts);
  }

  // The time since the last lap counts as `part`.
  void lap(Part part) {
    if (s_.seconds == nullptr || omp_get_thread_num() != 0) return;
    const double now = omp_get_wtime();
    if (lapped_ > 0) s_.seconds[part] += now - lapped_;
    lapped_ = now;
  }

  void norm_rows(const bf16* weight) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s_.rows; ++row) norm_row(row, weight, row);
  }

  // The norm of a row of the residual, as row `to` of the next product's input.
  void norm_row(int64_t row, const bf16* weight, int64_t to) {
    const bf16* x = s_.residual + row * m_.hidden;
    if constexpr (kQuantized) {
      thread_local std::vector<float> normed;
      normed.resize(m_.hidden);
      rms_norm(x, weight, normed.data(), m_.hidden, m_.eps);
      scales_[to] = quantize(normed.data(), m_.hidden, input_ + to * m_.hidden);
    } else {
      rms_norm(x, weight, input_ + to * m_.hidden, m_.hidden, m_.eps);
    }
  }

  void rotate(const Layer& layer) {
    const int64_t half = m_.head_dim / 2;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s_.rows; ++row) {
      bf16* qkv = qkv_ + row * heads_.width();
      if (layer.query_norm != nullptr) {
        for (int64_t h = 0; h < m_.heads + m_.kv_heads; ++h) {
          bf16* head = qkv + h * m_.head_dim;
          rms_norm(head, h < m_.heads ? layer.query_norm : layer.key_norm, head, m_.head_dim, m_.eps);
        }
      }
      const int64_t next = std::min(row + 1, s_.rows - 1);
      CacheSlot<Kept>(layer.keys, layer.values, heads_, s_.slots[next]).prefetch(heads_);
      rope_and_store<Kept>(qkv, heads_, m_.cosines + s_.positions[row] * half, m_.sines + s_.positions[row] * half,
                           {layer.keys, layer.values, heads_, s_.slots[row]});
    }
  }

  Rows<E> input(int64_t count) const { return {input_, scales_, count}; }

  // `x` as a product's input: as it is, or mixed and quantized.
  Rows<E> prepared(const bf16* x, int64_t dim, int64_t vectors) {
    if constexpr (kQuantized) {
      thread_local std::vector<float> mixed;
      mixed.resize(dim);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < s_.rows; ++row) {
        for (int64_t d = 0; d < dim; d += kLanes) bw::store(&mixed[d], load(x + row * dim + d));
        mix(mixed.data(), dim, vectors);
        scales_[row] = quantize(mixed.data(), dim, input_ + row * dim);
      }
      return input(s_.rows);
    } else {
      return {x, nullptr, s_.rows};
    }
  }

  auto writer(bf16* out, int64_t stride) const {
    return [out, stride](int64_t row, int64_t column, VecF low, VecF high) {
      bw::store(out + row * stride + column, low);
      bw::store(out + row * stride + column + kLanes, high);
    };
  }

  auto adder() const {
    return [this](int64_t row, int64_t column, VecF low, VecF high) {
      bf16* to = s_.residual + row * m_.hidden + column;
      bw::store(to, load(to) + low);
      bw::store(to + kLanes, load(to + kLanes) + high);
    };
  }

  Problem attention() const {
    // `starts` counts rows from the beginning of the step.
    const bf16* query = qkv_ - first_row_ * heads_.width();
    bf16* out = attended_ - first_row_ * heads_.queries();
    return {query, nullptr, nullptr, out, s_.tables, s_.starts, s_.contexts, s_.sequences, heads_.width(),
            s_.table_stride, m_.heads, m_.kv_heads, m_.head_dim, 0, m_.attention_scale, 0.0f};
  }

  int64_t widest() const { return std::max({m_.hidden, heads_.queries(), m_.intermediate}); }

  template <class T>
  static T* take(char*& at, int64_t count) {
    T* found = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;
    return found;
  }

  const Model& m_;
  Step s_;
  const HeadShape heads_;
  int64_t first_row_;  // of the step's rows
  std::vector<int32_t> starts_;
  std::vector<int64_t> logit_rows_;
  E* input_;
  float* scales_;
  bf16 *qkv_, *attended_, *inner_;
  char* scratch_end_;
  double lapped_ = 0;
};

// Whether a part reads keys and values that this step writes in another part: two sequences with one beginning may come in
// one step, where the second finds the blocks of the first in the prefix cache.
bool parts_depend(const Step& step, const std::vector<int64_t>& firsts) {
  const size_t parts = firsts.size() - 1;
  std::vector<int32_t> writers;  // of each block: its part, counted from 1
  for (size_t part = 0; part < parts; ++part) {
    for (int64_t row = step.starts[firsts[part]]; row < step.starts[firsts[part + 1]]; ++row) {
      const size_t block = step.slots[row] / kBlock;
      if (block >= writers.size()) writers.resize(2 * block + 1);
      writers[block] = static_cast<int32_t>(part + 1);
    }
  }
  for (size_t part = 0; part < parts; ++part) {
    for (int64_t s = firsts[part]; s < firsts[part + 1]; ++s) {
      const int32_t* table = step.tables + s * step.table_stride;
      for (int64_t b = 0; b * kBlock < step.contexts[s]; ++b) {
        const size_t block = table[b];
        const int32_t writer = block < writers.size() ? writers[block] : 0;
        if (writer != 0 && writer != static_cast<int32_t>(part + 1)) return true;
      }
    }
  }
  return false;
}

// The first sequence of each part, and the end; empty when the batch is to be computed by all threads together.
std::vector<int64_t> parts(const Model& model, const Step& step, int threads) {
  if (threads < 2 || step.rows < threads * kLeastRows) return {};
  const Layer& layer = model.layers[0];
  const double row = model.hidden * (layer.qkv.outputs + layer.gate_up.outputs) +
                     layer.output.inputs * model.hidden + layer.down.inputs * model.hidden;
  const double key = kKeyCost * 2 * model.kv_heads * model.head_dim;
  std::vector<double> costs(step.sequences + 1);
  for (int64_t s = 0; s < step.sequences; ++s)
    costs[s + 1] = costs[s] + (step.starts[s + 1] - step.starts[s]) * (row + key * step.contexts[s]);
  const double share = costs.back() / threads;
  std::vector<int64_t> firsts{0};
  for (int part = 1; part <= threads; ++part) {
    auto at = std::lower_bound(costs.begin(), costs.end(), part * share - 1);
    if (at != costs.begin() && part * share - at[-1] < *at - part * share) --at;
    firsts.push_back(at - costs.begin());
    if (costs[firsts[part]] - costs[firsts[part - 1]] > share * kEvenly) return {};
  }
  if (parts_depend(step, firsts)) return {};
  return firsts;
}

template <class E>
void decode(const Model& model, const Step& step) {
  const int threads = omp_get_max_threads();
  const std::vector<int64_t> firsts = parts(model, step, threads);
  if (firsts.empty()) {
    Decoder<E>(model, step, 0, step.sequences, step.scratch).run(threads);
    return;
  }
  std::vector<Decoder<E>> decoders;
  char* scratch = step.scratch;
  for (int part = 0; part < threads; ++part) {
    decoders.emplace_back(model, step, firsts[part], firsts[part + 1], scratch);
    scratch = decoders.back().scratch_end();
  }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int part = 0; part < threads; ++part) decoders[part].run(1);
}

template <class E>
int64_t scratch_bytes(const Model& model, int64_t rows) {
  const int32_t starts[] = {0, static_cast<int32_t>(rows)};
  const int64_t none = 0;
  Step step{};
  step.starts = starts;
  step.logit_rows = &none;
  // Each part begins its arrays at a cache line.
  return Decoder<E>(model, step, 0, 1, nullptr).scratch_end() - static_cast<char*>(nullptr) +
         omp_get_max_threads() * kArrays * 64;
}

}  // namespace
}  // namespace bw

extern "C" int64_t bw_has_products() { return bw::kHasProducts; }

#define BW_DECODER(NAME, E)                                                                          \
  extern "C" int64_t bw_scratch_bytes_##NAME(const bw::Model* model, int64_t rows) {                 \
    return bw::scratch_bytes<E>(*model, rows);                                                       \
  }                                                                                                  \
  extern "C" void bw_decode_##NAME(const bw::Model* model, const bw::Step* step) {                   \
    bw::decode<E>(*model, *step);                                                                    \
  }

BW_DECODER(bf16, bw::bf16)
BW_DECODER(int8, bw::u8)
