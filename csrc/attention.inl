// RoPE, pages, and attention over them. Part of kernels.inl.

// Pages hold keys as [P, G, D, S] and values as [P, G, S, D], f16: keys transposed, so that 8 keys are scored at once.

// RoPE on the first dimensions of a token's head.
static void rotate(float* head, const Batch& batch, int token) {
    const int half = batch.rotary_dim / 2;
    const float *cos = batch.cos + static_cast<size_t>(token) * half, *sin = batch.sin + static_cast<size_t>(token) * half;
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

// Keys are taken in tiles of at most MAX_PAGE, in the order of positions, with one step of the online softmax each (arXiv
// 2205.14135). Every TILES_PER_SPAN tiles the softmax begins anew, and its results are put together span by span: so the
// spans of a long context can be shared among threads, and give the same bits where they are not.
constexpr int TILES_PER_SPAN = 8;

static int tile_keys(int page_size) { return MAX_PAGE / page_size * page_size; }

struct Query {
    const float* q;  // [D], scaled
    float* out;      // [D], of the span so far
    float best, total;
    int from, to;  // keys of the current tile that it sees
};

struct KeyTile {  // pages of keys and values
    const uint16_t *keys[MAX_PAGE / 8], *values[MAX_PAGE / 8];
    int num_pages, page_size;
};

// Scores of 8 * W keys side by side in a page, for queries that share the loads.
template <int TILE, int W>
static inline void score(const Query* queries, int dim, const uint16_t* k, int page_size, float (*scores)[MAX_PAGE]) {
    f32x8 acc[TILE][W];
    times<TILE * W>(EACH(j) { acc[j / W][j % W] = all(0); });
    for (int i = 0; i < dim; i++, k += page_size) {
        f32x8 key[W];
        times<W>(EACH(w) { key[w] = load_f16(k + 8 * w); });
        times<TILE>(EACH(n) {
            const f32x8 q = all(queries[n].q[i]);
            times<W>(EACH(w) { acc[n][w] = fma(q, key[w], acc[n][w]); });
        });
    }
    times<TILE * W>(EACH(j) { store(scores[j / W] + 8 * (j % W), acc[j / W][j % W]); });
}

// out * fade + the weighted sum of values, 8 * W dimensions from `i` on.
template <int TILE, int W>
static inline void mix(Query* queries, int dim, int i, const KeyTile& tile, int from, int to,
                       const float (*weights)[MAX_PAGE], const float* fade) {
    f32x8 acc[TILE][W];
    times<TILE * W>(EACH(j) {
        acc[j / W][j % W] = load(queries[j / W].out + i + 8 * (j % W)) * all(fade[j / W]);
    });
    for (int page = from / tile.page_size; page * tile.page_size < to; page++) {
        const int start = page * tile.page_size, last = std::min(to, start + tile.page_size);
        int s = std::max(from, start);
        const uint16_t* v = tile.values[page] + static_cast<size_t>(s - start) * dim + i;
        for (; s < last; s++, v += dim) {
            f32x8 value[W];
            times<W>(EACH(w) { value[w] = load_f16(v + 8 * w); });
            times<TILE>(EACH(n) {
                const f32x8 weight = all(weights[n][s]);
                times<W>(EACH(w) { acc[n][w] = fma(weight, value[w], acc[n][w]); });
            });
        }
    }
    times<TILE * W>(EACH(j) { store(queries[j / W].out + i + 8 * (j % W), acc[j / W][j % W]); });
}

// A tile of keys for a tile of queries. Keys that a query does not see get weight 0, and 0 times a finite value changes
// nothing, so which queries share a tile does not show in a result.
template <int TILE>
static inline void attend_tile(Query* queries, int dim, const KeyTile& tile) {
    float weights[TILE][MAX_PAGE];
    int from = queries[0].from, to = queries[0].to;
    for (int n = 1; n < TILE; n++) from = std::min(from, queries[n].from), to = std::max(to, queries[n].to);
    if (from >= to) return;
    constexpr int W = 2;  // as much as fits 16 registers
    const int first = from / 8 * 8, end = padded(to, 8);
    for (int at = first; at < end;) {
        const int page = at / tile.page_size, s = at - page * tile.page_size;
        const uint16_t* k = tile.keys[page] + s;
        float(*scores)[MAX_PAGE] = reinterpret_cast<float(*)[MAX_PAGE]>(&weights[0][at]);
        if (s + 8 * W <= tile.page_size)
            score<TILE, W>(queries, dim, k, tile.page_size, scores), at += 8 * W;
        else
            score<TILE, 1>(queries, dim, k, tile.page_size, scores), at += 8;
    }
    float fade[TILE];
    for (int n = 0; n < TILE; n++) {
        Query& query = queries[n];
        if (query.from > first || query.to < end)
            for (int s = first; s < end; s++)  // those outside may be NaN
                if (s < query.from || s >= query.to) weights[n][s] = HIDDEN;
        f32x8 largest = all(query.best);
        for (int s = first; s < end; s += 8) largest = max(largest, load(weights[n] + s));
        float best = max_of(largest);
        fade[n] = exp1(query.best - best);
        f32x8 sums = all(0);
        for (int s = first; s < end; s += 8) {
            f32x8 w = load(weights[n] + s);
            w = where_less(w, all(HIDDEN / 2), all(0), exp(w - all(best)));
            store(weights[n] + s, w);
            sums = sums + w;
        }
        query.total = query.total * fade[n] + sum(sums);
        query.best = best;
    }
    constexpr int WIDE = TILE == 4 ? 2 : 4;
    int i = 0;
    for (; i + 8 * WIDE <= dim; i += 8 * WIDE) mix<TILE, WIDE>(queries, dim, i, tile, from, to, weights, fade);
    for (; i < dim; i += 8) mix<TILE, 1>(queries, dim, i, tile, from, to, weights, fade);
}

static void attend_tile(Query* queries, int num_queries, int dim, const KeyTile& tile) {
    if (num_queries == 4)
        attend_tile<4>(queries, dim, tile);
    else if (num_queries == 3)
        attend_tile<3>(queries, dim, tile);
    else if (num_queries == 2)
        attend_tile<2>(queries, dim, tile);
    else
        attend_tile<1>(queries, dim, tile);
}

static void ask_ahead(const uint16_t* page, size_t num) {
    for (size_t i = 0; i < num; i += 32) __builtin_prefetch(page + i, 0, 2);
}

struct AttentionShape {
    int num_heads, num_kv, dim, block, causal, window;
    int group() const { return num_heads / num_kv; }
};

// A drafter's block of keys and values as one page of its own.
struct BlockPage {
    uint16_t keys[MAX_DIM * MAX_PAGE], values[MAX_DIM * MAX_PAGE];
};

struct AttentionData {
    const float* q;   // [T, stride], a head every `q_step` floats
    int q_step;
    const float *k, *v;  // [T, stride]
    size_t stride;
    const uint16_t *k_cache, *v_cache;
    float* out;    // [T, Q * D]
    float* spans;  // results of single spans, `span_stride` floats each, where they are shared among threads
};

static int span_stride(int dim) { return dim + 8; }  // the weighted sum, its largest score, its total

// A span's result joins those of the spans before it.
static void join_span(int dim, const float* part, float part_best, float part_total, float* out, float& best, float& total) {
    const float largest = std::max(best, part_best), fade = exp1(best - largest), weight = exp1(part_best - largest);
    for (int i = 0; i < dim; i += 8) store(out + i, fma(all(weight), load(part + i), load(out + i) * all(fade)));
    total = total * fade + part_total * weight;
    best = largest;
}

static void divide(int dim, float* out, float total) {
    const f32x8 inverse = all(1.0f / total);
    for (int i = 0; i < dim; i += 8) store(out + i, load(out + i) * inverse);
}

// Up to 4 queries of one segment and key/value head: of the length * group pairs (token, head of the group), token by
// token, `count` from `first` on.
struct QueryTile {
    const AttentionShape& shape;
    const Batch& batch;
    const Segment& segment;
    int g, count;
    float scaled[4][MAX_DIM];
    Query queries[4];
    int token[4], head[4], position[4];

    QueryTile(const AttentionShape& shape, const Batch& batch, const Segment& segment, int g, int first, int count,
              const AttentionData& data)
        : shape(shape), batch(batch), segment(segment), g(g), count(count) {
        const float scale = 1.0f / std::sqrt(static_cast<float>(shape.dim));
        for (int n = 0; n < count; n++) {
            token[n] = segment.start + (first + n) / shape.group();
            head[n] = g * shape.group() + (first + n) % shape.group();
            position[n] = segment.position + (token[n] - segment.start);
            const float* from = data.q + token[n] * data.stride + static_cast<size_t>(head[n]) * data.q_step;
            for (int i = 0; i < shape.dim; i++) scaled[n][i] = from[i] * scale;
        }
    }
    int first_key(int n) const { return shape.window ? std::max(0, position[n] - shape.window + 1) : 0; }
    int num_keys(int n) const { return shape.block ? segment.position : position[n] + 1; }

    void begin(int n, float* out) {
        std::memset(out, 0, shape.dim * sizeof(float));
        queries[n] = {scaled[n], out, HIDDEN, 0, 0, 0};
    }
    // Keys [start, end) of the context; start is the first of a page.
    void attend(int start, int end, const AttentionData& data) {
        const int size = batch.page_size, step = tile_keys(size);
        const size_t page_floats = static_cast<size_t>(shape.dim) * size;
        KeyTile tile;
        tile.page_size = size;
        for (; start < end; start += step) {
            const int keys = std::min(step, end - start);
            tile.num_pages = (keys + size - 1) / size;
            for (int p = 0; p < tile.num_pages; p++) {
                const size_t at = static_cast<size_t>(batch.pages[segment.first_page + start / size + p]) * shape.num_kv + g;
                tile.keys[p] = data.k_cache + at * page_floats, tile.values[p] = data.v_cache + at * page_floats;
            }
            // The pages of one head lie apart: too far for hardware that reads ahead.
            for (int next = start / size + tile.num_pages; next * size < std::min(end, start + 2 * step); next++) {
                const size_t at = static_cast<size_t>(batch.pages[segment.first_page + next]) * shape.num_kv + g;
                ask_ahead(data.k_cache + at * page_floats, page_floats), ask_ahead(data.v_cache + at * page_floats, page_floats);
            }
            for (int n = 0; n < count; n++) {
                queries[n].from = std::max(0, first_key(n) - start);
                queries[n].to = std::min(keys, num_keys(n) - start);
                if (queries[n].to <= queries[n].from) queries[n].from = queries[n].to = 0;
            }
            attend_tile(queries, count, shape.dim, tile);
        }
    }
    void attend_block(const BlockPage& page) {
        KeyTile tile = {{page.keys}, {page.values}, 1, batch.page_size};
        for (int n = 0; n < count; n++) {
            const int i = position[n] - segment.position;
            queries[n].from = shape.window ? std::max(0, i - shape.window + 1) : 0;
            queries[n].to = shape.causal ? i + 1 : segment.length;
            if (shape.window) queries[n].to = std::min(queries[n].to, i + shape.window);
        }
        attend_tile(queries, count, shape.dim, tile);
    }
};

// The keys that a segment's queries see, in spans.
struct Spans {
    int keys, first, num, end;  // keys of a span; the first that is seen; how many; the end of the last one's keys

    Spans(const AttentionShape& shape, int page_size, const Segment& segment) {
        keys = TILES_PER_SPAN * tile_keys(page_size);
        end = segment.position + (shape.block ? 0 : segment.length);
        first = (shape.window ? std::max(0, segment.position - shape.window + 1) : 0) / keys;
        num = std::max(1, (end + keys - 1) / keys - first);
    }
    int start(int span) const { return (first + span) * keys; }
    int stop(int span) const { return std::min(end, start(span) + keys); }
};

// Whole contexts, span after span.
static void attend_all(QueryTile& tile, const Spans& spans, const BlockPage& block_page, const AttentionData& data) {
    const int dim = tile.shape.dim;
    float parts[4][MAX_DIM], best[4], total[4];
    float* out[4];
    for (int span = 0; span < spans.num; span++) {
        for (int n = 0; n < tile.count; n++) {
            out[n] = data.out + (static_cast<size_t>(tile.token[n]) * tile.shape.num_heads + tile.head[n]) * dim;
            tile.begin(n, span ? parts[n] : out[n]);
        }
        tile.attend(spans.start(span), spans.stop(span), data);
        if (tile.shape.block && span == spans.num - 1) tile.attend_block(block_page);
        for (int n = 0; n < tile.count; n++) {
            const Query& query = tile.queries[n];
            if (span)
                join_span(dim, parts[n], query.best, query.total, out[n], best[n], total[n]);
            else
                best[n] = query.best, total[n] = query.total;
        }
    }
    for (int n = 0; n < tile.count; n++) divide(dim, out[n], total[n]);
}

// How a segment's attention is cut into pieces: (key/value head, span or all of them, some pairs of token and head).
struct Pieces {
    Spans spans;
    int num_pairs, per_piece, num_spans;  // of pairs and spans for one head; 1 span if they are not shared

    Pieces(const AttentionShape& shape, int page_size, const Segment& segment) : spans(shape, page_size, segment) {
        num_pairs = segment.length * shape.group();
        per_piece = shape.block ? std::max(1, num_pairs) : 4;
        num_spans = !shape.block && num_pairs <= MAX_SHARED_PAIRS ? spans.num : 1;
    }
    static constexpr int MAX_SHARED_PAIRS = 64;  // more pairs than these are pieces enough
    bool shared() const { return num_spans > 1; }
    int per_span() const { return (num_pairs + per_piece - 1) / per_piece; }
    int per_head() const { return per_span() * num_spans; }
    int num_slots() const { return shared() ? num_pairs * num_spans : 0; }  // of a head, for results of single spans
};

struct AttentionWork {
    int pieces = 0, heads = 0;  // heads: pairs of a segment and a key/value head, where spans are to be joined
    size_t span_floats = 0;

    AttentionWork(const AttentionShape& shape, const Batch& batch) {
        int slots = 0;
        for (int s = 0; s < batch.num_segments; s++) {
            const Pieces own(shape, batch.page_size, batch.segments[s]);
            pieces += own.per_head() * shape.num_kv;
            slots += own.num_slots() * shape.num_kv;
        }
        if (slots) heads = batch.num_segments * shape.num_kv;
        span_floats = static_cast<size_t>(slots) * span_stride(shape.dim);
    }
};

static void attend_piece(const AttentionShape& shape, const Batch& batch, const AttentionData& data, int piece) {
    float* slots = data.spans;
    for (int s = 0; s < batch.num_segments; s++) {
        const Segment& segment = batch.segments[s];
        const Pieces own(shape, batch.page_size, segment);
        if (piece >= own.per_head() * shape.num_kv) {
            piece -= own.per_head() * shape.num_kv;
            slots += static_cast<size_t>(own.num_slots()) * shape.num_kv * span_stride(shape.dim);
            continue;
        }
        const int g = piece / own.per_head(), span = piece % own.per_head() / own.per_span();
        const int first = piece % own.per_span() * own.per_piece, last = std::min(own.num_pairs, first + own.per_piece);
        static thread_local BlockPage block_page;
        if (shape.block)
            for (int j = 0; j < segment.length; j++) {
                const size_t at = (segment.start + j) * data.stride + static_cast<size_t>(g) * shape.dim;
                store_key(block_page.keys, j, batch.page_size, 1, 0, shape.dim, data.k + at);
                store_value(block_page.values, j, batch.page_size, 1, 0, shape.dim, data.v + at);
            }
        for (int pair = first; pair < last; pair += 4) {
            QueryTile tile(shape, batch, segment, g, pair, std::min(4, last - pair), data);
            if (!own.shared()) {
                attend_all(tile, own.spans, block_page, data);
                continue;
            }
            float* to = slots + (static_cast<size_t>(g * own.num_spans + span) * own.num_pairs + pair) * span_stride(shape.dim);
            for (int n = 0; n < tile.count; n++) tile.begin(n, to + n * span_stride(shape.dim));
            tile.attend(own.spans.start(span), own.spans.stop(span), data);
            for (int n = 0; n < tile.count; n++) {
                tile.queries[n].out[shape.dim] = tile.queries[n].best;
                tile.queries[n].out[shape.dim + 1] = tile.queries[n].total;
            }
        }
        return;
    }
}

// Joins the spans of one segment and key/value head.
static void join_head(const AttentionShape& shape, const Batch& batch, const AttentionData& data, int index) {
    const int wanted = index / shape.num_kv, g = index % shape.num_kv, dim = shape.dim, stride = span_stride(dim);
    const float* slots = data.spans;
    for (int s = 0; s < wanted; s++)
        slots += static_cast<size_t>(Pieces(shape, batch.page_size, batch.segments[s]).num_slots()) * shape.num_kv * stride;
    const Segment& segment = batch.segments[wanted];
    const Pieces own(shape, batch.page_size, segment);
    if (!own.shared()) return;
    for (int pair = 0; pair < own.num_pairs; pair++) {
        const int token = segment.start + pair / shape.group(), head = g * shape.group() + pair % shape.group();
        float* out = data.out + (static_cast<size_t>(token) * shape.num_heads + head) * dim;
        float best = 0, total = 0;
        for (int span = 0; span < own.num_spans; span++) {
            const float* part = slots + (static_cast<size_t>(g * own.num_spans + span) * own.num_pairs + pair) * stride;
            if (span) {
                join_span(dim, part, part[dim], part[dim + 1], out, best, total);
            } else {
                std::memcpy(out, part, dim * sizeof(float));
                best = part[dim], total = part[dim + 1];
            }
        }
        divide(dim, out, total);
    }
}

// All of a batch, as one or two phases. `work` is counted before the region begins: a late thread must not read the
// segments.
static void attention(Team& team, const AttentionWork& work, const AttentionShape& shape, const Batch& batch,
                      const AttentionData& data) {
    team.run(work.pieces, [&](int piece) { attend_piece(shape, batch, data, piece); });
    if (work.heads) team.run(work.heads, [&](int head) { join_head(shape, batch, data, head); });
}
