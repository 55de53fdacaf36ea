// All layers of a Llama for one step. E is what the products multiply: bf16, u8 (int8 + 128), or g8 (int8 with a scale for
// each group). Keys and values have 8 bits beside u8; everything else is bfloat16.
//
// Threads share the work in one of two ways. A step of many rows is cut in parts, one for each thread, which it computes
// from the first layer to the last: no row moves from one core to another, and a part waits only for keys and values that
// it reads and another one writes. The weights then go through every core, which is worth it when there are many rows to
// each. Any other step is computed by all threads together: each takes some columns of a product, and they wait for each
// other between two phases. The head is shared either way (head.h).
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <type_traits>
#include <vector>

#include "head.h"
#include "parts.h"

namespace bw {
namespace {

// How many layers' keys and values a part has written.
struct alignas(64) Progress {
  std::atomic<int64_t> layers{0};

  void wait_for(int64_t count) const {
    wait_until([&] { return layers.load(std::memory_order_acquire) >= count; });
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
  RowScales<E>* scales;
  bf16 *qkv, *attended, *inner;
  char* end;

  Scratch(const Model& m, int64_t rows, char* at) {
    const int64_t queries = m.heads * m.head_dim;
    const int64_t widest = std::max({m.hidden, queries, m.intermediate});
    input = take<E>(at, rows * widest);
    scales = take<RowScales<E>>(at, rows * scales_of_row<E>(widest));
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
  using Cache = CacheOf<E>;

 public:
  // Computes one of the parts of `step` by `team` of its `threads`. The part's progress is one of `progress` [parts], and
  // its times go to `spent` [parts].
  Decoder(const Model& model, const Step& step, const std::vector<Part>& parts, size_t index, Progress* progress,
          Spent* spent, const Scratch<E>& scratch, int threads, int team)
      : m_(model), s_(step), heads_{model.heads, model.kv_heads, model.head_dim}, scratch_(scratch),
        progress_(progress), index_(index), part_(parts[index]), team_(team),
        shares_(team), rounds_(team), wanted_(step, part_.first_row, part_.end_row),
        head_(model, step, wanted_, scratch.input, scratch.scales, threads, team) {
    const int64_t first = part_.first_row, end = part_.end_row;
    const int64_t from = std::upper_bound(step.starts, step.starts + step.sequences, first) - step.starts - 1;
    const int64_t to = std::lower_bound(step.starts + from, step.starts + step.sequences, end) - step.starts;
    for (int64_t s = from; s < to; ++s) {
      starts_.push_back(static_cast<int32_t>(std::max<int64_t>(step.starts[s] - first, 0)));
      contexts_.push_back(step.contexts[s] - static_cast<int32_t>(std::max<int64_t>(step.starts[s + 1] - end, 0)));
    }
    starts_.push_back(static_cast<int32_t>(end - first));
    s_.rows = end - first;
    s_.residual += first * m_.hidden;
    s_.positions += first;
    s_.slots += first;
    s_.tables += from * s_.table_stride;
    if (s_.seconds != nullptr) s_.seconds = spent[index].of;
  }

  void run() {
    const Problem all = attention();
    const AttentionPlan plan = attention_plan(all, team_);
    AttentionPlan last_plan;
#pragma omp parallel num_threads(team_)
    {
      lap(kRest);
      Tile<Cache> tile(all, plan);
      const int64_t last = m_.num_layers - 1;
      for (int64_t index = 0; index < last; ++index) {
        const Layer& layer = m_.layers[index];
        project(layer);
        publish_and_wait(index);
        attend_all(layer, tile, plan);
        finish(layer, m_.layers[index + 1].qkv);
      }
      project(m_.layers[last]);
      publish_and_wait(last);
#pragma omp single
      {
        drop_rows();
        last_plan = attention_plan(attention(), team_);
      }
      Tile<Cache> last_tile(attention(), last_plan);
      attend_all(m_.layers[last], last_tile, last_plan);
      finish(m_.layers[last], head_.first_weight());
      head_.open();
      // A part that has a thread to itself is computed by that of its number, if there is one, so no two have one number.
      share_head(static_cast<int>(index_) + omp_get_thread_num());
      lap(kProducts);
    }
  }

  bool can_be_helped() const { return head_.is_open(); }

  // Takes what is left of the head; `thread` is the number of this one in the step.
  void help(int thread, Spent* spent) {
    const double began = omp_get_wtime();
    share_head(thread);
    spent->of[kProducts] += omp_get_wtime() - began;
  }

 private:
  enum Kind { kProducts, kAttention, kRest };

  struct alignas(64) Round {
    uint32_t number = 0;
  };

  // Queries; keys and values go to the cache.
  void project(const Layer& layer) {
    norm_rows(layer.input_norm);
    product(layer.qkv, input(s_.rows), layer.output, [this](int64_t row, int64_t column, VecF low, VecF high) {
      bf16* to = scratch_.qkv + row * heads_.width() + column;
      bw::store(to, low);
      bw::store(to + kLanes, high);
    });
    rotate(layer);
    lap(kRest);
  }

  // Tells other parts that the keys and values of a layer are there, and waits for those of others.
  void publish_and_wait(int64_t layer) {
    progress_[index_].layers.store(layer + 1, std::memory_order_release);
    for (const int other : part_.after) progress_[other].wait_for(layer + 1);
    lap(kAttention);
  }

  void attend_all(const Layer& layer, Tile<Cache>& tile, const AttentionPlan& plan) {
    tile.read(layer.keys, layer.values, layer.window);
    attend<Cache>(tile, plan.items, m_.kv_heads, team_);
    lap(kAttention);
  }

  // What is left of a layer after attention; `next` is the product after it.
  void finish(const Layer& layer, const Linear& next) {
    product(layer.output, prepared(scratch_.attended, heads_.queries(), 1), layer.gate_up, adder());
    norm_rows(layer.post_norm);
    product(layer.gate_up, input(s_.rows), layer.down,
            [this](int64_t row, int64_t column, VecF gate, VecF up) {
              bw::store(scratch_.inner + row * m_.intermediate + column / 2, rough_silu(gate) * up);
            });
    product(layer.down, prepared(scratch_.inner, m_.intermediate, m_.mix), next, adder());
  }

  // After the last keys and values, only rows whose logits are wanted matter: most rows of a prompt end here. Attention
  // counts a sequence's rows from its end, so its rows from the first wanted one on are kept.
  void drop_rows() {
    size_t logit = 0;
    int64_t kept = 0;
    for (size_t s = 0; s < contexts_.size(); ++s) {
      const int64_t end = starts_[s + 1];
      const auto wanted = [&] { return logit < wanted_.rows.size() && wanted_.rows[logit] < end; };
      const int64_t first = wanted() ? wanted_.rows[logit] : end;
      for (; wanted(); ++logit) wanted_.rows[logit] += kept - first;
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

  void share_head(int thread) {
    head_.compute(thread, [this](int64_t row, int64_t place) { norm_row(row, m_.norm, place); });
  }

  template <class Done>
  void product(const Linear& weight, const Rows<E>& rows, const Linear& next, const Done& done) {
    lap(kRest);
    multiply(weight, rows, next, shares_, team_, ++rounds_[omp_get_thread_num()].number, done);
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
    if constexpr (std::is_same_v<E, bf16>) {
      rms_norm(x, weight, scratch_.input + to * m_.hidden, m_.hidden, m_.eps);
    } else {
      thread_local std::vector<float> normed;
      normed.resize(m_.hidden);
      rms_norm(x, weight, normed.data(), m_.hidden, m_.eps);
      round_row(normed.data(), m_.hidden, to);
    }
  }

  // x [dim] as row `to` of the next product's input, in 8 bits.
  template <class T>
  void round_row(const T* x, int64_t dim, int64_t to) {
    E* input = scratch_.input + to * dim;
    if constexpr (std::is_same_v<E, g8>) {
      quantize_groups(x, dim, input, scratch_.scales + to * scales_of_row<E>(dim));
    } else {
      scratch_.scales[to] = quantize(x, dim, input);
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

  // `x` as a product's input: as it is, in 8 bits by groups, or mixed and in 8 bits.
  Rows<E> prepared(const bf16* x, int64_t dim, int64_t vectors) {
    if constexpr (std::is_same_v<E, g8>) {
#pragma omp for schedule(static)
      for (int64_t row = 0; row < s_.rows; ++row) round_row(x + row * dim, dim, row);
      return input(s_.rows);
    } else if constexpr (std::is_same_v<E, u8>) {
      thread_local std::vector<float> mixed;
#pragma omp for schedule(static)
      for (int64_t row = 0; row < s_.rows; ++row) {
        if (vectors == 1) {
          round_row(x + row * dim, dim, row);
        } else {
          mixed.resize(dim);
          mix(x + row * dim, mixed.data(), dim, vectors);
          round_row(mixed.data(), dim, row);
        }
      }
      return input(s_.rows);
    } else {
      return {x, nullptr, s_.rows};
    }
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
  const int team_;
  Ranges shares_;
  std::vector<Round> rounds_;  // [team] of the product that each thread computes
  WantedRows wanted_;
  Head<E> head_;
  std::vector<int32_t> starts_, contexts_;  // as in Step, of the rows of the part
  double lapped_ = 0;
};

// Helps the parts that are not of this thread's number, whichever can be helped first, until all are done.
template <class E>
void help_others(std::deque<Decoder<E>>& decoders, int thread, Spent* spent) {
  std::vector<Decoder<E>*> left;
  for (size_t ahead = 1; ahead < decoders.size(); ++ahead)
    left.push_back(&decoders[(thread + ahead) % decoders.size()]);
  while (!left.empty()) {
    auto next = left.begin();
    wait_until([&] {
      next = std::find_if(left.begin(), left.end(), [](const Decoder<E>* each) { return each->can_be_helped(); });
      return next != left.end();
    });
    (*next)->help(thread, &spent[thread]);
    left.erase(next);
  }
}

template <class E>
void decode(const Model& model, const Step& step) {
  const int threads = omp_get_max_threads();
  const std::vector<Part> parts = cut<E>(model, step, threads);
  std::vector<Progress> progress(parts.size());
  std::vector<Spent> spent(parts.size());
  std::deque<Decoder<E>> decoders;
  const int team = parts.size() == 1 ? threads : 1;
  char* at = step.scratch;
  for (size_t index = 0; index < parts.size(); ++index) {
    const Scratch<E> scratch(model, parts[index].end_row - parts[index].first_row, at);
    decoders.emplace_back(model, step, parts, index, progress.data(), spent.data(), scratch, threads, team);
    at = scratch.end;
  }
  if (decoders.size() == 1) {
    decoders[0].run();
  } else {
#pragma omp parallel num_threads(threads)
    {
      // With fewer threads than were asked for, parts are computed in their order, so none waits for one that has not
      // begun.
#pragma omp for schedule(static, 1) nowait
      for (size_t index = 0; index < decoders.size(); ++index) decoders[index].run();
      help_others(decoders, omp_get_thread_num(), spent.data());
    }
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
BW_DECODER(groups, bw::g8)
