// How the rows of a step are dealt out to threads that compute them from the first layer to the last.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"
#include "sharing.h"

namespace bw {

struct Part {
  int64_t first_row, end_row;
  std::vector<int> after;  // parts before this one that write keys and values which it reads, in each layer
};

constexpr int64_t kLeastRows = 24;  // of each part
// What it costs to read a number of the cache for a decode, in multiplications: measured at 22 GB/s and 460 GFLOP/s a core.
constexpr double kDecodeKeyCost = 20;
// What several rows read together, those of a prompt or of a shared prefix, at two thirds of the rate of products.
constexpr double kSharedKeyCost = 1.5;

// [rows + 1]: multiplications of all rows before a row, in a layer; the head is spread over the layers.
inline std::vector<double> row_costs(const Model& model, const Step& step) {
  const Layer& layer = model.layers[0];
  const double row = model.hidden * (layer.qkv.outputs + layer.gate_up.outputs) +
                     layer.output.inputs * model.hidden + layer.down.inputs * model.hidden;
  const double head = static_cast<double>(model.head.inputs) * model.head.outputs / model.num_layers;
  const double decode_key = kDecodeKeyCost * 2 * model.kv_heads * model.head_dim;
  const double shared_key = kSharedKeyCost * 2 * model.heads * model.head_dim;
  std::vector<double> before(step.rows + 1);
  int64_t logit = 0, last_decode = -1;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t end = step.starts[s + 1];
    const bool decode = end - step.starts[s] == 1;
    const int64_t common = decode && last_decode >= 0 ? common_chunks(step, last_decode, s) * kChunk : 0;
    if (decode) last_decode = s;
    for (int64_t r = step.starts[s]; r < end; ++r) {
      const int64_t keys = step.contexts[s] - (end - r) + 1, alone = decode ? keys - common : 0;
      double cost = row + decode_key * alone + shared_key * (keys - alone);
      if (logit < step.num_logit_rows && step.logit_rows[logit] == r) cost += head, ++logit;
      before[r + 1] = before[r] + cost;
    }
  }
  return before;
}

// Finds for each part the parts `after` which it comes. False when one would come after a later one.
inline bool find_dependencies(const Step& step, std::vector<Part>& parts) {
  struct Written {
    int64_t sequence = -1;
    int first = 0, last = 0;  // parts
  };
  std::vector<Written> written;  // by block
  int part = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    for (int64_t r = step.starts[s]; r < step.starts[s + 1]; ++r) {
      while (r >= parts[part].end_row) ++part;
      const size_t block = step.slots[r] / kBlock;
      if (block >= written.size()) written.resize(2 * block + 1);
      if (written[block].sequence < 0) written[block] = {s, part, part};
      written[block].last = part;
    }
  }
  part = 0;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int32_t* table = step.tables + s * step.table_stride;
    while (step.starts[s] >= parts[part].end_row) ++part;
    for (int reader = part; reader < static_cast<int>(parts.size()); ++reader) {
      if (parts[reader].first_row >= step.starts[s + 1]) break;
      for (int64_t b = 0; b * kBlock < step.contexts[s]; ++b) {
        const size_t block = table[b];
        if (block >= written.size() || written[block].sequence < 0) continue;
        const Written& by = written[block];
        if (by.sequence != s && by.last > reader) return false;
        for (int writer = by.first; writer <= std::min(by.last, reader - 1); ++writer)
          if (auto& after = parts[reader].after; std::find(after.begin(), after.end(), writer) == after.end())
            after.push_back(writer);
      }
    }
  }
  return true;
}

// The parts of a step, of like cost; a single one is to be computed by all threads together.
// A sequence that two parts share, and sequences with one beginning that come in one step, of which a later one finds the
// blocks of the first in the prefix cache, let a part depend on others.
inline std::vector<Part> cut(const Model& model, const Step& step, int threads) {
  const std::vector<Part> whole{{0, step.rows, {}}};
  if (threads < 2 || step.rows < threads * kLeastRows) return whole;
  const std::vector<double> before = row_costs(model, step);
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
