// Activations in 8 bits, and products with packed matrices. Part of kernels.inl.

struct Activations {  // int8 codes of T tokens, per group of 32 a scale and the sum of the codes
    int8_t* codes;    // [T, 32 * groups]
    float* scales;    // [T, groups]
    int32_t* sums;    // [T, groups]
    int groups;
};

static inline int padded(int n, int to) { return (n + to - 1) / to * to; }

// e^x for x <= 0 or small; relative error about 2e-7. Cody-Waite reduction and a polynomial of degree 6 (Cephes expf).
static inline f32x8 exp(f32x8 x) {
    x = max(min(x, all(88.0f)), all(-87.0f));
    f32x8 n = round(x * all(1.44269504f));
    f32x8 r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    f32x8 p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + all(1.0f);
    return scale2(p, n);
}

static inline float exp1(float x) {
    float lanes[8];
    store(lanes, exp(all(x)));
    return lanes[0];
}

// --- rows ------------------------------------------------------------------------------------------------------------

static float norm_factor(const float* x, int size, float eps) {
    f32x8 acc = all(0);
    int i = 0;
    for (; i + 8 <= size; i += 8) acc = fma(load(x + i), load(x + i), acc);
    float total = sum(acc);
    for (; i < size; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / size + eps);
}

static void normalise(const float* norm, float eps, int size, const float* x, float* out) {
    float factor = norm_factor(x, size, eps);
    int i = 0;
    for (; i + 8 <= size; i += 8) store(out + i, load(x + i) * all(factor) * load(norm + i));
    for (; i < size; i++) out[i] = x[i] * factor * norm[i];
}

// One token's floats, padded with zeros to a multiple of 32, into codes.
static void quantise(const float* x, const Activations& to, int token) {
    int8_t* codes = to.codes + static_cast<size_t>(token) * to.groups * 32;
    float* scales = to.scales + static_cast<size_t>(token) * to.groups;
    int32_t* sums = to.sums + static_cast<size_t>(token) * to.groups;
    for (int g = 0; g < to.groups; g++) {
        f32x8 a = load(x + 32 * g), b = load(x + 32 * g + 8), c = load(x + 32 * g + 16), d = load(x + 32 * g + 24);
        float largest = max_of(max(max(abs(a), abs(b)), max(abs(c), abs(d))));
        float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        if (!(inverse <= 3e38f)) inverse = 0.0f;  // a group so small that its inverse overflows counts as zero
        f32x8 k = all(inverse);
        sums[g] = store_codes(codes + 32 * g, a * k, b * k, c * k, d * k);
        scales[g] = largest / 127.0f;
        // NaN and infinity must not become numbers: the largest does not tell, because a comparison with NaN is false.
        if (!std::isfinite(sum(abs(a) + abs(b) + abs(c) + abs(d)))) {
            std::memset(codes + 32 * g, 1, 32);
            sums[g] = 32, scales[g] = NAN;
        }
    }
}

// --- matrix products -------------------------------------------------------------------------------------------------

// One panel (8 outputs) times TILE tokens, for each kind of matrix: 8 sums per token.
template <int TILE>
static inline void panel_q4(const uint8_t* w, const Activations& act, int token, f32x8* out) {
    const int groups = act.groups;
    const int8_t* codes = act.codes + static_cast<size_t>(token) * groups * 32;
    const float* scales = act.scales + static_cast<size_t>(token) * groups;
    const int32_t* sums = act.sums + static_cast<size_t>(token) * groups;
    for (int t = 0; t < TILE; t++) out[t] = all(0);
    for (int g = 0; g < groups; g++, w += 160) {
        SmallDot dot[TILE];
        for (int v = 0; v < 4; v++) {
            u8x32 both = load_bytes(w + 32 * v);
            u8x32 low = low_nibbles(both), high = high_nibbles(both);
            for (int t = 0; t < TILE; t++) {
                const int8_t* a = codes + (static_cast<size_t>(t) * groups + g) * 32 + 8 * v;
                dot[t].add(low, a);
                dot[t].add(high, a + 4);
            }
        }
        f32x8 scale = load_f16(reinterpret_cast<const uint16_t*>(w + 128));
        f32x8 minimum = load_f16(reinterpret_cast<const uint16_t*>(w + 144));
        for (int t = 0; t < TILE; t++) {
            float s = scales[t * groups + g];
            out[t] = fma(dot[t].total(), scale * all(s), out[t]);
            out[t] = fma(minimum, all(s * static_cast<float>(sums[t * groups + g])), out[t]);
        }
    }
}

template <int TILE>
static inline void panel_q4k(const uint8_t* w, const Activations& act, int token, f32x8* out) {
    const int groups = act.groups;
    const int8_t* codes = act.codes + static_cast<size_t>(token) * groups * 32;
    const float* scales = act.scales + static_cast<size_t>(token) * groups;
    const int32_t* sums = act.sums + static_cast<size_t>(token) * groups;
    for (int t = 0; t < TILE; t++) out[t] = all(0);
    for (int super = 0; super < groups / 8; super++, w += 1184) {
        f32x8 d = load_f16(reinterpret_cast<const uint16_t*>(w));
        f32x8 dmin = load_f16(reinterpret_cast<const uint16_t*>(w + 16));
        for (int j = 0; j < 8; j++) {
            const int g = 8 * super + j;
            const uint8_t* c = w + 160 + 128 * j;
            SmallDot dot[TILE];
            for (int v = 0; v < 4; v++) {
                u8x32 both = load_bytes(c + 32 * v);
                u8x32 low = low_nibbles(both), high = high_nibbles(both);
                for (int t = 0; t < TILE; t++) {
                    const int8_t* a = codes + (static_cast<size_t>(t) * groups + g) * 32 + 8 * v;
                    dot[t].add(low, a);
                    dot[t].add(high, a + 4);
                }
            }
            f32x8 scale = d * load_u8(w + 32 + 16 * j), minimum = dmin * load_u8(w + 32 + 16 * j + 8);
            for (int t = 0; t < TILE; t++) {
                float s = scales[t * groups + g];
                out[t] = fma(dot[t].total(), scale * all(s), out[t]);
                out[t] = fma(minimum, all(-s * static_cast<float>(sums[t * groups + g])), out[t]);
            }
        }
    }
}

template <int TILE>
static inline void panel_q8(const uint8_t* w, const Activations& act, int token, f32x8* out) {
    const int groups = act.groups;
    const int8_t* codes = act.codes + static_cast<size_t>(token) * groups * 32;
    const float* scales = act.scales + static_cast<size_t>(token) * groups;
    const int32_t* sums = act.sums + static_cast<size_t>(token) * groups;
    for (int t = 0; t < TILE; t++) out[t] = all(0);
    for (int g = 0; g < groups; g++, w += 272) {
        SignedDot dot[TILE];
        for (int v = 0; v < 8; v++) {
            SignedCodes weights(load_bytes(w + 32 * v));
            for (int t = 0; t < TILE; t++)
                dot[t].add(weights, codes + (static_cast<size_t>(t) * groups + g) * 32 + 4 * v);
        }
        f32x8 scale = load_f16(reinterpret_cast<const uint16_t*>(w + 256));
        for (int t = 0; t < TILE; t++)
            out[t] = fma(dot[t].total(sums[t * groups + g]), scale * all(scales[t * groups + g]), out[t]);
    }
}

template <int TILE>
static inline void panel(const Matrix& m, const uint8_t* w, const Activations& act, int token, f32x8* out) {
    if (m.kind == Q4)
        panel_q4<TILE>(w, act, token, out);
    else if (m.kind == Q4K)
        panel_q4k<TILE>(w, act, token, out);
    else
        panel_q8<TILE>(w, act, token, out);
}

// Rows [first, last) of out [T, N], whose tokens lie `stride` apart; `add` keeps what stands there and adds to it.
static void matmul_rows(const Matrix& m, int first, int last, const Activations& act, int num_tokens, float* out,
                        size_t stride, bool add) {
    const size_t panel_bytes = packed_bytes(m.kind, 8, m.num_in);
    for (int row = first; row < last; row += 8) {
        const uint8_t* w = m.data + panel_bytes * (row / 8);
        const int rows = std::min(8, m.num_out - row);
        for (int token = 0; token < num_tokens;) {
            f32x8 result[MAX_TILE];
            int tile;
            const int left = num_tokens - token;
            if (left >= MAX_TILE)
                panel<MAX_TILE>(m, w, act, token, result), tile = MAX_TILE;
            else if (left >= 4)
                panel<4>(m, w, act, token, result), tile = 4;
            else if (left == 3)
                panel<3>(m, w, act, token, result), tile = 3;
            else if (left == 2)
                panel<2>(m, w, act, token, result), tile = 2;
            else
                panel<1>(m, w, act, token, result), tile = 1;
            for (int t = 0; t < tile; t++, token++) {
                float lanes[8];
                float* to = out + token * stride + row;
                if (rows == 8) {
                    f32x8 y = result[t];
                    if (m.bias) y = y + load(m.bias + row);
                    store(to, add ? load(to) + y : y);
                    continue;
                }
                store(lanes, result[t]);
                for (int i = 0; i < rows; i++) {
                    float y = lanes[i];
                    if (m.bias) y = y + m.bias[row + i];
                    to[i] = add ? to[i] + y : y;
                }
            }
        }
    }
}

// A product of one or more matrices with the same activations, as a phase: their outputs stand one after another.
template <int COUNT>
static void matmul(Team& team, const Matrix (&matrices)[COUNT], const Activations& act, int num_tokens, float* out,
                   size_t stride, bool add) {
    int total_rows = 0;
    for (const Matrix& m : matrices) total_rows += m.num_out;
    // Few pieces per thread: enough to share fairly, and long enough for memory to be read ahead.
    const int per_thread = total_rows < 8192 ? 2 : 16;
    const int rows = std::max(16, padded(total_rows / (per_thread * get_threads()), 8));
    int pieces = 0;
    for (const Matrix& m : matrices) pieces += (m.num_out + rows - 1) / rows;
    team.run(pieces, [&](int piece) {
        float* to = out;
        for (const Matrix& m : matrices) {
            const int own = (m.num_out + rows - 1) / rows;
            if (piece < own) {
                matmul_rows(m, piece * rows, std::min(m.num_out, (piece + 1) * rows), act, num_tokens, to, stride, add);
                return;
            }
            piece -= own;
            to += m.num_out;
        }
    });
}
