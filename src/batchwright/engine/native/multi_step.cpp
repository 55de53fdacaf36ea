// Decodes that follow one another without the host: each of the same sequences gets a token in every step.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "choose_rows.h"
#include "model.h"
#include "strips.h"

namespace bw {
namespace {

constexpr int64_t kNoToken = -1;  // where the logits were not finite
constexpr int64_t kTimes = 4;

// What a run of steps needs besides the first of them, which has one row for each sequence.
struct Run {
  const bf16* embedding;  // [vocab][hidden]
  const int64_t* first;   // [sequences] tokens of the first step
  const int64_t* ends;    // tokens that end a sequence
  const int32_t* end_starts;  // [sequences + 1] where those of each sequence begin
  const int32_t* places;  // [rows with logits] as choose_rows takes them: all of them, or those that are not greedy
  const float *temperatures, *min_p;  // [drawn], as are the next two
  const int64_t* top_k;
  const double* top_p;
  const double* uniforms;      // [most][drawn]
  const int32_t* interrupted;  // not 0 once the host is wanted
  int64_t* tokens;             // [most][sequences]
  double* seconds;  // [most][kTimes]: in products, in attention, until the model was computed, until tokens were chosen
  double limit;     // seconds that the run may take
  int64_t most, drawn, vocab;
};

class Decodes {
 public:
  Decodes(void (*decode)(const Model*, const Step*), const Model& model, const Step& step, const Run& run)
      : decode_(decode), m_(model), s_(step), r_(run), tokens_(run.first, run.first + step.sequences),
        positions_(step.positions, step.positions + step.sequences), slots_(step.slots, step.slots + step.sequences),
        contexts_(step.contexts, step.contexts + step.sequences), greatest_(step.sequences) {
    s_.positions = positions_.data();
    s_.slots = slots_.data();
    s_.contexts = contexts_.data();
  }

  // Returns how many steps were computed: at least one.
  int64_t run() {
    const double began = omp_get_wtime();
    double before = began;
    for (int64_t done = 1;; ++done) {
      double spent[3] = {};
      embed();
      s_.seconds = spent;
      decode_(&m_, &s_);
      const double computed = omp_get_wtime();
      choose(done - 1);
      const double now = omp_get_wtime();
      const double times[kTimes] = {spent[0], spent[1], computed - before, now - before};
      std::copy(times, times + kTimes, r_.seconds + (done - 1) * kTimes);
      before = now;
      const bool in_time = (now - began) * (done + 1) <= r_.limit * done;
      if (done == r_.most || !in_time || ends(done - 1) || __atomic_load_n(r_.interrupted, __ATOMIC_RELAXED) != 0)
        return done;
      advance();
    }
  }

 private:
  void embed() {
    for (int64_t row = 0; row < s_.sequences; ++row)
      std::memcpy(s_.residual + row * m_.hidden, r_.embedding + tokens_[row] * m_.hidden, m_.hidden * sizeof(bf16));
  }

  void choose(int64_t done) {
    int64_t* chosen = r_.tokens + done * s_.sequences;
    const int64_t rows = s_.greedy == nullptr ? s_.sequences : r_.drawn;
    if (rows > 0)
      bw_choose_rows_bf16(s_.logits, rows, s_.logits_stride, r_.vocab, r_.places, r_.temperatures, r_.min_p, r_.top_k,
                          r_.top_p, r_.uniforms + done * r_.drawn, greatest_.data(), chosen);
    if (s_.greedy != nullptr) add_greedy(chosen);
    for (int64_t row = 0; row < s_.sequences; ++row) {
      if (!std::isfinite(greatest_[row])) chosen[row] = kNoToken;
      tokens_[row] = chosen[row];
    }
  }

  // Puts the tokens of rows without logits between those of the others, which lie one after another.
  void add_greedy(int64_t* chosen) {
    int64_t next = r_.drawn;
    for (int64_t row = s_.sequences; row-- > 0;) {
      const bool greedy = s_.greedy[row] != 0;
      if (!greedy) --next;
      chosen[row] = greedy ? s_.likeliest[row] : chosen[next];
      greatest_[row] = greedy ? s_.greatest[row] : greatest_[next];
    }
  }

  // Whether a sequence ends with the tokens of a step, or cannot go on.
  bool ends(int64_t done) const {
    for (int64_t row = 0; row < s_.sequences; ++row) {
      const int64_t token = r_.tokens[done * s_.sequences + row];
      const int64_t *first = r_.ends + r_.end_starts[row], *last = r_.ends + r_.end_starts[row + 1];
      if (token == kNoToken || std::find(first, last, token) != last) return true;
    }
    return false;
  }

  void advance() {
    for (int64_t row = 0; row < s_.sequences; ++row) {
      const int64_t position = ++positions_[row];
      slots_[row] = int64_t{s_.tables[row * s_.table_stride + position / kBlock]} * kBlock + position % kBlock;
      ++contexts_[row];
    }
  }

  void (*const decode_)(const Model*, const Step*);
  const Model& m_;
  Step s_;
  const Run& r_;
  std::vector<int64_t> tokens_, positions_, slots_;
  std::vector<int32_t> contexts_;
  std::vector<float> greatest_;  // of each row
};

}  // namespace
}  // namespace bw

#define BW_MULTI_STEP(NAME)                                                                                       \
  extern "C" int64_t bw_multi_step_##NAME(const bw::Model* model, const bw::Step* step, const bw::Run* run) {     \
    return bw::Decodes(bw_decode_##NAME, *model, *step, *run).run();                                              \
  }

BW_MULTI_STEP(bf16)
BW_MULTI_STEP(int8)
BW_MULTI_STEP(groups)
