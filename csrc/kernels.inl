// The kernels themselves, in terms of the 8-lane vectors that the including file has chosen. Compiled once per
// instruction set, inside a namespace of its own.

#include "matmul.inl"

#include "attention.inl"

// --- halves of a layer -----------------------------------------------------------------------------------------------

// Codes of tokens that `row_of(token, row)` computes as floats, as a phase.
template <class RowOf>
static void prepare(Team& team, int num_tokens, const Activations& to, const RowOf& row_of) {
    const int per_piece = num_tokens < 64 ? 1 : 8;
    team.run((num_tokens + per_piece - 1) / per_piece, [&](int piece) {
        static thread_local std::vector<float> row;
        row.assign(static_cast<size_t>(to.groups) * 32, 0.0f);
        const int last = std::min(num_tokens, (piece + 1) * per_piece);
        for (int t = piece * per_piece; t < last; t++) {
            row_of(t, row.data());
            quantise(row.data(), to, t);
        }
    });
}

static void prepare_normed(Team& team, const float* norm, float eps, int size, const float* x, int num_tokens,
                           const Activations& to) {
    prepare(team, num_tokens, to,
            [&](int t, float* row) { normalise(norm, eps, size, x + static_cast<size_t>(t) * size, row); });
}

static void prepare_plain(Team& team, int size, const float* x, int num_tokens, const Activations& to) {
    prepare(team, num_tokens, to,
            [&](int t, float* row) { std::memcpy(row, x + static_cast<size_t>(t) * size, size * sizeof(float)); });
}

static int groups_of(const Matrix& m) { return padded(m.num_in, m.kind == Q4K ? 256 : 32) / 32; }

struct Codes {
    std::vector<int8_t> codes;
    std::vector<float> scales, weighted;
    std::vector<int32_t> sums;

    Activations of(int num_tokens, int groups) {
        const size_t n = static_cast<size_t>(num_tokens) * groups;
        if (codes.size() < 32 * n) codes.resize(32 * n);
        if (scales.size() < n) scales.resize(n), weighted.resize(n), sums.resize(n);
        return {codes.data(), scales.data(), weighted.data(), sums.data(), groups};
    }
};

struct Workspace {  // grows to the largest step; owned by the calling thread
    Codes codes;
    std::vector<float> wide, narrow, spans;

    Activations activations(int num_tokens, int groups) { return codes.of(num_tokens, groups); }
    static float* floats(std::vector<float>& v, size_t n) {
        if (v.size() < n) v.resize(n);
        return v.data();
    }
};

static Workspace& workspace() {
    static thread_local Workspace instance;
    return instance;
}

// Everything below goes into its region by value: see pool.h.

static void matmul_all(const Matrix& m, const float* x, int num_tokens, float* out) {
    const Activations act = workspace().activations(num_tokens, groups_of(m));
    parallel([=](Team& team) {
        prepare_plain(team, m.num_in, x, num_tokens, act);
        const Matrix matrices[] = {m};
        matmul(team, matrices, act, num_tokens, out, m.num_out, false);
    });
}

static void rms_norm(const float* norm, float eps, int size, const float* x, int num_tokens, float* out) {
    for (int t = 0; t < num_tokens; t++)
        normalise(norm, eps, size, x + static_cast<size_t>(t) * size, out + static_cast<size_t>(t) * size);
}

static void attention_half(const AttentionHalf& half, const Batch& batch, float* x, uint16_t* k_cache,
                           uint16_t* v_cache) {
    const int num_tokens = batch.num_tokens, dim = half.head_dim, size = half.q.num_in;
    const int num_heads = half.num_heads, num_kv = half.num_kv_heads;
    const int queries = half.gated ? 2 * num_heads : num_heads, heads = queries + 2 * num_kv;  // a query's gate follows it
    const size_t width = static_cast<size_t>(heads) * dim;
    Workspace& ws = workspace();
    Activations act_in = ws.activations(num_tokens, std::max(groups_of(half.q), groups_of(half.out)));
    Activations act_out = act_in;
    act_in.groups = groups_of(half.q), act_out.groups = groups_of(half.out);
    float* qkv = Workspace::floats(ws.wide, num_tokens * width);
    float* mixed = Workspace::floats(ws.narrow, static_cast<size_t>(num_tokens) * num_heads * dim);
    const AttentionShape shape = {num_heads, num_kv, dim, half.block, half.causal, half.window};
    const AttentionWork work(shape, batch);
    const float* k = qkv + static_cast<size_t>(queries) * dim;
    const int q_step = half.gated ? 2 * dim : dim;
    const AttentionData data = {qkv,     q_step, k,     k + static_cast<size_t>(num_kv) * dim, width, k_cache,
                                v_cache, mixed,  Workspace::floats(ws.spans, work.span_floats)};
    parallel([=](Team& team) {
        prepare_normed(team, half.norm, half.eps, size, x, num_tokens, act_in);
        const Matrix inputs[] = {half.q, half.k, half.v}, outputs[] = {half.out};
        matmul(team, inputs, act_in, num_tokens, qkv, width, false);
        const int per_piece = 16;  // heads of all tokens, q, k and v
        team.run((num_tokens * heads + per_piece - 1) / per_piece, [&](int piece) {
            const int last = std::min(num_tokens * heads, (piece + 1) * per_piece);
            for (int n = piece * per_piece; n < last; n++) {
                const int token = n / heads, head = n % heads;
                float* at = qkv + token * width + static_cast<size_t>(head) * dim;
                if (half.gated && head < queries && head % 2) continue;
                if (head < queries + num_kv) {
                    const float* norm = head < queries ? half.q_norm : half.k_norm;
                    if (norm) normalise(norm, half.qk_eps, dim, at, at);
                    rotate(at, batch, token);
                }
                if (half.block || head < queries) continue;
                if (head < queries + num_kv)
                    store_key(k_cache, batch.slots[token], batch.page_size, num_kv, head - queries, dim, at);
                else
                    store_value(v_cache, batch.slots[token], batch.page_size, num_kv, head - queries - num_kv, dim, at);
            }
        });
        attention(team, work, shape, batch, data);
        prepare(team, num_tokens, act_out, [&](int t, float* row) {
            const int size = num_heads * dim;
            std::memcpy(row, mixed + static_cast<size_t>(t) * size, size * sizeof(float));
            if (!half.gated) return;
            const float* gates = qkv + t * width + dim;
            for (int i = 0; i < size; i += 8) {
                const f32x8 gate = load(gates + i / dim * 2 * dim + i % dim);
                store(row + i, load(row + i) / (all(1) + exp(all(0) - gate)));
            }
        });
        matmul(team, outputs, act_out, num_tokens, x, half.out.num_out, true);
    });
}

static void swiglu(const float* gate, const float* up, int size, float* out) {
    int i = 0;
    for (; i + 8 <= size; i += 8) {
        f32x8 a = load(gate + i);
        store(out + i, a / (all(1) + exp(all(0) - a)) * load(up + i));
    }
    for (; i < size; i++) out[i] = gate[i] / (1 + exp1(-gate[i])) * up[i];
}

static void mlp_half(const MlpHalf& half, float* x, int num_tokens) {
    const int size = half.gate.num_in, width = half.down.num_in;
    Workspace& ws = workspace();
    Activations act_in = ws.activations(num_tokens, std::max(groups_of(half.gate), groups_of(half.down)));
    Activations act_out = act_in;
    act_in.groups = groups_of(half.gate), act_out.groups = groups_of(half.down);
    float* wide = Workspace::floats(ws.wide, static_cast<size_t>(num_tokens) * 2 * width);
    parallel([=](Team& team) {
        prepare_normed(team, half.norm, half.eps, size, x, num_tokens, act_in);
        const Matrix inputs[] = {half.gate, half.up}, outputs[] = {half.down};
        matmul(team, inputs, act_in, num_tokens, wide, 2 * static_cast<size_t>(width), false);
        prepare(team, num_tokens, act_out, [&](int t, float* row) {
            const float* gate = wide + static_cast<size_t>(t) * 2 * width;
            swiglu(gate, gate + width, width, row);
        });
        matmul(team, outputs, act_out, num_tokens, x, half.down.num_out, true);
    });
}

static void context_half(const ContextHalf& half, const Batch& batch, const float* ctx, uint16_t* k_cache,
                         uint16_t* v_cache) {
    const int num_tokens = batch.num_tokens, dim = half.head_dim, num_kv = half.num_kv_heads;
    const size_t width = static_cast<size_t>(2 * num_kv) * dim;
    Workspace& ws = workspace();
    const Activations act = ws.activations(num_tokens, groups_of(half.k));
    float* kv = Workspace::floats(ws.wide, num_tokens * width);
    parallel([=](Team& team) {
        prepare_plain(team, half.k.num_in, ctx, num_tokens, act);
        const Matrix inputs[] = {half.k, half.v};
        matmul(team, inputs, act, num_tokens, kv, width, false);
        team.run(num_tokens, [&](int token) {
            for (int head = 0; head < 2 * num_kv; head++) {
                float* at = kv + token * width + static_cast<size_t>(head) * dim;
                if (head >= num_kv) {
                    store_value(v_cache, batch.slots[token], batch.page_size, num_kv, head - num_kv, dim, at);
                    continue;
                }
                if (half.k_norm) normalise(half.k_norm, half.qk_eps, dim, at, at);
                rotate(at, batch, token);
                store_key(k_cache, batch.slots[token], batch.page_size, num_kv, head, dim, at);
            }
        });
    });
}

static void paged_attention(const Batch& batch, const float* q, const uint16_t* k_cache, const uint16_t* v_cache,
                            int num_heads, int num_kv, int dim, float* out) {
    const AttentionShape shape = {num_heads, num_kv, dim, 0, 0, 0};
    const AttentionWork work(shape, batch);
    const AttentionData data = {
        q,   dim, nullptr, nullptr, static_cast<size_t>(num_heads) * dim, k_cache, v_cache,
        out, Workspace::floats(workspace().spans, work.span_floats)};
    parallel([=](Team& team) { attention(team, work, shape, batch, data); });
}

#include "experts.inl"

#include "delta.inl"

#include "choice.inl"

extern const Kernels kernels;
const Kernels kernels = {matmul_all,      rms_norm,     attention_half, mlp_half,   context_half,
                         paged_attention, experts_half, delta_inputs,   delta_runs, delta_output,
                         noise,           choose,       head_choose};
