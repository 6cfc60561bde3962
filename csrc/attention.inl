// RoPE, pages, and attention over them. Part of kernels.inl.

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
    return shape.block ? shape.block * (shape.num_heads / shape.num_kv) : 4;
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
