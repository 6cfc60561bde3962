// Chooses the instruction set once, and forwards the C interface to it.
#include <cstring>

#include "kernels.h"
#include "pool.h"

#ifdef LAMPEJO_X86
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512vnni {
extern const Kernels kernels;
}
#endif
#ifdef LAMPEJO_NEON
#ifdef __linux__
#include <sys/auxv.h>
static bool has_dot_product() { return getauxval(AT_HWCAP) & (1u << 20); }  // HWCAP_ASIMDDP
#else
static bool has_dot_product() { return true; }  // every AArch64 machine of Apple has it
#endif
namespace neon {
extern const Kernels kernels;
}
namespace neondot {
extern const Kernels kernels;
}
#endif

namespace {

struct Isa {
    const char* name;
    const Kernels* kernels;
    bool (*runs_here)();
};

const Isa isas[] = {
#ifdef LAMPEJO_X86
    {"avx512vnni", &avx512vnni::kernels,
     [] {
         return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
     }},
    {"avx2", &avx2::kernels,
     [] {
         return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
     }},
#endif
#ifdef LAMPEJO_NEON
    {"neondot", &neondot::kernels, [] { return has_dot_product(); }},
    {"neon", &neon::kernels, [] { return true; }},
#endif
    {nullptr, nullptr, [] { return true; }},
};

const Isa* choose(const char* name) {
    for (const Isa& isa : isas)
        if (isa.name && (!name || !std::strcmp(isa.name, name)) && isa.runs_here()) return &isa;
    return nullptr;
}

const Isa* chosen = choose(nullptr);

}  // namespace

int lampejo_abi() { return LAMPEJO_ABI; }
const char* lampejo_isa() { return chosen ? chosen->name : nullptr; }

int lampejo_force_isa(const char* name) {
    const Isa* isa = choose(name);
    if (isa) chosen = isa;
    return isa != nullptr;
}

void lampejo_set_threads(int num_threads) { set_threads(num_threads); }
int lampejo_get_threads() { return get_threads(); }

void lampejo_matmul(const Matrix* matrix, const float* x, int num_tokens, float* out) {
    chosen->kernels->matmul(*matrix, x, num_tokens, out);
}
void lampejo_rms_norm(const float* norm, float eps, int size, const float* x, int num_tokens, float* out) {
    chosen->kernels->rms_norm(norm, eps, size, x, num_tokens, out);
}
void lampejo_attention_half(const AttentionHalf* half, const Batch* batch, float* x, uint16_t* k_cache,
                            uint16_t* v_cache) {
    chosen->kernels->attention_half(*half, *batch, x, k_cache, v_cache);
}
void lampejo_mlp_half(const MlpHalf* half, float* x, int num_tokens) {
    chosen->kernels->mlp_half(*half, x, num_tokens);
}
void lampejo_context_half(const ContextHalf* half, const Batch* batch, const float* ctx, uint16_t* k_cache,
                          uint16_t* v_cache) {
    chosen->kernels->context_half(*half, *batch, ctx, k_cache, v_cache);
}
void lampejo_paged_attention(const Batch* batch, const float* q, const uint16_t* k_cache, const uint16_t* v_cache,
                             int num_heads, int num_kv_heads, int head_dim, float* out) {
    chosen->kernels->paged_attention(*batch, q, k_cache, v_cache, num_heads, num_kv_heads, head_dim, out);
}
void lampejo_experts_half(const ExpertsHalf* half, float* x, int num_tokens) {
    chosen->kernels->experts_half(*half, x, num_tokens);
}
void lampejo_delta_inputs(const DeltaHalf* half, const float* x, int num_tokens, float* projected, float* gates) {
    chosen->kernels->delta_inputs(*half, x, num_tokens, projected, gates);
}
void lampejo_delta_runs(const DeltaInputs* inputs, float* out) { chosen->kernels->delta_runs(*inputs, out); }
void lampejo_delta_output(const DeltaHalf* half, const float* recurred, const float* z, int64_t z_stride, float* x,
                          int num_tokens) {
    chosen->kernels->delta_output(*half, recurred, z, static_cast<size_t>(z_stride), x, num_tokens);
}
void lampejo_choose(const float* scores, int num_scores, const int32_t* ids, const Choice* choices, int num_tokens,
                    Chosen* out) {
    chosen->kernels->choose(scores, num_scores, ids, choices, num_tokens, out);
}
void lampejo_head_choose(const Matrix* head, const float* x, const int32_t* ids, const Choice* choices, int num_tokens,
                         Chosen* out) {
    chosen->kernels->head_choose(*head, x, ids, choices, num_tokens, out);
}
void lampejo_noise(const Choice* choice, const int32_t* ids, int num_ids, float* out) {
    chosen->kernels->noise(*choice, ids, num_ids, out);
}
