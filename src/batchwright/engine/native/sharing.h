// Which sequences of a step go through the same keys, and what its threads compute one after another.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "strips.h"

namespace bw {

constexpr int64_t kTileRows = 48;

struct Problem {
  const void* query;       // [rows][query_stride]
  const void* keys;
  const void* values;
  void* out;               // [rows][heads * head_dim]
  const int32_t* tables;   // [sequences][table_stride]
  const int32_t* starts;   // [sequences + 1]: first query row
  const int32_t* contexts; // [sequences]: keys, those of this step included
  int64_t sequences, query_stride, table_stride, heads, kv_heads, head_dim;
  int64_t window;  // keys a query sees, itself included; 0: all
  float scale, softcap;

  int64_t rows(int64_t sequence) const { return starts[sequence + 1] - starts[sequence]; }
};

// The query rows of `tokens` tokens, from `token` on, of each of the sequences order[first..first+sequences), for one KV
// head. The first `shared` keys of these sequences are the same.
struct Item {
  int32_t first, sequences, token, tokens, kv_head, shared;
};

struct AttentionPlan {
  std::vector<int32_t> order;
  std::vector<Item> items;  // the KV heads of the same rows one after another
};

// The chunks at the beginning of sequences a and b that lie in the same blocks. Of a Problem or a Step.
template <class P>
int64_t common_chunks(const P& p, int64_t a, int64_t b) {
  const int32_t *left = p.tables + a * p.table_stride, *right = p.tables + b * p.table_stride;
  const int64_t most = std::min(p.contexts[a], p.contexts[b]) / kChunk * (kChunk / kBlock);
  return (std::mismatch(left, left + most, right).first - left) / (kChunk / kBlock);
}

// How many of the sequences in order[first..) to take together so that the fewest chunks are read, and the chunks that
// they have in common.
inline std::pair<int64_t, int64_t> best_group(const Problem& p, const std::vector<int32_t>& order, int64_t first,
                                                int64_t most) {
  std::pair<int64_t, int64_t> best{1, 0};
  int64_t common = std::numeric_limits<int64_t>::max();
  const int64_t end = first + most;
  for (int64_t next = first + 1; next < end; ++next) {
    common = std::min(common, common_chunks(p, order[next - 1], order[next]));
    if (common == 0) break;
    const int64_t taken = next - first + 1;
    if ((taken - 1) * common > (best.first - 1) * best.second) best = {taken, common};
  }
  return best;
}

// The decodes in `order`, sorted by their tables, together where they begin with the same blocks, so that these are read
// once for all of them.
inline void add_decodes(const Problem& p, const std::vector<int32_t>& order, int64_t most, std::vector<Item>& items) {
  const int64_t count = order.size();
  for (int64_t first = 0; first < count;) {
    const auto [taken, common] = best_group(p, order, first, std::min(most, count - first));
    items.push_back({static_cast<int32_t>(first), static_cast<int32_t>(taken), 0, 1, 0,
                     static_cast<int32_t>(common * kChunk)});
    first += taken;
  }
}

// The query rows of one KV head times the keys that they go through.
inline int64_t work(const Problem& p, const AttentionPlan& plan, const Item& item) {
  int64_t keys = 0;
  for (int32_t i = 0; i < item.sequences; ++i) {
    const int32_t s = plan.order[item.first + i];
    keys += p.contexts[s] - p.rows(s) + item.token + item.tokens;
  }
  return keys * item.tokens;
}

// Prompts are cut in tiles of kTileRows rows. The longest work goes first, so that no thread is left with it at the end.
inline AttentionPlan attention_plan(const Problem& p, int threads) {
  const int64_t tokens = std::max<int64_t>(1, kTileRows / (p.heads / p.kv_heads));
  AttentionPlan plan;
  for (int64_t s = 0; s < p.sequences; ++s)
    if (p.rows(s) == 1) plan.order.push_back(static_cast<int32_t>(s));
  std::sort(plan.order.begin(), plan.order.end(), [&](int32_t a, int32_t b) {
    const int32_t *left = p.tables + a * p.table_stride, *right = p.tables + b * p.table_stride;
    return std::lexicographical_compare(left, left + p.contexts[a] / kBlock, right, right + p.contexts[b] / kBlock);
  });
  std::vector<Item> items;
  const int64_t decodes = plan.order.size();
  add_decodes(p, plan.order, std::min(tokens, (decodes + threads - 1) / threads), items);  // something for each thread
  for (int64_t s = 0; s < p.sequences; ++s) {
    const int64_t rows = p.rows(s);
    if (rows <= 1) continue;
    plan.order.push_back(static_cast<int32_t>(s));
    for (int64_t token = 0; token < rows; token += tokens)
      items.push_back({static_cast<int32_t>(plan.order.size() - 1), 1, static_cast<int32_t>(token),
                       static_cast<int32_t>(std::min(tokens, rows - token)), 0, 0});
  }
  if (threads > 1)
    std::stable_sort(items.begin(), items.end(),
                     [&](const Item& a, const Item& b) { return work(p, plan, a) > work(p, plan, b); });
  for (Item& item : items)
    for (item.kv_head = 0; item.kv_head < p.kv_heads; ++item.kv_head) plan.items.push_back(item);
  return plan;
}

}  // namespace bw
