// What the decoder is given: a Llama with packed weights, and one step of it.
#pragma once

#include "screening.h"

namespace bw {

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
  const Screen* screen;  // null: none
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
  const uint8_t* greedy;  // [logit rows] whether only the likeliest token is wanted; null: of none. Needs a screen
  const int32_t* mask_of;  // [logit rows] place in `masks` of each row's mask, -1 for none; null: no row has one
  const uint32_t* masks;   // [masks][mask_words] tokens that a greedy row may have, one bit for each
  float* greatest;        // [logit rows] the greatest logit of each greedy row
  int64_t* likeliest;     // [logit rows] and its token
  bf16* logits;           // [logit rows that are not greedy][logits_stride]
  char* scratch;
  double* seconds;  // of products, attention and the rest, a mean over the parts; null: not wanted
  int64_t rows, sequences, table_stride, num_logit_rows, logits_stride, mask_words;
};

}  // namespace bw

extern "C" {
void bw_decode_bf16(const bw::Model* model, const bw::Step* step);
void bw_decode_int8(const bw::Model* model, const bw::Step* step);
void bw_decode_groups(const bw::Model* model, const bw::Step* step);
}
