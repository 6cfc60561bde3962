// Gated DeltaNet (arXiv 2412.06464) in place of attention. Part of kernels.inl.
//
// A head's state has a column for each dimension of its values, and columns do not know of each other. So a piece of work is
// one head of one run, token after token, some columns at a time: the same order of accumulation for single steps,
// blocks, prompts and commits.

constexpr int DELTA_CHUNK = 32;  // tokens whose queries, keys and values are prepared at once

// log(1 + y) for y in [0, 1]; relative error about 1e-7. Twice the area hyperbolic tangent of y / (2 + y), as its series.
static inline f32x8 log1p(f32x8 y) {
    const f32x8 z = y / (all(2) + y), square = z * z;
    f32x8 p = all(1.0f / 15);
    for (int n = 13; n > 0; n -= 2) p = fma(p, square, all(1.0f / static_cast<float>(n)));
    return (z + z) * p;
}

static inline f32x8 sigmoid(f32x8 x) { return all(1) / (all(1) + exp(all(0) - x)); }

// Gates of a token as projected, b and then a [2 * Hv], become the logarithms of its decays, and its betas.
static void delta_gates(const DeltaHalf& half, float* gates) {
    const int heads = half.sizes.num_value_heads;
    for (int h = 0; h < heads; h += 8) {
        const int n = std::min(8, heads - h);
        float b[8] = {}, a[8] = {}, rate[8] = {};
        for (int i = 0; i < n; i++)
            b[i] = gates[h + i], a[i] = gates[heads + h + i] + half.step_bias[h + i], rate[i] = half.rate[h + i];
        const f32x8 x = load(a), softplus = max(x, all(0)) + log1p(exp(all(0) - abs(x)));
        store(a, (all(0) - load(rate)) * softplus), store(b, sigmoid(load(b)));
        for (int i = 0; i < n; i++) gates[h + i] = b[i], gates[heads + h + i] = a[i];
    }
}

static void delta_inputs(const DeltaHalf& half, const float* x, int num_tokens, float* projected, float* gates) {
    const int size = half.qkv.num_in, heads = half.sizes.num_value_heads;
    Workspace& ws = workspace();
    const Activations act = ws.activations(num_tokens, groups_of(half.qkv));
    float* normed = Workspace::floats(ws.wide, static_cast<size_t>(num_tokens) * size);
    parallel([=](Team& team) {
        prepare_kept(team, half.norm, half.eps, size, x, num_tokens, normed, act);
        const Matrix matrices[] = {half.qkv, half.z};
        matmul(team, matrices, act, num_tokens, projected, static_cast<size_t>(half.qkv.num_out) + half.z.num_out, false);
        float_matmul(team, half.b, heads, size, normed, num_tokens, gates, 2 * heads);
        float_matmul(team, half.a, heads, size, normed, num_tokens, gates + heads, 2 * heads);
        team.run(num_tokens, [&](int t) { delta_gates(half, gates + static_cast<size_t>(t) * 2 * heads); });
    });
}

static void delta_output(const DeltaHalf& half, const float* recurred, const float* z, size_t z_stride, float* x,
                         int num_tokens) {
    const int heads = half.sizes.num_value_heads, dim = half.sizes.value_dim;
    const Activations act = workspace().activations(num_tokens, groups_of(half.out));
    parallel([=](Team& team) {
        prepare(team, num_tokens, act, [&](int t, float* row) {
            static thread_local std::vector<float> normed;
            normed.resize(dim);
            for (int h = 0; h < heads; h++) {
                const size_t at = static_cast<size_t>(h) * dim;
                const float* own = recurred + static_cast<size_t>(t) * heads * dim + at;
                normalise(half.out_norm, half.out_eps, dim, own, normed.data());
                swiglu(z + t * z_stride + at, normed.data(), dim, row + at);
            }
        });
        const Matrix matrices[] = {half.out};
        matmul(team, matrices, act, num_tokens, x, half.out.num_out, true);
    });
}

// --- the recurrence --------------------------------------------------------------------------------------------------

static int num_channels(const DeltaSizes& sizes) {
    return 2 * sizes.num_key_heads * sizes.key_dim + sizes.num_value_heads * sizes.value_dim;
}

// What the short convolution sees of `num` channels from `first` on, for the tokens of a run.
struct Seen {
    const DeltaInputs& in;
    const DeltaRun& run;
    int first, num;
    std::vector<float> before;  // [K - 1, num], of the tokens before the run

    Seen(const DeltaInputs& in, const DeltaRun& run, int first, int num)
        : in(in), run(run), first(first), num(num), before(static_cast<size_t>(in.sizes.conv_size - 1) * num, 0.0f) {
        const int past = in.sizes.conv_size - 1;
        if (run.source < 0) return;
        const float* window = in.windows + (static_cast<size_t>(run.source) * num_channels(in.sizes) + first) * past;
        for (int c = 0; c < num; c++)
            for (int i = 0; i < past; i++) before[static_cast<size_t>(i) * num + c] = window[static_cast<size_t>(c) * past + i];
    }
    const float* at(int i) const {  // i: tokens of the run, the ones before it counted
        const int past = in.sizes.conv_size - 1;
        if (i < past) return before.data() + static_cast<size_t>(i) * num;
        return in.mixed + (run.start + i - past) * in.mixed_stride + first;
    }
    // silu(convolution) of the t-th token.
    void convolve(int t, float* out) const {
        const float* weight = in.conv_weight + first;
        const size_t channels = num_channels(in.sizes);
        int c = 0;
        for (; c + 8 <= num; c += 8) {
            f32x8 total = load(at(t) + c) * load(weight + c);
            for (int i = 1; i < in.sizes.conv_size; i++) total = total + load(at(t + i) + c) * load(weight + i * channels + c);
            store(out + c, total / (all(1) + exp(all(0) - total)));
        }
        for (; c < num; c++) {
            float total = at(t)[c] * weight[c];
            for (int i = 1; i < in.sizes.conv_size; i++) total = total + at(t + i)[c] * weight[i * channels + c];
            out[c] = total / (1 + exp1(-total));
        }
    }
};

static void to_length(float* x, int size, float length) {
    const float factor = length / std::sqrt(dot(x, x, size) + 1e-6f);
    for (int i = 0; i < size; i++) x[i] *= factor;
}

// A token's step of 8 * W columns of a state [Dk, stride]. `value` becomes the output.
template <int W>
static inline void delta_step(float* state, int key_dim, int stride, const float* q, const float* k, float decay, float beta,
                              float* value) {
    f32x8 known[W], out[W];
    times<W>(EACH(w) { known[w] = all(0), out[w] = all(0); });
    const f32x8 kept = all(decay);
    const float* s = state;
    for (int i = 0; i < key_dim; i++, s += stride) {
        const f32x8 key = all(k[i]);
        times<W>(EACH(w) { known[w] = fma(key, load(s + 8 * w) * kept, known[w]); });
    }
    times<W>(EACH(w) { known[w] = all(beta) * (load(value + 8 * w) - known[w]); });
    float* to = state;
    for (int i = 0; i < key_dim; i++, to += stride) {
        const f32x8 key = all(k[i]), query = all(q[i]);
        times<W>(EACH(w) {
            const f32x8 next = fma(key, known[w], load(to + 8 * w) * kept);
            store(to + 8 * w, next);
            out[w] = fma(query, next, out[w]);
        });
    }
    times<W>(EACH(w) { store(value + 8 * w, out[w]); });
}

// One value head through one run.
static void delta_head(const DeltaInputs& in, const DeltaRun& run, int head, float* out) {
    const DeltaSizes& sizes = in.sizes;
    const int dk = sizes.key_dim, dv = sizes.value_dim, stride = padded(dv, 8), heads = sizes.num_value_heads;
    const int key_head = sizes.tiled ? head % sizes.num_key_heads : head / (heads / sizes.num_key_heads);
    const int keys = sizes.num_key_heads * dk;
    const Seen seen_q(in, run, key_head * dk, dk), seen_k(in, run, keys + key_head * dk, dk);
    const Seen seen_v(in, run, 2 * keys + head * dv, dv);
    static thread_local std::vector<float> state, q, k, v;
    state.assign(static_cast<size_t>(dk) * stride, 0.0f);
    q.resize(DELTA_CHUNK * dk), k.resize(DELTA_CHUNK * dk), v.resize(DELTA_CHUNK * stride);
    const auto place = [&](int slot) { return in.states + (static_cast<size_t>(slot) * heads + head) * dk * dv; };
    if (run.source >= 0)
        for (int i = 0; i < dk; i++) std::memcpy(&state[i * stride], place(run.source) + i * dv, dv * sizeof(float));
    const DeltaStore* next = in.stores + run.first_store;
    const DeltaStore* const last = next + run.num_stores;
    for (int done = 0; done < run.length;) {
        const int end = next < last ? next->end : run.length, n = std::min(DELTA_CHUNK, end - done);
        float decay[DELTA_CHUNK], beta[DELTA_CHUNK];
        for (int t = 0; t < n; t++) {
            const size_t gate = (run.start + done + t) * in.gate_stride + head;
            decay[t] = exp1(in.log_decay[gate]), beta[t] = in.beta[gate];
            seen_q.convolve(done + t, &q[t * dk]), seen_k.convolve(done + t, &k[t * dk]);
            to_length(&q[t * dk], dk, 1.0f / std::sqrt(static_cast<float>(dk))), to_length(&k[t * dk], dk, 1);
            std::fill(&v[t * stride], &v[t * stride] + stride, 0.0f);
            seen_v.convolve(done + t, &v[t * stride]);
        }
        const auto column = [&](int c, auto step) {
            for (int t = 0; t < n; t++)
                step(&state[c], dk, stride, &q[t * dk], &k[t * dk], decay[t], beta[t], &v[t * stride + c]);
        };
        int c = 0;
        for (; c + 32 <= stride; c += 32) column(c, delta_step<4>);
        for (; c < stride; c += 8) column(c, delta_step<1>);
        for (int t = 0; t < n; t++) {
            const size_t at = static_cast<size_t>(run.first_out + done + t) * heads + head;
            std::memcpy(out + at * dv, &v[t * stride], dv * sizeof(float));
        }
        done += n;
        for (; next < last && next->end == done; next++)
            for (int i = 0; i < dk; i++) std::memcpy(place(next->slot) + i * dv, &state[i * stride], dv * sizeof(float));
    }
}

// Windows after a run, of some channels. A phase after the heads, which read the windows that may be written here.
static void store_windows(const DeltaInputs& in, const DeltaRun& run, int first, int num) {
    if (!run.num_stores) return;
    const int past = in.sizes.conv_size - 1;
    const Seen seen(in, run, first, num);
    for (int s = run.first_store; s < run.first_store + run.num_stores; s++) {
        const DeltaStore& store = in.stores[s];
        float* window = in.windows + (static_cast<size_t>(store.slot) * num_channels(in.sizes) + first) * past;
        for (int i = 0; i < past; i++) {
            const float* from = seen.at(store.end + i);
            for (int c = 0; c < num; c++) window[static_cast<size_t>(c) * past + i] = from[c];
        }
    }
}

static void delta_runs(const DeltaInputs& in, float* out) {
    const int heads = in.sizes.num_value_heads, channels = num_channels(in.sizes), per_piece = 1024;
    const int parts = (channels + per_piece - 1) / per_piece;
    parallel([=](Team& team) {
        team.run(in.num_runs * heads, [&](int piece) { delta_head(in, in.runs[piece / heads], piece % heads, out); });
        team.run(in.num_runs * parts, [&](int piece) {
            const int first = piece % parts * per_piece;
            store_windows(in, in.runs[piece / parts], first, std::min(per_piece, channels - first));
        });
    });
}
