// The end of a part of a step: the logits of its rows, or their likeliest tokens. A row's outcome does not depend on who
// computes it, so threads whose own part is done take what is left of another's: it makes up for parts that were not of
// like cost, and for a thread that had to leave its core for another program.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "model.h"
#include "rows.h"

namespace bw {

// The rows of a step whose logits, or likeliest token, one part computes.
struct WantedRows {
  std::vector<int64_t> rows;    // [wanted] of the part
  std::vector<int64_t> places;  // [wanted] in the input of the head: rows whose logits are wanted go before the others
  int64_t first = 0;            // of the part, among those of the step
  int64_t plain = 0, greedy = 0;

  // Of the rows `from` to `end` of a step.
  WantedRows(const Step& step, int64_t from, int64_t end) {
    const int64_t* logits_end = step.logit_rows + step.num_logit_rows;
    const int64_t* wanted = std::lower_bound(step.logit_rows, logits_end, from);
    first = wanted - step.logit_rows;
    for (const int64_t* row = wanted; row < logits_end && *row < end; ++row) rows.push_back(*row - from);
    const int64_t count = rows.size();
    greedy = count_greedy(step, first, first + count);
    plain = count - greedy;
    int64_t next_plain = 0, next_greedy = plain;
    for (int64_t r = 0; r < count; ++r) places.push_back(is_greedy(step, first + r) ? next_greedy++ : next_plain++);
  }

  static bool is_greedy(const Step& step, int64_t logit) { return step.greedy != nullptr && step.greedy[logit] != 0; }

  static int64_t count_greedy(const Step& step, int64_t first, int64_t end) {
    int64_t count = 0;
    for (int64_t logit = first; logit < end; ++logit) count += is_greedy(step, logit);
    return count;
  }
};

// The head of a part. Its input is made of rows of the part, and its output is where the step wants it.
template <class E>
class Head {
 public:
  // `threads`: most that take part. `together`: how many begin at the same time. `input` and `scales`: room for the wanted
  // rows.
  Head(const Model& model, const Step& step, const WantedRows& wanted, E* input, RowScales<E>* scales, int threads,
       int together)
      : m_(model), s_(step), wanted_(wanted), input_(input), scales_(scales), together_(together),
        screening_(model.screen, reinterpret_cast<bf16*>(input) + wanted.plain * model.hidden, wanted.greedy,
                   greedy_masks(), step.mask_words, threads),
        inputs_(together), plain_(together), screened_(together), chosen_(together) {
    logits_ = s_.logits + (wanted.first - WantedRows::count_greedy(s_, 0, wanted.first)) * s_.logits_stride;
  }

  // The weight that is needed first.
  const Linear& first_weight() const { return wanted_.plain > 0 || wanted_.greedy == 0 ? m_.head : m_.screen->rough; }

  // Lets threads of other parts take part.
  void open() { open_.store(true, std::memory_order_release); }
  bool is_open() const { return open_.load(std::memory_order_acquire); }

  // For each thread that takes part. No other one has the number `thread`, which is below `threads`. `norm(row, place)`
  // makes a row of the part a row of the input.
  template <class Norm>
  void compute(int thread, const Norm& norm) {
    inputs_.compute(wanted_.rows.size(), thread, [&](int64_t r) {
      norm(wanted_.rows[r], wanted_.places[r]);
      if (greedy_row(r) >= 0) screening_.prepare(greedy_row(r));
    });
    const Linear& after = m_.layers[0].qkv;
    if (wanted_.plain > 0) {
      const Linear& next = wanted_.greedy > 0 ? m_.screen->rough : after;
      const GroupedProduct<E> product(m_.head, {input_, scales_, wanted_.plain}, next, together_);
      plain_.compute(product.count(), thread, [&](int64_t group) {
        product.compute(group, [this](int64_t row, int64_t column, const VecF& low, const VecF& high) {
          bf16* to = logits_ + row * s_.logits_stride + column;
          bw::store(to, low);
          bw::store(to + kLanes, high);
        });
      });
    }
    if (wanted_.greedy == 0) return;
    const GroupedProduct<u8> product = screening_.product(after, together_);
    screened_.compute(product.count(), thread, [&](int64_t group) { screening_.find(product, group, thread); });
    chosen_.compute(wanted_.rows.size(), thread, [&](int64_t r) {
      const int64_t logit = wanted_.first + r;
      if (greedy_row(r) >= 0) screening_.choose(greedy_row(r), s_.greatest + logit, s_.likeliest + logit);
    });
  }

 private:
  // Number of a wanted row among those that are greedy; negative if it is not.
  int64_t greedy_row(int64_t r) const { return wanted_.places[r] - wanted_.plain; }

  std::vector<const uint32_t*> greedy_masks() const {
    std::vector<const uint32_t*> masks(wanted_.greedy, nullptr);
    if (s_.mask_of == nullptr) return masks;
    for (size_t r = 0; r < wanted_.rows.size(); ++r) {
      const int64_t row = greedy_row(r), mask = s_.mask_of[wanted_.first + r];
      if (row >= 0 && mask >= 0) masks[row] = s_.masks + mask * s_.mask_words;
    }
    return masks;
  }

  const Model& m_;
  const Step& s_;
  const WantedRows& wanted_;
  E* const input_;
  RowScales<E>* const scales_;
  bf16* logits_;
  const int together_;
  Screening screening_;
  std::atomic<bool> open_{false};
  SharedItems inputs_, plain_, screened_, chosen_;
};

}  // namespace bw
