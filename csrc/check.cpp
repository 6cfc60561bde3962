// Runs every kernel on fixed inputs of odd sizes, checks row invariance, and prints a hash of all results. As kernels keep one
// order of accumulation, the hash is the same on every instruction set (tests compare x86-64 with AArch64 under
// emulation, and run this program with sanitizers): scripts/check_kernels.sh.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "lampejo_kernels.h"

static uint64_t hash = 14695981039346656037ull;
static uint32_t state = 1;

static float noise() {  // a linear congruential generator, the same everywhere
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state >> 8) - (1 << 23)) / (1 << 23);
}

static std::vector<float> noises(size_t n) {
    std::vector<float> x(n);
    for (float& value : x) value = noise();
    return x;
}

static void digest(const char* what, const std::vector<float>& x) {
    for (float value : x) {
        uint32_t bits;
        if (!std::isfinite(value)) std::printf("%s: not finite\n", what), std::exit(1);
        value += 0.0f;  // -0 and 0 are equal
        std::memcpy(&bits, &value, 4);
        hash = (hash ^ bits) * 1099511628211ull;
    }
    std::printf("%-12s %016llx\n", what, static_cast<unsigned long long>(hash));
}

struct Packed {
    std::vector<uint8_t> data;
    Matrix matrix;
    Packed(int kind, int num_out, int num_in) : data(lampejo_packed_bytes(kind, num_out, num_in)) {
        std::vector<uint8_t> source;
        int type = 0;  // floats
        if (kind == Q4K) {
            type = 12;
            source.resize(static_cast<size_t>(num_out) * num_in / 256 * 144);
            for (size_t i = 0; i < source.size(); i++) source[i] = static_cast<uint8_t>(127 + 127 * noise());
            for (size_t i = 0; i < source.size(); i += 144) source[i + 1] = source[i + 3] = 0x1c;  // f16 scales near 0.004
        } else {
            const auto x = noises(static_cast<size_t>(num_out) * num_in);
            source.resize(x.size() * 4);
            std::memcpy(source.data(), x.data(), source.size());
        }
        if (lampejo_pack(kind, data.data(), num_out, num_in, type, source.data(), nullptr)) std::exit(1);
        matrix = {data.data(), kind, num_out, num_in, nullptr};
    }
};

static void matmuls() {
    const int sizes[][3] = {{Q4, 37, 50}, {Q8, 37, 50}, {Q4, 8, 32}, {Q8, 1, 1}, {Q4, 130, 576}, {Q4K, 45, 512}, {Q8, 260, 96}};
    for (const auto& s : sizes) {
        Packed packed(s[0], s[1], s[2]);
        const int tokens = 19;
        const auto x = noises(static_cast<size_t>(tokens) * s[2]);
        std::vector<float> whole(static_cast<size_t>(tokens) * s[1]);
        lampejo_matmul(&packed.matrix, x.data(), tokens, whole.data());
        for (int first = 0; first < tokens; first++)
            for (int n = 1; first + n <= tokens; n += 3) {
                std::vector<float> part(static_cast<size_t>(n) * s[1]);
                lampejo_matmul(&packed.matrix, x.data() + static_cast<size_t>(first) * s[2], n, part.data());
                if (std::memcmp(part.data(), whole.data() + static_cast<size_t>(first) * s[1], part.size() * 4))
                    std::printf("matmul of kind %d is not row-invariant\n", s[0]), std::exit(1);
            }
        digest("matmul", whole);
        std::vector<float> rows(s[2]);
        const int64_t row = s[1] - 1;
        lampejo_unpack_rows(&packed.matrix, &row, 1, rows.data());
        digest("unpack", rows);
    }
}

static void layers() {
    const int hidden = 72, heads = 6, kv = 2, dim = 16, wide = 100, size = 16, pages = 8, tokens = 41;
    const auto norm = noises(hidden), q_norm = noises(dim);
    std::vector<float> cos(tokens * dim / 2), sin(cos.size());
    for (size_t i = 0; i < cos.size(); i++) cos[i] = noise(), sin[i] = noise();
    Packed q(Q8, heads * dim, hidden), k(Q8, kv * dim, hidden), v(Q4, kv * dim, hidden), o(Q4, hidden, heads * dim);
    Packed gate(Q4, wide, hidden), up(Q8, wide, hidden), down(Q8, hidden, wide);
    const auto bias = noises(heads * dim);
    q.matrix.bias = bias.data();
    const int32_t table[] = {5, 2, 7, 0, 3, 1};
    std::vector<uint16_t> k_cache(static_cast<size_t>(pages) * kv * dim * size, 0x7e00), v_cache(k_cache);  // NaN
    std::vector<int64_t> slots(tokens);
    for (int p = 0; p < tokens; p++) slots[p] = static_cast<int64_t>(table[p / size]) * size + p % size;
    AttentionHalf attention = {norm.data(), 1e-5f, heads, kv, dim, q.matrix, k.matrix, v.matrix, o.matrix, nullptr, nullptr, 0, 0, 0, 0, 0};
    MlpHalf mlp = {norm.data(), 1e-5f, 0, gate.matrix, up.matrix, down.matrix};
    auto x = noises(static_cast<size_t>(tokens) * hidden);
    const Segment whole = {0, tokens, 0, 0};
    Batch batch = {tokens, 1, size, dim, &whole, table, slots.data(), cos.data(), sin.data()};
    lampejo_attention_half(&attention, &batch, x.data(), k_cache.data(), v_cache.data());
    digest("attention", x);
    Packed gated_q(Q8, 2 * heads * dim, hidden);
    AttentionHalf gated = attention;
    gated.q = gated_q.matrix, gated.gated = 1, gated.q_norm = gated.k_norm = q_norm.data(), gated.qk_eps = 1e-6f;
    Batch partly = batch;
    partly.rotary_dim = 6;
    auto other = noises(static_cast<size_t>(tokens) * hidden);
    lampejo_attention_half(&gated, &partly, other.data(), k_cache.data(), v_cache.data());
    digest("gated", other);
    lampejo_mlp_half(&mlp, x.data(), tokens);
    digest("mlp", x);
    for (const int window : {0, 3, 9})
        for (const int causal : {0, 1}) {
            AttentionHalf drafter = attention;
            drafter.q_norm = drafter.k_norm = q_norm.data(), drafter.qk_eps = 1e-6f;
            drafter.block = 5, drafter.causal = causal, drafter.window = window;
            const Segment blocks[] = {{0, 5, 20, 0}, {5, 5, 0, 3}};
            Batch two = {10, 2, size, dim, blocks, table, nullptr, cos.data(), sin.data()};
            auto y = noises(10 * hidden);
            lampejo_attention_half(&drafter, &two, y.data(), k_cache.data(), v_cache.data());
            digest("drafter", y);
        }
    ContextHalf context = {kv, dim, k.matrix, v.matrix, q_norm.data(), 1e-6f, 0};
    lampejo_context_half(&context, &batch, x.data(), k_cache.data(), v_cache.data());
    const auto queries = noises(static_cast<size_t>(tokens) * heads * dim);
    std::vector<float> out(queries.size());
    lampejo_paged_attention(&batch, queries.data(), k_cache.data(), v_cache.data(), heads, kv, dim, out.data());
    digest("paged", out);
}

// Few tokens behind a text so long that threads share it, beside a short one.
static void long_context() {
    const int heads = 6, kv = 2, dim = 24, size = 24, pages = 60, tokens = 4;
    std::vector<uint16_t> k_cache(static_cast<size_t>(pages) * kv * dim * size), v_cache(k_cache.size());
    for (auto& x : k_cache) x = static_cast<uint16_t>(0x3800 + 0x300 * noise());  // f16 near 0.5
    for (auto& x : v_cache) x = static_cast<uint16_t>(0x3800 + 0x300 * noise());
    std::vector<int32_t> table(pages);
    for (int i = 0; i < pages; i++) table[i] = (7 * i + 3) % pages;
    const Segment segments[] = {{0, 3, 1200, 0}, {3, 1, 20, 51}};
    const Batch batch = {tokens, 2, size, 0, segments, table.data(), nullptr, nullptr, nullptr};
    const auto queries = noises(static_cast<size_t>(tokens) * heads * dim);
    std::vector<float> out(queries.size());
    lampejo_paged_attention(&batch, queries.data(), k_cache.data(), v_cache.data(), heads, kv, dim, out.data());
    digest("long", out);
}

// Experts one after another in memory, as a layer has them.
static Packed stacked(int kind, int num, int num_out, int num_in) {
    Packed all(kind, num_out, num_in);
    for (int i = 1; i < num; i++) {
        const Packed next(kind, num_out, num_in);
        all.data.insert(all.data.end(), next.data.begin(), next.data.end());
    }
    all.matrix.data = all.data.data();
    return all;
}

static void experts() {
    const int hidden = 72, wide = 43, tokens = 23, num = 11, active = 3;
    const auto norm = noises(hidden), router = noises(static_cast<size_t>(num) * hidden), shared_router = noises(hidden);
    const Packed gate = stacked(Q4, num, wide, hidden), up = stacked(Q8, num, wide, hidden), down = stacked(Q8, num, hidden, wide);
    const Packed shared_gate(Q8, 50, hidden), shared_up(Q4, 50, hidden), shared_down(Q8, hidden, 50);
    for (const bool shared : {false, true}) {
        ExpertsHalf half = {norm.data(), 1e-6f, num, active, shared, router.data(), gate.matrix, up.matrix, down.matrix, nullptr,
                            shared_gate.matrix, shared_up.matrix, shared_down.matrix};
        if (shared) half.shared_router = shared_router.data();
        const auto x = noises(static_cast<size_t>(tokens) * hidden);
        auto whole = x;
        lampejo_experts_half(&half, whole.data(), tokens);
        for (int first = 0; first < tokens; first += 3)
            for (int n = 1; first + n <= tokens; n += 4) {
                std::vector<float> part(x.begin() + first * hidden, x.begin() + (first + n) * hidden);
                lampejo_experts_half(&half, part.data(), n);
                if (std::memcmp(part.data(), whole.data() + first * hidden, part.size() * 4))
                    std::printf("experts are not row-invariant\n"), std::exit(1);
            }
        digest("experts", whole);
    }
}

// A whole text, and the same in pieces with states that are stored and taken up again.
static void delta() {
    const int hidden = 72, tokens = 37;
    const DeltaSizes sizes = {2, 6, 20, 44, 4, 0};
    const int heads = 6, channels = 2 * 2 * 20 + 6 * 44, value = 6 * 44, slots = 3;
    const auto norm = noises(hidden), out_norm = noises(44), a = noises(6 * hidden), b = noises(6 * hidden);
    auto rate = noises(6);
    for (float& x : rate) x = std::fabs(x);
    const auto step_bias = noises(6), conv = noises(static_cast<size_t>(4) * channels);
    const Packed qkv(Q8, channels, hidden), z(Q4, value, hidden), out(Q8, hidden, value);
    const DeltaHalf layer = {norm.data(), 1e-6f, 1e-5f, sizes, qkv.matrix, z.matrix, out.matrix,
                            b.data(), a.data(), rate.data(), step_bias.data(), out_norm.data()};
    const auto x = noises(static_cast<size_t>(tokens) * hidden);
    std::vector<float> projected(static_cast<size_t>(tokens) * (channels + value)), gates(static_cast<size_t>(tokens) * 2 * heads);
    lampejo_delta_inputs(&layer, x.data(), tokens, projected.data(), gates.data());
    digest("projected", projected), digest("gates", gates);
    auto windows = noises(static_cast<size_t>(slots) * channels * 3), states = noises(static_cast<size_t>(slots) * heads * 20 * 44);
    auto part_windows = windows, part_states = states;
    const auto run = [&](const std::vector<DeltaRun>& runs, const std::vector<DeltaStore>& stores, std::vector<float>& w,
                         std::vector<float>& s, float* to) {
        const DeltaInputs inputs = {sizes, static_cast<int32_t>(runs.size()), 0, runs.data(), stores.data(), projected.data(),
                                    gates.data() + heads, gates.data(), channels + value, 2 * heads, conv.data(), w.data(), s.data()};
        lampejo_delta_runs(&inputs, to);
    };
    std::vector<float> whole(static_cast<size_t>(tokens) * value), parts(whole.size());
    run({{0, tokens, 0, -1, 0, 2}}, {{5, 2}, {tokens, 0}}, windows, states, whole.data());
    run({{0, 5, 0, -1, 0, 2}, {20, 3, 5, 1, 2, 0}}, {{5, 0}, {5, 2}}, part_windows, part_states, parts.data());
    for (int start = 5; start < tokens; start += 4) {
        const int length = std::min(4, tokens - start);
        run({{start, length, 0, 0, 0, 1}}, {{length, 0}}, part_windows, part_states, parts.data() + static_cast<size_t>(start) * value);
    }
    if (whole != parts || windows != part_windows || states != part_states)
        std::printf("the recurrence depends on how a text is cut\n"), std::exit(1);
    digest("windows", windows), digest("states", states);
    auto y = x;
    lampejo_delta_output(&layer, whole.data(), projected.data() + channels, channels + value, y.data(), tokens);
    digest("delta", y);
}

// Noise, and tokens chosen with every filter, of a head and of the same scores at hand, alone and beside others.
static void choices() {
    const int inputs = 70, tokens = 7;
    for (const int outputs : {1, 9, 500, 9001}) {
        Packed head(Q8, outputs, inputs);
        const auto x = noises(static_cast<size_t>(tokens) * inputs);
        std::vector<float> scores(static_cast<size_t>(tokens) * outputs), noise(outputs);
        lampejo_matmul(&head.matrix, x.data(), tokens, scores.data());
        std::vector<int32_t> ids(outputs);
        for (int i = 0; i < outputs; i++) ids[i] = 3 * i + 1;
        const float off = -INFINITY;
        const Choice all[] = {{1, 2, 0, off, 1, 0, 0},        {3, 4, 0.7f, off, 1, 0, 0},     {5, 6, 1.5f, off, 0.9, 0, 0},
                              {7, 8, 1, -2.5f, 1, 0, 0},      {9, 10, 2, off, 1, 40, 0},      {11, 12, 0.5f, -3, 0.8, 300, 0},
                              {13, 1ll << 40, 1e-6f, off, 1e-9, 1, 0}};
        lampejo_noise(all, ids.data(), outputs, noise.data());
        digest("noise", noise);
        for (const int32_t* of : {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(ids.data())}) {
            std::vector<Chosen> whole(tokens), part(tokens), given(tokens), greedy(tokens);
            lampejo_head_choose(&head.matrix, x.data(), of, all, tokens, whole.data());
            lampejo_choose(scores.data(), outputs, of, all, tokens, given.data());
            for (int t = 0; t < tokens; t++)
                lampejo_head_choose(&head.matrix, x.data() + static_cast<size_t>(t) * inputs, of, all + t, 1, &part[t]);
            lampejo_head_choose(&head.matrix, x.data(), of, nullptr, tokens, greedy.data());
            std::vector<float> told;
            for (int t = 0; t < tokens; t++) {
                for (const Chosen* other : {&part[t], &given[t]})
                    if (other->index != whole[t].index || other->score != whole[t].score)
                        std::printf("a choice depends on its company\n"), std::exit(1);
                for (const Chosen& one : {whole[t], greedy[t]})
                    told.push_back(static_cast<float>(one.index)), told.push_back(one.score);
            }
            digest("choices", told);
        }
    }
}

int main(int argc, char** argv) {
    if (argc > 1 && !lampejo_force_isa(argv[1])) return std::printf("%s does not run here\n", argv[1]), 2;
    std::printf("isa %s\n", lampejo_isa());
    for (const int threads : {1, 3}) {
        hash = 14695981039346656037ull, state = 1;
        lampejo_set_threads(threads);
        matmuls();
        layers();
        long_context();
        experts();
        delta();
        choices();
    }
    lampejo_set_threads(1);
    std::printf("hash %016llx\n", static_cast<unsigned long long>(hash));
    return 0;
}
