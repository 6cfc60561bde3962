// The kernels themselves, in terms of the 8-lane vectors that the including file has chosen. Compiled once per
// instruction set, inside a namespace of its own.

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
    }
}

// --- matrix products -------------------------------------------------------------------------------------------------

// A block of 8 rows of each kind: for each group of 32 inputs, f(group, codes of a step, scale, minimum) ...
template <int TILE>
static inline void block_q4(const uint8_t* w, const Activations& act, int token, f32x8* out) {
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
static inline void block_q4k(const uint8_t* w, const Activations& act, int token, f32x8* out) {
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
static inline void block_q8(const uint8_t* w, const Activations& act, int token, f32x8* out) {
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
static inline void block(const Matrix& m, const uint8_t* w, const Activations& act, int token, f32x8* out) {
    if (m.kind == Q4)
        block_q4<TILE>(w, act, token, out);
    else if (m.kind == Q4K)
        block_q4k<TILE>(w, act, token, out);
    else
        block_q8<TILE>(w, act, token, out);
}

// Rows [first, last) of out [T, N], whose tokens lie `stride` apart; `add` keeps what stands there and adds to it.
static void matmul_rows(const Matrix& m, int first, int last, const Activations& act, int num_tokens, float* out,
                        size_t stride, bool add) {
    const size_t block_bytes = packed_bytes(m.kind, 8, m.num_in);
    for (int row = first; row < last; row += 8) {
        const uint8_t* w = m.data + block_bytes * (row / 8);
        const int rows = std::min(8, m.num_out - row);
        for (int token = 0; token < num_tokens;) {
            f32x8 result[MAX_TILE];
            int tile;
            const int left = num_tokens - token;
            if (left >= MAX_TILE)
                block<MAX_TILE>(m, w, act, token, result), tile = MAX_TILE;
            else if (left >= 4)
                block<4>(m, w, act, token, result), tile = 4;
            else if (left == 3)
                block<3>(m, w, act, token, result), tile = 3;
            else if (left == 2)
                block<2>(m, w, act, token, result), tile = 2;
            else
                block<1>(m, w, act, token, result), tile = 1;
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
    // Pieces of some 10 us: small enough to share fairly, large enough to be worth the taking.
    const int rows = std::max(16, std::min(512, padded(total_rows / 48, 8)));
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

// --- attention -------------------------------------------------------------------------------------------------------

// Pages hold keys as [P, G, D, S] and values as [P, G, S, D], f16: keys transposed, so that 8 keys are scored at once.

static void rope_head(float* head, int dim, const float* cos, const float* sin) {
    const int half = dim / 2;
    int i = 0;
    for (; i + 8 <= half; i += 8) {
        f32x8 a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

// The largest f16: what does not fit is cut there, because 0 times infinity would not be 0.
static inline f32x8 fit_f16(f32x8 a) { return max(min(a, all(65504.0f)), all(-65504.0f)); }

static inline uint16_t to_f16(float x) {
    uint16_t halves[8];
    store_f16(halves, fit_f16(all(x)));
    return halves[0];
}

static void store_key(uint16_t* cache, int64_t slot, int page_size, int num_kv, int g, int dim, const float* key) {
    uint16_t* page = cache + (static_cast<size_t>(slot / page_size) * num_kv + g) * dim * page_size + slot % page_size;
    for (int i = 0; i < dim; i++) page[static_cast<size_t>(i) * page_size] = to_f16(key[i]);
}

static void store_value(uint16_t* cache, int64_t slot, int page_size, int num_kv, int g, int dim, const float* value) {
    uint16_t* to = cache + ((static_cast<size_t>(slot / page_size) * num_kv + g) * page_size + slot % page_size) * dim;
    int i = 0;
    for (; i + 8 <= dim; i += 8) store_f16(to + i, fit_f16(load(value + i)));
    for (; i < dim; i++) to[i] = to_f16(value[i]);
}

// One query of a tile: online softmax (arXiv 2205.14135) over pages, in the order of positions.
struct Query {
    const float* q;  // [D], scaled
    float* out;      // [D]
    float best, total;
    int from, to;  // keys of the current page that it sees
};

// One page of keys for a tile of queries, which share the loads: scores first, then the weighted sum of values. Keys that a
// query does not see get weight 0, and 0 times a finite value changes nothing, so the tile does not show in a result.
template <int TILE>
static inline void attend_page(Query* queries, int dim, const uint16_t* keys, const uint16_t* values, int page_size) {
    float weights[TILE][MAX_PAGE];
    int from = queries[0].from, to = queries[0].to;
    for (int n = 1; n < TILE; n++) from = std::min(from, queries[n].from), to = std::max(to, queries[n].to);
    if (from >= to) return;
    for (int s = from / 8 * 8; s < to; s += 8) {
        f32x8 even[TILE], odd[TILE];
        for (int n = 0; n < TILE; n++) even[n] = all(0), odd[n] = all(0);
        const uint16_t* k = keys + s;
        for (int i = 0; i < dim; i += 2, k += 2 * page_size) {
            f32x8 k0 = load_f16(k), k1 = load_f16(k + page_size);
            for (int n = 0; n < TILE; n++) {
                even[n] = fma(all(queries[n].q[i]), k0, even[n]);
                odd[n] = fma(all(queries[n].q[i + 1]), k1, odd[n]);
            }
        }
        for (int n = 0; n < TILE; n++) store(weights[n] + s, even[n] + odd[n]);
    }
    float fade[TILE];
    for (int n = 0; n < TILE; n++) {
        Query& query = queries[n];
        for (int s = 0; s < page_size; s++)  // those outside may be NaN
            if (s < query.from || s >= query.to) weights[n][s] = HIDDEN;
        f32x8 largest = all(query.best);
        for (int s = 0; s < page_size; s += 8) largest = max(largest, load(weights[n] + s));
        float best = max_of(largest);
        fade[n] = exp1(query.best - best);
        f32x8 sums = all(0);
        for (int s = 0; s < page_size; s += 8) {
            f32x8 w = load(weights[n] + s);
            w = where_less(w, all(HIDDEN / 2), all(0), exp(w - all(best)));
            store(weights[n] + s, w);
            sums = sums + w;
        }
        query.total = query.total * fade[n] + sum(sums);
        query.best = best;
    }
    for (int i = 0; i < dim; i += 8) {
        f32x8 acc[TILE];
        for (int n = 0; n < TILE; n++) acc[n] = load(queries[n].out + i) * all(fade[n]);
        const uint16_t* v = values + static_cast<size_t>(from) * dim + i;
        for (int s = from; s < to; s++, v += dim) {
            f32x8 value = load_f16(v);
            for (int n = 0; n < TILE; n++) acc[n] = fma(all(weights[n][s]), value, acc[n]);
        }
        for (int n = 0; n < TILE; n++) store(queries[n].out + i, acc[n]);
    }
}

static void attend_page(Query* queries, int tile, int dim, const uint16_t* keys, const uint16_t* values, int page_size) {
    if (tile == 4)
        attend_page<4>(queries, dim, keys, values, page_size);
    else if (tile == 3)
        attend_page<3>(queries, dim, keys, values, page_size);
    else if (tile == 2)
        attend_page<2>(queries, dim, keys, values, page_size);
    else
        attend_page<1>(queries, dim, keys, values, page_size);
}

struct AttentionShape {
    int num_heads, num_kv, dim, block, causal, window;
};

// A drafter's block of keys and values as one page of its own.
struct BlockPage {
    uint16_t keys[MAX_DIM * MAX_PAGE], values[MAX_DIM * MAX_PAGE];
};

// Queries of one segment and key/value head, q [T, stride] -> out [T, Q * D]; `first`, `count`: which of the
// length * group pairs (token, head of the group), token by token.
static void attend(const AttentionShape& shape, const Batch& batch, const Segment& segment, int g, int first, int count,
                   const float* q, size_t stride, const uint16_t* k_cache, const uint16_t* v_cache,
                   const BlockPage* block_page, float* out) {
    const int group = shape.num_heads / shape.num_kv, dim = shape.dim, size = batch.page_size;
    const int32_t* pages = batch.pages + segment.first_page;
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
    float scaled[4][MAX_DIM];
    Query queries[4];
    int position[4];
    for (int done = 0; done < count;) {
        const int tile = std::min(4, count - done);
        int first_key = 1 << 30, num_keys = 0;
        for (int n = 0; n < tile; n++, done++) {
            const int token = segment.start + (first + done) / group, head = g * group + (first + done) % group;
            const float* from = q + token * stride + static_cast<size_t>(head) * dim;
            for (int i = 0; i < dim; i++) scaled[n][i] = from[i] * scale;
            float* to = out + (static_cast<size_t>(token) * shape.num_heads + head) * dim;
            std::memset(to, 0, dim * sizeof(float));
            queries[n] = {scaled[n], to, HIDDEN, 0, 0, 0};
            position[n] = segment.position + (token - segment.start);
            first_key = std::min(first_key, shape.window ? std::max(0, position[n] - shape.window + 1) : 0);
            num_keys = std::max(num_keys, shape.block ? segment.position : position[n] + 1);
        }
        for (int start = first_key / size * size; start < num_keys; start += size) {
            for (int n = 0; n < tile; n++) {
                const int own_keys = shape.block ? segment.position : position[n] + 1;
                const int own_first = shape.window ? std::max(0, position[n] - shape.window + 1) : 0;
                queries[n].from = std::max(0, own_first - start);
                queries[n].to = std::min(size, own_keys - start);
                if (queries[n].to <= queries[n].from) queries[n].from = queries[n].to = 0;
            }
            const size_t at = (static_cast<size_t>(pages[start / size]) * shape.num_kv + g) * dim * size;
            attend_page(queries, tile, dim, k_cache + at, v_cache + at, size);
        }
        if (shape.block) {
            for (int n = 0; n < tile; n++) {
                const int i = position[n] - segment.position;
                queries[n].from = shape.window ? std::max(0, i - shape.window + 1) : 0;
                queries[n].to = shape.causal ? i + 1 : segment.length;
                if (shape.window) queries[n].to = std::min(queries[n].to, i + shape.window);
            }
            attend_page(queries, tile, dim, block_page->keys, block_page->values, size);
        }
        for (int n = 0; n < tile; n++) {
            const f32x8 inverse = all(1.0f / queries[n].total);
            for (int i = 0; i < dim; i += 8) store(queries[n].out + i, load(queries[n].out + i) * inverse);
        }
    }
}

// A piece of a batch's attention is some (token, head) pairs of a segment and key/value head.
static int pairs_per_piece(const AttentionShape& shape) {
    return shape.block ? shape.block * (shape.num_heads / shape.num_kv) : 16;
}

static int pieces_of(const AttentionShape& shape, const Segment& segment) {  // for one key/value head
    const int per_piece = pairs_per_piece(shape);
    return (segment.length * (shape.num_heads / shape.num_kv) + per_piece - 1) / per_piece;
}

static int attention_pieces(const AttentionShape& shape, const Batch& batch) {
    int pieces = 0;
    for (int s = 0; s < batch.num_segments; s++) pieces += pieces_of(shape, batch.segments[s]) * shape.num_kv;
    return pieces;
}

// All of a batch, as a phase. `pieces` is counted before the region begins: a late thread must not read the segments.
static void attention(Team& team, int pieces, const AttentionShape& shape, const Batch& batch, const float* q,
                      const float* k, const float* v, size_t stride, const uint16_t* k_cache, const uint16_t* v_cache,
                      float* out) {
    team.run(pieces, [&](int piece) {
        const int group = shape.num_heads / shape.num_kv, size = batch.page_size, per_piece = pairs_per_piece(shape);
        int s = 0;
        for (int own; piece >= (own = pieces_of(shape, batch.segments[s]) * shape.num_kv); s++) piece -= own;
        const Segment& segment = batch.segments[s];
        const int own = pieces_of(shape, segment), g = piece / own, first = piece % own * per_piece;
        static thread_local BlockPage block_page;
        if (shape.block)
            for (int j = 0; j < segment.length; j++) {
                const size_t at = (segment.start + j) * stride + static_cast<size_t>(g) * shape.dim;
                store_key(block_page.keys, j, size, 1, 0, shape.dim, k + at);
                store_value(block_page.values, j, size, 1, 0, shape.dim, v + at);
            }
        attend(shape, batch, segment, g, first, std::min(per_piece, segment.length * group - first), q, stride, k_cache,
               v_cache, &block_page, out);
    });
}

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

struct Workspace {  // grows to the largest step; owned by the calling thread
    std::vector<int8_t> codes;
    std::vector<float> scales, wide, narrow;
    std::vector<int32_t> sums;

    Activations activations(int num_tokens, int groups) {
        const size_t n = static_cast<size_t>(num_tokens) * groups;
        if (codes.size() < 32 * n) codes.resize(32 * n);
        if (scales.size() < n) scales.resize(n), sums.resize(n);
        return {codes.data(), scales.data(), sums.data(), groups};
    }
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
    const int num_heads = half.num_heads, num_kv = half.num_kv_heads, heads = num_heads + 2 * num_kv;
    const size_t width = static_cast<size_t>(heads) * dim;
    Workspace& ws = workspace();
    Activations act_in = ws.activations(num_tokens, std::max(groups_of(half.q), groups_of(half.out)));
    Activations act_out = act_in;
    act_in.groups = groups_of(half.q), act_out.groups = groups_of(half.out);
    float* qkv = Workspace::floats(ws.wide, num_tokens * width);
    float* mixed = Workspace::floats(ws.narrow, static_cast<size_t>(num_tokens) * num_heads * dim);
    const AttentionShape shape = {num_heads, num_kv, dim, half.block, half.causal, half.window};
    const int pieces = attention_pieces(shape, batch);
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
                if (head < num_heads + num_kv) {
                    const float* norm = head < num_heads ? half.q_norm : half.k_norm;
                    if (norm) normalise(norm, half.qk_eps, dim, at, at);
                    rope_head(at, dim, batch.cos + static_cast<size_t>(token) * dim / 2,
                              batch.sin + static_cast<size_t>(token) * dim / 2);
                }
                if (half.block || head < num_heads) continue;
                if (head < num_heads + num_kv)
                    store_key(k_cache, batch.slots[token], batch.page_size, num_kv, head - num_heads, dim, at);
                else
                    store_value(v_cache, batch.slots[token], batch.page_size, num_kv, head - num_heads - num_kv, dim, at);
            }
        });
        const float* k = qkv + static_cast<size_t>(num_heads) * dim;
        attention(team, pieces, shape, batch, qkv, k, k + static_cast<size_t>(num_kv) * dim, width, k_cache, v_cache, mixed);
        prepare_plain(team, num_heads * dim, mixed, num_tokens, act_out);
        matmul(team, outputs, act_out, num_tokens, x, half.out.num_out, true);
    });
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
            const float *gate = wide + static_cast<size_t>(t) * 2 * width, *up = gate + width;
            int i = 0;
            for (; i + 8 <= width; i += 8) {
                f32x8 a = load(gate + i);
                store(row + i, a / (all(1) + exp(all(0) - a)) * load(up + i));
            }
            for (; i < width; i++) row[i] = gate[i] / (1 + exp1(-gate[i])) * up[i];
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
                rope_head(at, dim, batch.cos + static_cast<size_t>(token) * dim / 2,
                          batch.sin + static_cast<size_t>(token) * dim / 2);
                store_key(k_cache, batch.slots[token], batch.page_size, num_kv, head, dim, at);
            }
        });
    });
}

static void paged_attention(const Batch& batch, const float* q, const uint16_t* k_cache, const uint16_t* v_cache,
                            int num_heads, int num_kv, int dim, float* out) {
    const AttentionShape shape = {num_heads, num_kv, dim, 0, 0, 0};
    const int pieces = attention_pieces(shape, batch);
    parallel([=](Team& team) {
        attention(team, pieces, shape, batch, q, nullptr, nullptr, static_cast<size_t>(num_heads) * dim, k_cache,
                  v_cache, out);
    });
}

// --- noise -----------------------------------------------------------------------------------------------------------

static inline uint32_t mix32(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

static void add_gumbel(const float* logits, float temperature, uint64_t key, const int64_t* ids, int num_ids, float* out) {
    const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
    const int per_piece = 2048;
    parallel([=](Team& team) {
        team.run((num_ids + per_piece - 1) / per_piece, [&](int piece) {
            const int last = std::min(num_ids, (piece + 1) * per_piece);
            for (int i = piece * per_piece; i < last; i++) {
                const uint32_t id = static_cast<uint32_t>(ids ? ids[i] : i);
                const uint32_t bits = mix32(mix32(id * 0x9E3779B1u + low) ^ high);
                const float uniform = (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
                out[i] = logits[i] / temperature - std::log(-std::log(uniform));
            }
        });
    });
}

extern const Kernels kernels;
const Kernels kernels = {matmul_all,   rms_norm,        attention_half, mlp_half,
                         context_half, paged_attention, add_gumbel};
