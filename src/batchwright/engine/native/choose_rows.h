// What sampling.cpp does for other sources.
#pragma once

#include "simd.h"

extern "C" void bw_choose_rows_bf16(const bw::bf16* logits, int64_t rows, int64_t stride, int64_t dim,
                                    const int32_t* places, const float* temperatures, const float* min_p,
                                    const int64_t* top_k, const double* top_p, const double* uniforms, float* greatest,
                                    int64_t* tokens);
