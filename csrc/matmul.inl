// Activations in 8 bits, and products with packed matrices. Part of kernels.inl.

struct Activations {  // int8 codes of T tokens; per group of 32 a scale, the sum of the codes, and the product of both
    int8_t* codes;    // [T, 32 * groups]
    float* scales;    // [T, groups]
    float* weighted;  // [T, groups]
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
    float* weighted = to.weighted + static_cast<size_t>(token) * to.groups;
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
        weighted[g] = scales[g] * static_cast<float>(sums[g]);
    }
}

// --- matrix products -------------------------------------------------------------------------------------------------

template <class Floats>
static inline Floats spread(float x);
template <>
inline f32x8 spread(float x) {
    return all(x);
}
template <class Floats>
static inline Floats read(const float* p);
template <>
inline f32x8 read(const float* p) {
    return load(p);
}

// What a product works on at once: one panel (8 outputs), or with 16 lanes two panels side by side.
struct OnePanel {
    using Floats = f32x8;
    using Small = SmallDot;
    using Signed = SignedDot;
    using SignedWeights = SignedCodes;
    static constexpr int OUTPUTS = 8;
    const uint8_t* w;
    size_t panel_bytes;
    OnePanel(const uint8_t* data, size_t bytes) : w(data), panel_bytes(bytes) {}
    void advance() { w += panel_bytes; }
    u8x32 codes(size_t at) const { return load_bytes(w + at); }
    void ask_ahead(size_t) const {}
    f32x8 halves(size_t at) const { return load_f16(reinterpret_cast<const uint16_t*>(w + at)); }
    f32x8 bytes(size_t at) const { return load_u8(w + at); }
};

#ifdef LAMPEJO_16_LANES
template <>
inline f32x16 spread(float x) {
    return all16(x);
}
template <>
inline f32x16 read(const float* p) {
    return load16(p);
}

struct TwoPanels {
    using Floats = f32x16;
    using Small = SmallDot16;
    using Signed = SignedDot16;
    using SignedWeights = SignedCodes16;
    static constexpr int OUTPUTS = 16;
    const uint8_t *w, *next;
    size_t panel_bytes;
    TwoPanels(const uint8_t* data, size_t bytes) : w(data), next(data + bytes), panel_bytes(bytes) {}
    void advance() { w += 2 * panel_bytes, next += 2 * panel_bytes; }
    u8x64 codes(size_t at) const { return join(load_bytes(w + at), load_bytes(next + at)); }
    // Two short streams at once are more than the hardware foresees: the panels after these have to be asked for.
    void ask_ahead(size_t at) const {
        prefetch(w + 2 * panel_bytes + at);
        prefetch(next + 2 * panel_bytes + at);
    }
    f32x16 halves(size_t at) const {
        return join(load_f16(reinterpret_cast<const uint16_t*>(w + at)),
                    load_f16(reinterpret_cast<const uint16_t*>(next + at)));
    }
    f32x16 bytes(size_t at) const { return join(load_u8(w + at), load_u8(next + at)); }
};
#endif

// body(0) .. body(N - 1), written out by the compiler before it does anything else: so the sums of a tile stay in registers.
template <class Body, int... I>
[[gnu::always_inline]] static inline void write_out(const Body& body, std::integer_sequence<int, I...>) {
    (body(I), ...);
}
template <int N, class Body>
[[gnu::always_inline]] static inline void times(const Body& body) {
    write_out(body, std::make_integer_sequence<int, N>());
}
#define EACH(i) [&](int i) __attribute__((always_inline))

// A tile of tokens, for `count` panels or pairs of panels one after another in memory.
struct Tile {
    Activations act;
    int token, count;
    size_t at(int t, int g) const { return static_cast<size_t>(token + t) * act.groups + g; }
    const int8_t* codes(int t, int g) const { return act.codes + at(t, g) * 32; }
};

// Dot products of a group of 4-bit codes (128 bytes per panel at `at`) with each token's.
template <int TILE, class Panels>
[[gnu::always_inline]] static inline void dot_q4(const Panels& p, size_t at, const Tile& tile, int g,
                                                 typename Panels::Small* dot) {
    times<4>(EACH(v) {
        p.ask_ahead(at + 32 * v);
        const auto both = p.codes(at + 32 * v);
        const auto low = low_nibbles(both), high = high_nibbles(both);
        times<TILE>(EACH(t) {
            const int8_t* a = tile.codes(t, g) + 8 * v;
            dot[t].add(low, a);
            dot[t].add(high, a + 4);
        });
    });
}

// Each of these gives the sums of TILE tokens, panel by panel. They are functions of their own, arguments by value, because
// the compiler keeps sums in registers only while it sees that nothing else can point to them.
template <int TILE, class Panels>
[[gnu::noinline]] static void panels_q4(Panels p, const Tile tile, typename Panels::Floats* sums) {
    using Floats = typename Panels::Floats;
    for (int n = 0; n < tile.count; n++, p.advance(), sums += TILE) {
        Floats out[TILE];
        times<TILE>(EACH(t) { out[t] = spread<Floats>(0); });
        for (int g = 0; g < tile.act.groups; g++) {
            const size_t at = static_cast<size_t>(160) * g;
            typename Panels::Small dot[TILE];
            dot_q4<TILE>(p, at, tile, g, dot);
            const Floats scale = p.halves(at + 128), minimum = p.halves(at + 144);
            times<TILE>(EACH(t) {
                out[t] = fma(dot[t].total(), scale * spread<Floats>(tile.act.scales[tile.at(t, g)]), out[t]);
                out[t] = fma(minimum, spread<Floats>(tile.act.weighted[tile.at(t, g)]), out[t]);
            });
        }
        times<TILE>(EACH(t) { sums[t] = out[t]; });
    }
}

template <int TILE, class Panels>
[[gnu::noinline]] static void panels_q4k(Panels p, const Tile tile, typename Panels::Floats* sums) {
    using Floats = typename Panels::Floats;
    for (int n = 0; n < tile.count; n++, p.advance(), sums += TILE) {
        Floats out[TILE];
        times<TILE>(EACH(t) { out[t] = spread<Floats>(0); });
        for (int super = 0; super < tile.act.groups / 8; super++) {
            const size_t start = static_cast<size_t>(1184) * super;
            const Floats d = p.halves(start), dmin = p.halves(start + 16);
            for (int j = 0; j < 8; j++) {
                const int g = 8 * super + j;
                typename Panels::Small dot[TILE];
                dot_q4<TILE>(p, start + 160 + 128 * j, tile, g, dot);
                const Floats scale = d * p.bytes(start + 32 + 16 * j), minimum = dmin * p.bytes(start + 32 + 16 * j + 8);
                times<TILE>(EACH(t) {
                    out[t] = fma(dot[t].total(), scale * spread<Floats>(tile.act.scales[tile.at(t, g)]), out[t]);
                    out[t] = fma(minimum, spread<Floats>(-tile.act.weighted[tile.at(t, g)]), out[t]);
                });
            }
        }
        times<TILE>(EACH(t) { sums[t] = out[t]; });
    }
}

template <int TILE, class Panels>
[[gnu::noinline]] static void panels_q8(Panels p, const Tile tile, typename Panels::Floats* sums) {
    using Floats = typename Panels::Floats;
    for (int n = 0; n < tile.count; n++, p.advance(), sums += TILE) {
        Floats out[TILE];
        times<TILE>(EACH(t) { out[t] = spread<Floats>(0); });
        for (int g = 0; g < tile.act.groups; g++) {
            const size_t at = static_cast<size_t>(272) * g;
            typename Panels::Signed dot[TILE];
            times<8>(EACH(v) {
                p.ask_ahead(at + 32 * v);
                const typename Panels::SignedWeights weights(p.codes(at + 32 * v));
                times<TILE>(EACH(t) { dot[t].add(weights, tile.codes(t, g) + 4 * v); });
            });
            const Floats scale = p.halves(at + 256);
            times<TILE>(EACH(t) {
                const Floats factor = scale * spread<Floats>(tile.act.scales[tile.at(t, g)]);
                out[t] = fma(dot[t].total(tile.act.sums[tile.at(t, g)]), factor, out[t]);
            });
        }
        times<TILE>(EACH(t) { sums[t] = out[t]; });
    }
}

// The same for as many of `left` tokens as fit a tile; returns their number.
template <int TILE, class Panels>
static inline int product(int kind, const Panels& p, const Tile& tile, int left, typename Panels::Floats* sums) {
    if constexpr (TILE > 1) {
        if (left < TILE) return product<TILE - 1>(kind, p, tile, left, sums);
    }
    if (kind == Q4)
        panels_q4<TILE>(p, tile, sums);
    else if (kind == Q4K)
        panels_q4k<TILE>(p, tile, sums);
    else
        panels_q8<TILE>(p, tile, sums);
    return TILE;
}

constexpr int STRIP = 8;  // panels or pairs taken on at once where one tile holds all tokens; else one stays in the cache

struct Output {
    float* to;  // [T, stride]
    size_t stride;
    bool add;  // to what stands there
};

// The sums of one token for the outputs from `row` on.
template <class Floats>
static inline void finish(const Matrix& m, int row, Floats sums, float* to, bool add) {
    constexpr int OUTPUTS = sizeof(Floats) / sizeof(float);
    const int rows = std::min(OUTPUTS, m.num_out - row);
    if (rows == OUTPUTS) {
        if (m.bias) sums = sums + read<Floats>(m.bias + row);
        store(to, add ? read<Floats>(to) + sums : sums);
        return;
    }
    float lanes[OUTPUTS];
    store(lanes, sums);
    for (int i = 0; i < rows; i++) {
        float y = lanes[i];
        if (m.bias) y = y + m.bias[row + i];
        to[i] = add ? to[i] + y : y;
    }
}

// As many outputs from `row` on as fit a strip before `last`; returns the first row after them.
template <class Panels>
static int strip(const Matrix& m, int row, int last, const Activations& act, int num_tokens, const Output& out) {
    using Floats = typename Panels::Floats;
    const size_t panel_bytes = packed_bytes(m.kind, 8, m.num_in);
    const Panels p(m.data + panel_bytes * (row / 8), panel_bytes);
    // The last panel of a pair may be incomplete, but it must be there.
    const int count = std::min(num_tokens <= MAX_TILE ? STRIP : 1, (last - row + 7) / Panels::OUTPUTS);
    Floats sums[STRIP * MAX_TILE];
    for (int token = 0; token < num_tokens;) {
        const int size = product<MAX_TILE>(m.kind, p, Tile{act, token, count}, num_tokens - token, sums);
        for (int n = 0; n < count; n++)
            for (int t = 0; t < size; t++) {
                const int at = row + n * Panels::OUTPUTS;
                finish(m, at, sums[n * size + t], out.to + (token + t) * out.stride + at, out.add);
            }
        token += size;
    }
    return row + count * Panels::OUTPUTS;
}

// Rows [first, last) of a product.
static void matmul_rows(const Matrix& m, int first, int last, const Activations& act, int num_tokens,
                        const Output& out) {
    int row = first;
#ifdef LAMPEJO_16_LANES
    while (last - row > 8) row = strip<TwoPanels>(m, row, last, act, num_tokens, out);
#endif
    while (last > row) row = strip<OnePanel>(m, row, last, act, num_tokens, out);
}

// Few pieces per thread: enough to share fairly, and long enough for memory to be read ahead.
static int rows_per_piece(int total_rows) {
    const int per_thread = total_rows < 8192 ? 2 : 16;
    return std::max(16, padded(total_rows / (per_thread * get_threads()), 8));
}

// A product of one or more matrices with the same activations, as a phase: their outputs stand one after another.
template <int COUNT>
static void matmul(Team& team, const Matrix (&matrices)[COUNT], const Activations& act, int num_tokens, float* out,
                   size_t stride, bool add) {
    int total_rows = 0;
    for (const Matrix& m : matrices) total_rows += m.num_out;
    const int rows = rows_per_piece(total_rows);
    int pieces = 0;
    for (const Matrix& m : matrices) pieces += (m.num_out + rows - 1) / rows;
    team.run(pieces, [&](int piece) {
        float* to = out;
        for (const Matrix& m : matrices) {
            const int own = (m.num_out + rows - 1) / rows;
            if (piece < own) {
                matmul_rows(m, piece * rows, std::min(m.num_out, (piece + 1) * rows), act, num_tokens, {to, stride, add});
                return;
            }
            piece -= own;
            to += m.num_out;
        }
    });
}
