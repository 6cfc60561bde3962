// The C interface of the CPU kernels: plain structs and functions, loaded by lampejo/ops/cpu through ctypes.
//
// Promise kept by every kernel: the result of a token (a row of its input) is bit-identical whatever the number of rows and
// threads, because each row has accumulators of its own and one fixed order of accumulation.
//
// Shape legend: T tokens, K inputs, N outputs, Q query heads, G key/value heads, D head size, P pages, S page size,
// E experts.
#pragma once
#include <cstddef>
#include <cstdint>

#define LAMPEJO_API __attribute__((visibility("default")))
extern "C" {

// Matrices are packed in panels of 8 outputs by groups of 32 inputs; N and K are padded with zeros.
enum MatrixKind : int32_t {
    Q4 = 0,   // codes 0..15, f16 scale and minimum per 32: w = scale * code + minimum          (160 bytes per 8 x 32)
    Q4K = 1,  // as Q4, scale and minimum are f16 per 256 times 6 bits per 32 (GGUF's Q4_K)     (1184 bytes per 8 x 256)
    Q8 = 2,   // codes -128..127, f16 scale per 32: w = scale * code                            (272 bytes per 8 x 32)
};

struct Matrix {
    const uint8_t* data;
    int32_t kind;
    int32_t num_out, num_in;
    const float* bias;  // [N] or null
};

// Tokens of a step. A segment is a row's run of tokens; `pages` of all segments lie one after another.
struct Segment {
    int32_t start, length, position;  // first token in the batch, number of tokens, absolute position of the first
    int32_t first_page;               // index into `pages`
};
struct Batch {
    int32_t num_tokens, num_segments, page_size;
    int32_t rotary_dim;        // R, the first dimensions of a head, which RoPE rotates
    const Segment* segments;
    const int32_t* pages;
    const int64_t* slots;      // [T] page * S + offset, where a token's key and value go
    const float *cos, *sin;    // [T, R/2]
};

// x + o(attention(rope(qkv(norm(x))))): the attention half of a layer.
struct AttentionHalf {
    const float* norm;  // [K]
    float eps;
    int32_t num_heads, num_kv_heads, head_dim;
    Matrix q, k, v, out;
    const float *q_norm, *k_norm;  // [D] or null (Qwen3, DFlash)
    float qk_eps;
    int32_t block;   // 0: causal over pages, keys are stored; B > 0: a drafter's blocks of B tokens, keys are not stored,
                     // block rows see the context before the segment's position and the whole block
    int32_t causal;  // of a drafter's block: later block rows are hidden
    int32_t window;  // 0: none; else keys `window` or more positions away are hidden
    int32_t gated;   // `q` gives each head D queries, then D gates of its output, applied as sigmoids
};

// x + down(silu(gate(norm(x))) * up(norm(x))): the MLP half of a layer.
struct MlpHalf {
    const float* norm;
    float eps;
    int32_t reserved;
    Matrix gate, up, down;
};

// x + the sum over a token's experts of weight * down(silu(gate(norm(x))) * up(norm(x))), plus the same of a shared expert: in
// place of an MLP half. Routers are plain floats, because their rounding would choose other experts.
struct ExpertsHalf {
    const float* norm;
    float eps;
    int32_t num_experts, num_active, normalised;  // normalised: a token's weights add up to 1
    const float* router;         // [E, K]
    Matrix gate, up, down;       // of the first expert; those of the others follow in memory
    const float* shared_router;  // [K], weighs the shared expert as a sigmoid; null: there is none
    Matrix shared_gate, shared_up, shared_down;
};

// Heads of a Gated DeltaNet: C = 2 * Hk * Dk + Hv * Dv channels go through its short convolution.
struct DeltaSizes {
    int32_t num_key_heads, num_value_heads, key_dim, value_dim;  // Hk, Hv, Dk, Dv
    int32_t conv_size;                                           // tokens that the convolution sees
    int32_t tiled;  // value head v reads key head v % Hk; else each key head's value heads are neighbours
};

// x + out(silu(z(n)) * norm(recurrence of qkv(n), gated by a(n) and b(n))), n = norm(x): the recurrent half of a layer, apart
// from the recurrence itself. a and b are plain floats, because what they do is multiplied token after token.
struct DeltaHalf {
    const float* norm;
    float eps, out_eps;
    DeltaSizes sizes;
    Matrix qkv, z, out;
    const float *b, *a;             // [Hv, K]
    const float *rate, *step_bias;  // [Hv]: a token decays a state by exp(-rate * softplus(a + step_bias))
    const float* out_norm;          // [Dv]
};

// A run: tokens of one row that go through its state, one after another. Stores of all runs lie one after another.
struct DeltaRun {
    int32_t start, length;  // in the inputs
    int32_t first_out;      // in the output
    int32_t source;         // slot of the state before them; -1: zeros
    int32_t first_store, num_stores;
};
struct DeltaStore {
    int32_t end, slot;  // after so many of the run's tokens the state goes there; ascending
};
struct DeltaInputs {
    DeltaSizes sizes;
    int32_t num_runs, reserved;
    const DeltaRun* runs;
    const DeltaStore* stores;
    const float* mixed;             // [T, C], q | k | v as projected
    const float *log_decay, *beta;  // [T, Hv]
    int64_t mixed_stride, gate_stride;
    const float* conv_weight;  // [conv_size, C], the present token last
    float* windows;            // [slots, C, conv_size - 1]
    float* states;             // [slots, Hv, Dk, Dv]
};

// Keys and values that a drafter derives from its context.
struct ContextHalf {
    int32_t num_kv_heads, head_dim;
    Matrix k, v;
    const float* k_norm;
    float qk_eps;
    int32_t reserved;
};

// How a token is chosen from scores; lampejo/sampling.py is the definition, and equal to the bit.
struct Choice {
    uint64_t seed;
    int64_t position;   // absolute; noise is keyed by seed, position and id
    float temperature;  // 0: the greatest score, whatever else stands here
    float log_min_p;    // minus infinity: off
    double top_p;       // 1: off
    int32_t top_k;      // 0: off
    int32_t reserved;
};
struct Chosen {
    int32_t index;  // of the scores; the first of equal ones, and NaN counts as the greatest
    float score;    // as it came in, before temperature and noise
};

// Changes with every change of a struct or signature here; lampejo/ops/cpu/library.py knows the one that it was written for.
#define LAMPEJO_ABI 5
LAMPEJO_API int lampejo_abi();
LAMPEJO_API const char* lampejo_isa();                    // what was chosen: "avx512vnni", "avx2", "neondot", "neon"; null if nothing fits
LAMPEJO_API int lampejo_force_isa(const char* name);      // for tests; 0 if this machine cannot run it
LAMPEJO_API void lampejo_set_threads(int num_threads);    // the caller counts as one; fewer if the system gives fewer
LAMPEJO_API int lampejo_get_threads();

LAMPEJO_API size_t lampejo_packed_bytes(int kind, int num_out, int num_in);
// Packs GGUF blocks or floats into zeroed memory. `type` is the GGUF type number of `source`; row i of it goes to row
// row_map[i] (or i if row_map is null). Returns 0; -1 for a pair of kind and type that cannot be packed; -2 if the source holds
// NaN or infinity.
LAMPEJO_API int lampejo_pack(int kind, uint8_t* packed, int num_out, int num_in, int type, const uint8_t* source,
                             const int32_t* row_map);
LAMPEJO_API void lampejo_unpack_rows(const Matrix* matrix, const int64_t* rows, int num_rows, float* out);  // [num_rows, K]

LAMPEJO_API void lampejo_matmul(const Matrix* matrix, const float* x, int num_tokens, float* out);  // [T, K] -> [T, N]
LAMPEJO_API void lampejo_rms_norm(const float* norm, float eps, int size, const float* x, int num_tokens, float* out);
LAMPEJO_API void lampejo_attention_half(const AttentionHalf* half, const Batch* batch, float* x, uint16_t* k_cache,
                            uint16_t* v_cache);
LAMPEJO_API void lampejo_mlp_half(const MlpHalf* half, float* x, int num_tokens);
LAMPEJO_API void lampejo_experts_half(const ExpertsHalf* half, float* x, int num_tokens);
// x [T, K] -> projected [T, C + Hv * Dv], mixed and then z; gates [T, 2 * Hv], beta and then log_decay.
LAMPEJO_API void lampejo_delta_inputs(const DeltaHalf* half, const float* x, int num_tokens, float* projected, float* gates);
LAMPEJO_API void lampejo_delta_runs(const DeltaInputs* inputs, float* out);  // [tokens of all runs, Hv, Dv]
LAMPEJO_API void lampejo_delta_output(const DeltaHalf* half, const float* recurred, const float* z, int64_t z_stride,
                                      float* x, int num_tokens);  // changes x
LAMPEJO_API void lampejo_context_half(const ContextHalf* half, const Batch* batch, const float* ctx, uint16_t* k_cache,
                          uint16_t* v_cache);
// Attention alone: q [T, Q, D] over stored keys (causal), as inside lampejo_attention_half.
LAMPEJO_API void lampejo_paged_attention(const Batch* batch, const float* q, const uint16_t* k_cache, const uint16_t* v_cache,
                             int num_heads, int num_kv_heads, int head_dim, float* out);

// A token for each of T rows of N scores, which stand for ids 0 .. N - 1, or for `ids`. `choices` has one for each row; null: all
// take the greatest score.
LAMPEJO_API void lampejo_choose(const float* scores, int num_scores, const int32_t* ids, const Choice* choices, int num_tokens,
                                Chosen* out);
// The same of the product of a head with x [T, K], which is not written anywhere.
LAMPEJO_API void lampejo_head_choose(const Matrix* head, const float* x, const int32_t* ids, const Choice* choices,
                                     int num_tokens, Chosen* out);
LAMPEJO_API void lampejo_noise(const Choice* choice, const int32_t* ids, int num_ids, float* out);  // Gumbel noise alone, [N]

}  // extern "C"
