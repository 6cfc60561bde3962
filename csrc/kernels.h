// What each instruction set provides, and what all of them share.
#pragma once
#include "lampejo_kernels.h"

constexpr int MAX_PAGE = 64;  // tokens of a page
constexpr int MAX_DIM = 256;  // of a head
constexpr float HIDDEN = -1e30f;

struct Kernels {
    void (*matmul)(const Matrix&, const float* x, int num_tokens, float* out);
    void (*rms_norm)(const float* norm, float eps, int size, const float* x, int num_tokens, float* out);
    void (*attention_half)(const AttentionHalf&, const Batch&, float* x, uint16_t* k_cache, uint16_t* v_cache);
    void (*mlp_half)(const MlpHalf&, float* x, int num_tokens);
    void (*context_half)(const ContextHalf&, const Batch&, const float* ctx, uint16_t* k_cache, uint16_t* v_cache);
    void (*paged_attention)(const Batch&, const float* q, const uint16_t* k_cache, const uint16_t* v_cache, int num_heads,
                            int num_kv, int dim, float* out);
    void (*experts_half)(const ExpertsHalf&, float* x, int num_tokens);
    void (*delta_inputs)(const DeltaHalf&, const float* x, int num_tokens, float* projected, float* gates);
    void (*delta_runs)(const DeltaInputs&, float* out);
    void (*delta_output)(const DeltaHalf&, const float* recurred, const float* z, size_t z_stride, float* x, int num_tokens);
    void (*noise)(const Choice&, const int32_t* ids, int num_ids, float* out);
    void (*choose)(const float* scores, int num_scores, const int32_t* ids, const Choice* choices, int num_tokens, Chosen* out);
    void (*head_choose)(const Matrix& head, const float* x, const int32_t* ids, const Choice* choices, int num_tokens,
                        Chosen* out);
};

size_t packed_bytes(int kind, int num_out, int num_in);
