// All layers of a Llama for one step. E is what the products multiply, bf16 or u8 (int8 + 128),
// with keys and values in bfloat16 or 8 bits; everything else is bfloat16.
//
// Threads share the work in one of two ways. A step of many rows is cut in parts, one for each thread, which it computes
// from the first layer to the last: no row moves from one core to another, and a part waits only for keys and values that
// it reads and another one writes. The weights then go through every core, which is worth it when there are many rows to
// each. Any other step is computed by all threads together: each takes some columns of a product, and they wait for each
// other between two phases.
#include <omp.h>

#include <atomic>
#include <thread>
#include <type_traits>

#include "parts.h"
#include "rows.h"

namespace bw {
namespace {

// How many layers' keys and values a part has written.
struct alignas(64) Progress {
  std::atomic<int64_t> layers{0};

  void wait_for(int64_t count) const {
    for (int64_t spins = 0; layers.load(std::memory_order_acquire) < count; ++spins) {
      if (spins > 10000) std::this_thread::yield();
    }
  }
};

// Seconds that a part spent, by kind.
struct alignas(64) Spent {
  double of[3] = {};
};

// A part's memory between two products. E as below.
template <class E>
struct Scratch {
  E* input;
  float* scales;
  bf16 *qkv, *attended, *inner;
  char* end;

  Scratch(const Model& m, int64_t rows, char* at) {
    const int64_t queries = m.heads * m.head_dim;
    input = take<E>(at, rows * std::max({m.hidden, queries, m.intermediate}));
    scales = take<float>(at, rows);
    qkv = take<bf16>(at, rows * (m.heads + 2 * m.kv_heads) * m.head_dim);
    attended = take<bf16>(at, rows * queries);
    inner = take<bf16>(at, rows * m.intermediate);
    end = at;
  }

  static constexpr int64_t kArrays = 5;

 private:
  template <class T>
  static T* take(char*& at, int64_t count) {
    T* found = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;
    return found;
  }
};

template <class E>
class Decoder {
  static constexpr bool kQuantized = std::is_same_v<E, u8>;
  using Cache = std::conditional_t<kQuantized, Int8, bf16>;  // keys and values

 public:
  // Computes one of the parts of `step`, whose progress is `progress` [parts] and whose times go to `spent` [parts].
  Decoder(const Model& model, const Step& step, const std::vector<Part>& parts, size_t index, Progress* progress,
          Spent* spent, const Scratch<E>& scratch)
      : m_(model), s_(step), heads_{model.heads, model.kv_heads, model.head_dim}, scratch_(scratch),
        progress_(progress), index_(index), part_(parts[index]) {
    const int64_t first = part_.first_row, end = part_.end_row;
    const int64_t from = std::upper_bound(step.starts, step.starts + step.sequences, first) - step.starts - 1;
    const int64_t to = std::lower_bound(step.starts + from, step.starts + step.sequences, end) - step.starts;
    for (int64_t s = from; s < to; ++s) {
      starts_.push_back(static_cast<int32_t>(std::max<int64_t>(step.starts[s] - first, 0)));
      contexts_.push_back(step.contexts[s] - static_cast<int32_t>(std::max<int64_t>(step.starts[s + 1] - end, 0)));
    }
    starts_.push_back(static_cast<int32_t>(end - first));
    const int64_t* logits_end = step.logit_rows + step.num_logit_rows;
    const int64_t* wanted = std::lower_bound(step.logit_rows, logits_end, first);
    for (const int64_t* row = wanted; row < logits_end && *row < end; ++row) logit_rows_.push_back(*row - first);
    first_logit_ = wanted - step.logit_rows;
    s_.logits += (first_logit_ - count_greedy(0, first_logit_)) * s_.logits_stride;
    place_rows();
    s_.rows = end - first;
    s_.residual += first * m_.hidden;
    s_.positions += first;
    s_.slots += first;
    s_.tables += from * s_.table_stride;
    if (s_.seconds != nullptr) s_.seconds = spent[index].of;
  }

  void run(int threads) {
    const Problem all = attention();
    const AttentionPlan plan = attention_plan(all, threads);
    AttentionPlan last_plan;
    const bf16* greedy_rows = reinterpret_cast<bf16*>(scratch_.input) + num_plain_ * m_.hidden;
    Screening screening(m_.screen, greedy_rows, num_greedy_, greedy_masks(), s_.mask_words, threads);
#pragma omp parallel num_threads(threads)
    {
      lap(kRest);
      Tile<Cache> tile(all, plan);
      const int64_t last = m_.num_layers - 1;
      for (int64_t index = 0; index < last; ++index) {
        const Layer& layer = m_.layers[index];
        project(layer, threads);
        publish_and_wait(index);
        attend_all(layer, tile, plan, threads);
        finish(layer, m_.layers[index + 1].qkv, threads);
      }
      project(m_.layers[last], threads);
      publish_and_wait(last);
#pragma omp single
      {
        drop_rows();
        last_plan = attention_plan(attention(), threads);
      }
      Tile<Cache> last_tile(attention(), last_plan);
      attend_all(m_.layers[last], last_tile, last_plan, threads);
      finish(m_.layers[last], num_plain_ > 0 || num_greedy_ == 0 ? m_.head : m_.screen->rough, threads);
      logits(screening, threads);
    }
  }

 private:
  enum Kind { kProducts, kAttention, kRest };

  // Queries; keys and values go to the cache.
  void project(const Layer& layer, int threads) {
    norm_rows(layer.input_norm);
    product(layer.qkv, input(s_.rows), layer.output, threads, writer(scratch_.qkv, heads_.width()));
    rotate(layer);
    lap(kRest);
  }

  // Tells other parts that the keys and values of a layer are there, and waits for those of others.
  void publish_and_wait(int64_t layer) {
    progress_[index_].layers.store(layer + 1, std::memory_order_release);
    for (const int other : part_.after) progress_[other].wait_for(layer + 1);
    lap(kAttention);
  }

  void attend_all(const Layer& layer, Tile<Cache>& tile, const AttentionPlan& plan, int threads) {
    tile.read(layer.keys, layer.values, layer.window);
    attend<Cache>(tile, plan.items, m_.kv_heads, threads);
    lap(kAttention);
  }

  // What is left of a layer after attention; `next` is the product after it.
  void finish(const Layer& layer, const Linear& next, int threads) {
    product(layer.output, prepared(scratch_.attended, heads_.queries(), 1), layer.gate_up, threads, adder());
    norm_rows(layer.post_norm);
    product(layer.gate_up, input(s_.rows), layer.down, threads,
            [this](int64_t row, int64_t column, VecF gate, VecF up) {
              bw::store(scratch_.inner + row * m_.intermediate + column / 2, silu(gate) * up);
            });
    product(layer.down, prepared(scratch_.inner, m_.intermediate, m_.mix), next, threads, adder());
  }

  // After the last keys and values, only rows whose logits are wanted matter: most rows of a prompt end here. Attention
  // counts a sequence's rows from its end, so its rows from the first wanted one on are kept.
  void drop_rows() {
    size_t logit = 0;
    int64_t kept = 0;
    for (size_t s = 0; s < contexts_.size(); ++s) {
      const int64_t end = starts_[s + 1];
      const auto wanted = [&] { return logit < logit_rows_.size() && logit_rows_[logit] < end; };
      const int64_t first = wanted() ? logit_rows_[logit] : end;
      for (; wanted(); ++logit) logit_rows_[logit] += kept - first;
      move_rows(scratch_.qkv, heads_.width(), first, end, kept);
      move_rows(s_.residual, m_.hidden, first, end, kept);
      starts_[s] = static_cast<int32_t>(kept);
      kept += end - first;
    }
    starts_.back() = static_cast<int32_t>(kept);
    s_.rows = kept;
  }

  static void move_rows(bf16* rows, int64_t width, int64_t first, int64_t end, int64_t to) {
    std::memmove(rows + to * width, rows + first * width, (end - first) * width * sizeof(bf16));
  }

  bool greedy(int64_t logit) const { return s_.greedy != nullptr && s_.greedy[logit] != 0; }

  int64_t count_greedy(int64_t first, int64_t end) const {
    int64_t count = 0;
    for (int64_t logit = first; logit < end; ++logit) count += greedy(logit);
    return count;
  }

  // In the input of the head, rows whose logits are wanted go before those of which only the likeliest token is.
  void place_rows() {
    const int64_t count = logit_rows_.size();
    num_greedy_ = count_greedy(first_logit_, first_logit_ + count);
    num_plain_ = count - num_greedy_;
    int64_t next_plain = 0, next_greedy = num_plain_;
    for (int64_t r = 0; r < count; ++r) places_.push_back(greedy(first_logit_ + r) ? next_greedy++ : next_plain++);
  }

  std::vector<const uint32_t*> greedy_masks() const {
    std::vector<const uint32_t*> masks(num_greedy_, nullptr);
    if (s_.mask_of == nullptr) return masks;
    for (size_t r = 0; r < logit_rows_.size(); ++r) {
      const int64_t row = places_[r] - num_plain_, mask = s_.mask_of[first_logit_ + r];
      if (row >= 0 && mask >= 0) masks[row] = s_.masks + mask * s_.mask_words;
    }
    return masks;
  }

  void logits(Screening& screening, int threads) {
#pragma omp for schedule(static)
    for (size_t r = 0; r < logit_rows_.size(); ++r) norm_row(logit_rows_[r], m_.norm, places_[r]);
    const Linear& next = m_.layers[0].qkv;
    if (num_plain_ > 0) {
      const Linear& then = num_greedy_ > 0 ? m_.screen->rough : next;
      product(m_.head, input(num_plain_), then, threads, writer(s_.logits, s_.logits_stride));
    }
    if (num_greedy_ > 0) choose(screening, next, threads);
  }

  void choose(Screening& screening, const Linear& next, int threads) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < num_greedy_; ++row) screening.prepare(row);
    lap(kRest);
    screening.find(next, threads, omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
    for (size_t r = 0; r < logit_rows_.size(); ++r) {
      const int64_t row = places_[r] - num_plain_, logit = first_logit_ + r;
      if (row >= 0) screening.choose(row, s_.greatest + logit, s_.likeliest + logit);
    }
    lap(kProducts);
  }

  template <class Done>
  void product(const Linear& weight, const Rows<E>& rows, const Linear& next, int threads, const Done& done) {
    lap(kRest);
    multiply(weight, rows, next, threads, done);
    lap(kProducts);
  }

  // The time since the last lap counts as `kind`.
  void lap(Kind kind) {
    if (s_.seconds == nullptr || omp_get_thread_num() != 0) return;
    const double now = omp_get_wtime();
    if (lapped_ > 0) s_.seconds[kind] += now - lapped_;
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
      scratch_.scales[to] = quantize(normed.data(), m_.hidden, scratch_.input + to * m_.hidden);
    } else {
      rms_norm(x, weight, scratch_.input + to * m_.hidden, m_.hidden, m_.eps);
    }
  }

  void rotate(const Layer& layer) {
    const int64_t half = m_.head_dim / 2;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < s_.rows; ++row) {
      bf16* qkv = scratch_.qkv + row * heads_.width();
      if (layer.query_norm != nullptr) {
        for (int64_t h = 0; h < m_.heads + m_.kv_heads; ++h) {
          bf16* head = qkv + h * m_.head_dim;
          rms_norm(head, h < m_.heads ? layer.query_norm : layer.key_norm, head, m_.head_dim, m_.eps);
        }
      }
      const int64_t next = std::min(row + 1, s_.rows - 1);
      CacheSlot<Cache>(layer.keys, layer.values, heads_, s_.slots[next]).prefetch(heads_);
      rope_and_store<Cache>(qkv, heads_, m_.cosines + s_.positions[row] * half, m_.sines + s_.positions[row] * half,
                           {layer.keys, layer.values, heads_, s_.slots[row]});
    }
  }

  Rows<E> input(int64_t count) const { return {scratch_.input, scratch_.scales, count}; }

  // `x` as a product's input: as it is, or mixed and quantized.
  Rows<E> prepared(const bf16* x, int64_t dim, int64_t vectors) {
    if constexpr (kQuantized) {
      thread_local std::vector<float> mixed;
      mixed.resize(dim);
#pragma omp for schedule(static)
      for (int64_t row = 0; row < s_.rows; ++row) {
        for (int64_t d = 0; d < dim; d += kLanes) bw::store(&mixed[d], load(x + row * dim + d));
        mix(mixed.data(), dim, vectors);
        scratch_.scales[row] = quantize(mixed.data(), dim, scratch_.input + row * dim);
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
    const int64_t sequences = contexts_.size();
    return {scratch_.qkv, nullptr, nullptr, scratch_.attended, s_.tables, starts_.data(), contexts_.data(), sequences,
            heads_.width(), s_.table_stride, m_.heads, m_.kv_heads, m_.head_dim, 0, m_.attention_scale, 0.0f};
  }

  const Model& m_;
  Step s_;
  const HeadShape heads_;
  const Scratch<E> scratch_;
  Progress* const progress_;
  const size_t index_;
  const Part& part_;
  std::vector<int32_t> starts_, contexts_;  // as in Step, of the rows of the part
  std::vector<int64_t> logit_rows_;
  std::vector<int64_t> places_;       // [logit rows] in the input of the head
  int64_t first_logit_ = 0;           // of the part, among those of the step
  int64_t num_plain_ = 0, num_greedy_ = 0;
  double lapped_ = 0;
};

template <class E>
void decode(const Model& model, const Step& step) {
  const int threads = omp_get_max_threads();
  const std::vector<Part> parts = cut(model, step, threads);
  std::vector<Progress> progress(parts.size());
  std::vector<Spent> spent(parts.size());
  std::vector<Decoder<E>> decoders;
  decoders.reserve(parts.size());
  char* at = step.scratch;
  for (size_t index = 0; index < parts.size(); ++index) {
    const Scratch<E> scratch(model, parts[index].end_row - parts[index].first_row, at);
    decoders.emplace_back(model, step, parts, index, progress.data(), spent.data(), scratch);
    at = scratch.end;
  }
  if (decoders.size() == 1) {
    decoders[0].run(threads);
  } else {
    // With fewer threads than were asked for, parts are computed in their order, so none waits for one that has not
    // begun.
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (size_t index = 0; index < decoders.size(); ++index) decoders[index].run(1);
  }
  if (step.seconds == nullptr) return;
  for (const Spent& each : spent) {
    for (int kind = 0; kind < 3; ++kind) step.seconds[kind] += each.of[kind] / spent.size();
  }
}

template <class E>
int64_t scratch_bytes(const Model& model, int64_t rows) {
  // Each part begins its arrays at a cache line.
  return Scratch<E>(model, rows, nullptr).end - static_cast<char*>(nullptr) +
         omp_get_max_threads() * Scratch<E>::kArrays * 64;
}

}  // namespace
}  // namespace bw

#define BW_DECODER(NAME, E)                                                                          \
  extern "C" int64_t bw_scratch_bytes_##NAME(const bw::Model* model, int64_t rows) {                 \
    return bw::scratch_bytes<E>(*model, rows);                                                       \
  }                                                                                                  \
  /* How many rows are multiplied at a time; 0: this processor has no products. */               \
  extern "C" int64_t bw_product_rows_##NAME() { return bw::kHasProducts ? bw::kMostRows<E> : 0; }    \
  extern "C" void bw_decode_##NAME(const bw::Model* model, const bw::Step* step) {                   \
    bw::decode<E>(*model, *step);                                                                    \
  }

BW_DECODER(bf16, bw::bf16)
BW_DECODER(int8, bw::u8)
