// How the rows of a step are dealt out to threads that compute them from the first layer to the last.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "model.h"
#include "sharing.h"

namespace bw {

struct Part {
  int64_t first_row, end_row;
  std::vector<int> after;  // parts before this one that write keys and values which it reads, in each layer
};

// How keys and values are stored beside products of E.
template <class E>
using CacheOf = std::conditional_t<std::is_same_v<E, u8>, Int8, bf16>;

// Most rows for each thread, on average, of a step that all threads compute together: with more, it pays that every thread
// reads all weights. Weights in groups are smaller. Measured on a processor with AVX-512, the value for AVX2 too.
template <class E>
constexpr int64_t kRowsTogether = kWidth != 16 ? 12 : std::is_same_v<E, g8> ? 8 : kMostRows<E>;

// What it costs to read a byte of the cache for a decode, in multiplications of bfloat16: measured with two cores.
constexpr double kDecodeByteCost = 7.5;
// What it costs to multiply with a number that several rows read together, those of a prompt or of a shared prefix, in the
// same unit.
constexpr double kSharedKeyCost = 1.3;

// What finding the likeliest token costs, as a part of multiplying with the whole head.
constexpr double kScreenCost = 0.55;

// [rows + 1]: what all rows before a row cost in a layer, in multiplications of E; the head is spread over the layers.
template <class E>
std::vector<double> row_costs(const Model& model, const Step& step) {
  const Layer& layer = model.layers[0];
  const double row = model.hidden * (layer.qkv.outputs + layer.gate_up.outputs) +
                     layer.output.inputs * model.hidden + layer.down.inputs * model.hidden;
  const double head = static_cast<double>(model.head.inputs) * model.head.outputs / model.num_layers;
  constexpr double byte_cost = kDecodeByteCost * kProductRate<E>, key_cost = kSharedKeyCost * kProductRate<E>;
  const double decode_key = byte_cost * 2 * model.kv_heads * head_bytes<CacheOf<E>>(model.head_dim) / kBlock;
  const double shared_key = key_cost * 2 * model.heads * model.head_dim;
  std::vector<double> before(step.rows + 1);
  int64_t logit = 0, last_decode = -1;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t end = step.starts[s + 1];
    const bool decode = end - step.starts[s] == 1;
    const int64_t common = decode && last_decode >= 0 ? common_chunks(step, last_decode, s) * kChunk : 0;
    if (decode) last_decode = s;
    for (int64_t r = step.starts[s]; r < end; ++r) {
      const int64_t all = step.contexts[s] - (end - r) + 1, keys = layer.window > 0 ? std::min(all, layer.window) : all;
      const int64_t alone = decode ? std::max<int64_t>(0, keys - common) : 0;
      double cost = row + decode_key * alone + shared_key * (keys - alone);
      if (logit < step.num_logit_rows && step.logit_rows[logit] == r) {
        cost += step.greedy != nullptr && step.greedy[logit] ? head * kScreenCost : head;
        ++logit;
      }
      before[r + 1] = before[r] + cost;
    }
  }
  return before;
}

// Which parts write to the blocks of a step.
class Writers {
 public:
  struct Block {
    int64_t sequence = -1;  // none
    int first = 0, last = 0;  // parts
  };

  Writers(const Step& step, const std::vector<Part>& parts) {
    const int64_t* most = std::max_element(step.slots, step.slots + step.rows);
    blocks_.resize(*most / kBlock + 1);
    int part = 0;
    for (int64_t s = 0; s < step.sequences; ++s) {
      for (int64_t r = step.starts[s]; r < step.starts[s + 1]; ++r) {
        while (r >= parts[part].end_row) ++part;
        Block& block = blocks_[step.slots[r] / kBlock];
        if (block.sequence < 0) block = {s, part, part};
        block.last = part;
      }
    }
  }

  Block of(size_t block) const { return block < blocks_.size() ? blocks_[block] : Block(); }

 private:
  std::vector<Block> blocks_;
};

inline void add(std::vector<int>& parts, int part) {
  if (std::find(parts.begin(), parts.end(), part) == parts.end()) parts.push_back(part);
}

// Finds for each part the parts `after` which it comes. False when one would come after a later one.
inline bool find_dependencies(const Step& step, std::vector<Part>& parts) {
  const Writers writers(step, parts);
  size_t first = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int32_t* table = step.tables + s * step.table_stride;
    while (step.starts[s] >= parts[first].end_row) ++first;
    for (size_t reader = first; reader < parts.size() && parts[reader].first_row < step.starts[s + 1]; ++reader) {
      const int before = static_cast<int>(reader) - 1;
      for (int64_t b = 0; b * kBlock < step.contexts[s]; ++b) {
        const Writers::Block by = writers.of(table[b]);
        if (by.sequence < 0) continue;
        if (by.sequence != s && by.last > before + 1) return false;
        for (int writer = by.first; writer <= std::min(by.last, before); ++writer) add(parts[reader].after, writer);
      }
    }
  }
  return true;
}

// The parts of a step, of like cost; a single one is to be computed by all threads together.
// A sequence that two parts share, and sequences with one beginning that come in one step, of which a later one finds the
// blocks of the first in the prefix cache, let a part depend on others.
template <class E>
std::vector<Part> cut(const Model& model, const Step& step, int threads) {
  const std::vector<Part> whole{{0, step.rows, {}}};
  if (threads < 2 || step.rows <= threads * kRowsTogether<E>) return whole;
  const std::vector<double> before = row_costs<E>(model, step);
  std::vector<Part> parts;
  int64_t first = 0;
  for (int part = 1; part <= threads; ++part) {
    const double share = before.back() * part / threads;
    const int64_t end = part == threads ? step.rows : std::lower_bound(before.begin(), before.end(), share) - before.begin();
    if (end <= first) return whole;
    parts.push_back({first, end, {}});
    first = end;
  }
  return find_dependencies(step, parts) ? parts : whole;
}

}  // namespace bw
