// Tokens chosen from scores: keyed noise, temperature, top_k, top_p, min_p. Part of kernels.inl.
//
// Every operation here that a result depends on is one that PyTorch has too and rounds alike: no fused multiply-add, no sum
// of floats whose order could differ. So lampejo/sampling.py, which is the definition, gives the same bits.

constexpr float MOST_NOISE = 16.7f;      // the largest is -log(-log(1 - 2^-24)) = 16.6355
constexpr float LEAST_WEIGHT = -23.0f;   // e^-23 * 2^30 rounds to 0

static inline f32x8 exact_log(f32x8 x) {  // of normal numbers; 2 atanh((m - 1) / (m + 1)) for m in [sqrt(1/2), sqrt(2))
    const u32x8 bits = bits_of(x), exponent = signed_right<23>(bits - all_u32(0x3f3504f3));
    const f32x8 m = float_of_bits(bits - left<23>(exponent));
    const f32x8 s = (m - all(1)) / (m + all(1)), z = s * s;
    f32x8 p = z * all(2.0f / 9) + all(2.0f / 7);
    p = p * z + all(2.0f / 5);
    p = p * z + all(2.0f / 3);
    p = p * z + all(2);
    return p * s + to_float(exponent) * all(0.69314718f);
}

// e^x * 2^30 to the nearest whole number, for x <= 0: whole numbers have one sum, whatever the order.
static inline u32x8 weight(f32x8 x) {
    x = max(x, all(LEAST_WEIGHT));
    const f32x8 n = round(x * all(1.44269504f));
    const f32x8 r = (x - n * all(0.693359375f)) - n * all(-2.12194440e-4f);
    f32x8 p = r * all(1.0f / 5040) + all(1.0f / 720);
    p = p * r + all(1.0f / 120);
    p = p * r + all(1.0f / 24);
    p = p * r + all(1.0f / 6);
    p = p * r + all(0.5f);
    p = p * r + all(1);
    p = p * r + all(1);
    return to_whole(scale2(p, n + all(30)));
}

static inline u32x8 mix32(u32x8 x) {  // MurmurHash3's finaliser
    x = (x ^ right<16>(x)) * all_u32(0x85EBCA6B);
    x = (x ^ right<13>(x)) * all_u32(0xC2B2AE35);
    return x ^ right<16>(x);
}

static inline uint64_t mix64(uint64_t x) {  // SplitMix64's
    x += 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

struct Noise {
    u32x8 low, high;
    explicit Noise(const Choice& choice) {
        const uint64_t key = mix64(choice.seed ^ mix64(static_cast<uint64_t>(choice.position) + 1));
        low = all_u32(static_cast<uint32_t>(key)), high = all_u32(static_cast<uint32_t>(key >> 32));
    }
    u32x8 bits(u32x8 ids) const { return right<9>(mix32(mix32(ids * all_u32(0x9E3779B1) + low) ^ high)); }
    static f32x8 gumbel(u32x8 bits) {
        const f32x8 uniform = (to_float(bits) + all(0.5f)) * all(0x1p-23f);
        return all(0) - exact_log(all(0) - exact_log(uniform));
    }
    // At least the noise, and less than 0.7 above it where it matters: -log(1 - u) > -log(-log(u)), by its exponent alone.
    static f32x8 at_most(u32x8 bits) {
        const f32x8 rest = to_float(all_u32(1 << 23) - bits) - all(0.5f);  // (1 - u) * 2^23
        const u32x8 exponent = right<23>(bits_of(rest));                   // biased by 127
        return to_float(all_u32(127 + 23) - exponent) * all(0.69315f) + all(1e-3f);
    }
};

struct Ids {  // of scores: those of a list, or their own numbers
    const int32_t* list;
    int first;
    u32x8 at(int i) const {
        static const int32_t steps[] = {0, 1, 2, 3, 4, 5, 6, 7};
        return list ? load_u32(list + first + i) : load_u32(steps) + all_u32(static_cast<uint32_t>(first + i));
    }
    u32x8 rest(int i, int n) const {  // where less than 8 are left
        int32_t lanes[8] = {};
        for (int k = 0; i + k < n; k++) lanes[k] = list ? list[first + i + k] : first + i + k;
        return load_u32(lanes);
    }
};

struct Best {
    float score;  // all told
    int index;
    // Whether this comes before a later one: the first of equals stays, NaN is the greatest.
    bool stays(float later) const { return score != score || later <= score; }
};

static Best greatest(const float* x, int n) {
    Best best = {x[0], 0};
    for (int i = 0; i < n; i += 8) {
        if (i + 8 <= n && all_at_most(load(x + i), all(best.score))) continue;
        for (int k = i; k < std::min(n, i + 8); k++)
            if (!best.stays(x[k])) best = {x[k], k};
        if (best.score != best.score) break;
    }
    return best;
}

static inline f32x8 load_rest(const float* x, int i, int n) {  // where less than 8 are left
    float lanes[8];
    for (int k = 0; k < 8; k++) lanes[k] = i + k < n ? x[i + k] : -INFINITY;
    return load(lanes);
}

// The greatest of x / temperature + noise, of those with at least `least` before the noise.
static Best greatest_noisy(const float* x, int n, const Ids& ids, const Choice& choice, float least) {
    const Noise noise(choice);
    const f32x8 temperature = all(choice.temperature);
    Best best = {-INFINITY, 0};
    for (int i = 0; i < n; i += 8) {
        const bool whole = i + 8 <= n;
        f32x8 scores = (whole ? load(x + i) : load_rest(x, i, n)) / temperature;
        scores = where_less(scores, all(least), all(-INFINITY), scores);
        if (all_at_most(scores + all(MOST_NOISE), all(best.score))) continue;
        const u32x8 bits = noise.bits(whole ? ids.at(i) : ids.rest(i, n));
        if (all_at_most(scores + Noise::at_most(bits), all(best.score))) continue;
        float lanes[8];
        store(lanes, scores + Noise::gumbel(bits));
        for (int k = 0; k < 8; k++)
            if (!best.stays(lanes[k])) best = {lanes[k], i + k};
        if (best.score != best.score) break;
    }
    return best;
}

// --- top_k, top_p, min_p ---------------------------------------------------------------------------------------------

// The greatest value such that the weights of all values from it on reach `wanted`; the weights of all together do.
static float border(float* values, int32_t* weights, size_t n, double wanted) {
    float low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < n; i++) low = std::min(low, values[i]), high = std::max(high, values[i]);
    int64_t above = 0;  // of values that are greater than all that are left
    while (low < high) {
        float middle = low + (high - low) / 2;
        if (!(middle > low)) middle = high;
        int64_t upper = 0;
        for (size_t i = 0; i < n; i++) upper += values[i] >= middle ? weights[i] : 0;
        const bool reached = static_cast<double>(above + upper) >= wanted;
        if (!reached) above += upper;
        size_t left = 0;
        low = INFINITY, high = -INFINITY;
        for (size_t i = 0; i < n; i++) {  // without branches: which way a value goes cannot be foreseen
            const float value = values[i];
            const bool stays = (value >= middle) == reached;
            low = std::min(low, stays ? value : INFINITY), high = std::max(high, stays ? value : -INFINITY);
            values[left] = value, weights[left] = weights[i];
            left += stays;
        }
        n = left;
    }
    return low;
}

struct Candidates {  // the likeliest of a row, where top_k and top_p have to look; owned by a thread
    std::vector<float> maxima, values;
    std::vector<int32_t> weights;
    size_t num = 0;

    void collect(const float* x, int n, f32x8 temperature, float least) {
        if (values.size() < static_cast<size_t>(n) + 8) values.resize(n + 8), weights.resize(n + 8);
        num = 0;
        for (int i = 0; i < n; i += 8) {
            const f32x8 scores = (i + 8 <= n ? load(x + i) : load_rest(x, i, n)) / temperature;
            if (max_of(scores) < least) continue;
            float lanes[8];
            store(lanes, scores);
            for (int k = 0; k < 8; k++) {
                values[num] = lanes[k];
                num += lanes[k] >= least;
            }
        }
    }
    float border_of(double wanted) { return border(values.data(), weights.data(), num, wanted); }
};

static bool has_filter(const Choice* choice) {
    return choice && choice->temperature > 0 && (choice->top_k > 0 || choice->top_p < 1 || choice->log_min_p > -INFINITY);
}

// What a score over the temperature must have to be kept.
static float least_kept(const float* x, int n, const Choice& choice) {
    constexpr int CHUNK = 64;
    static thread_local Candidates candidates;
    Candidates& c = candidates;
    const f32x8 temperature = all(choice.temperature);
    c.maxima.clear();
    for (int i = 0; i < n; i += CHUNK) {
        f32x8 most = all(-INFINITY);
        for (int k = i; k < std::min(n, i + CHUNK); k += 8) {
            const f32x8 scores = k + 8 <= n ? load(x + k) : load_rest(x, k, n);
            // Infinity and NaN are to be chosen, and refused: nothing is filtered out.
            if (!all_at_most(scores, all(3.4e38f))) return -INFINITY;
            most = max(most, scores / temperature);
        }
        c.maxima.push_back(max_of(most));
    }
    const float best = *std::max_element(c.maxima.begin(), c.maxima.end());
    if (!std::isfinite(best)) return -INFINITY;
    float least = -INFINITY;
    if (choice.top_k > 0 && choice.top_k < n) {
        // As many values as are wanted are at least that of the last wanted chunk.
        const size_t k = choice.top_k;
        float enough = -3.4e38f;
        if (k <= c.maxima.size()) {
            std::nth_element(c.maxima.begin(), c.maxima.begin() + (k - 1), c.maxima.end(), std::greater<float>());
            enough = std::max(enough, c.maxima[k - 1]);
        }
        c.collect(x, n, temperature, enough);
        std::fill(c.weights.begin(), c.weights.begin() + c.num, 1);
        if (c.num >= k) least = c.border_of(static_cast<double>(k));
    }
    if (choice.top_p < 1) {
        c.collect(x, n, temperature, std::max(least, best + LEAST_WEIGHT));
        int64_t total = 0;
        for (size_t i = 0; i < c.num; i += 8) store(c.weights.data() + i, weight(load(c.values.data() + i) - all(best)));
        for (size_t i = 0; i < c.num; i++) total += c.weights[i];
        least = std::max(least, c.border_of(choice.top_p * static_cast<double>(total)));
    }
    return std::max(least, best + choice.log_min_p);
}

// --- rows of scores, at hand or as the product of a head -------------------------------------------------------------

static void noise(const Choice& choice, const int32_t* list, int n, float* out) {
    const Noise noise(choice);
    const Ids ids = {list, 0};
    for (int i = 0; i < n; i += 8) {
        float lanes[8];
        store(lanes, Noise::gumbel(noise.bits(i + 8 <= n ? ids.at(i) : ids.rest(i, n))));
        std::memcpy(out + i, lanes, std::min(8, n - i) * sizeof(float));
    }
}

// Rows [first, last) of a matrix; first is a multiple of 8.
static Matrix part_of(const Matrix& m, int first, int last) {
    Matrix part = m;
    part.data += packed_bytes(m.kind, 8, m.num_in) * (first / 8);
    part.num_out = last - first;
    if (m.bias) part.bias += first;
    return part;
}

struct ChoiceWork {
    int num_tokens, num_scores, rows, pieces;  // scores of a piece; pieces of a row
    const int32_t* ids;
    const Choice* choices;
    const float* scores;  // [T, N], or null where a head computes them
    float* kept;          // whole rows [N] of what a head computed, for the tokens that need them
    const int32_t* slots; // [T] which of these rows
    Best* bests;          // [pieces, T]
    float* own;           // [pieces, T] the score of the best one as it came in

    const Choice* choice(int t) const { return choices ? choices + t : nullptr; }
    const float* row(int t) const {
        return scores ? scores + static_cast<size_t>(t) * num_scores : kept + static_cast<size_t>(slots[t]) * num_scores;
    }
    // Scores `first` .. of all tokens, `stride` apart.
    void look(int piece, const float* from, size_t stride) const {
        const int first = piece * rows, n = std::min(rows, num_scores - first);
        for (int t = 0; t < num_tokens; t++, from += stride) {
            if (has_filter(choice(t))) {
                if (!scores) std::memcpy(kept + static_cast<size_t>(slots[t]) * num_scores + first, from, n * sizeof(float));
                continue;
            }
            const bool greedy = !choices || !(choices[t].temperature > 0);
            Best best = greedy ? greatest(from, n) : greatest_noisy(from, n, {ids, first}, choices[t], -INFINITY);
            const size_t at = static_cast<size_t>(piece) * num_tokens + t;
            own[at] = from[best.index];
            best.index += first;
            bests[at] = best;
        }
    }
    Chosen join(int t) const {
        if (has_filter(choice(t))) {
            const float* x = row(t);
            const Best best = greatest_noisy(x, num_scores, {ids, 0}, choices[t], least_kept(x, num_scores, choices[t]));
            return {best.index, x[best.index]};
        }
        int found = t;
        for (int piece = 1; piece < pieces; piece++)
            if (const int at = piece * num_tokens + t; !bests[found].stays(bests[at].score)) found = at;
        return {bests[found].index, own[found]};
    }
};

static ChoiceWork choice_work(const float* scores, int num_scores, const int32_t* ids, const Choice* choices,
                              int num_tokens) {
    static thread_local std::vector<Best> bests;
    static thread_local std::vector<int32_t> slots;
    Workspace& ws = workspace();
    ChoiceWork work = {};
    work.num_tokens = num_tokens, work.num_scores = num_scores, work.ids = ids, work.choices = choices;
    work.scores = scores;
    // As for any product; and what a piece computes for all tokens stays in the cache until it is looked at.
    constexpr int MOST_FLOATS = 1 << 15;
    const int per_thread = num_scores < 8192 ? 2 : 16;
    const int rows = padded(num_scores / (per_thread * get_threads()), 8);
    work.rows = std::max(64, std::min(rows, MOST_FLOATS / std::max(1, num_tokens) / 8 * 8));
    work.pieces = (num_scores + work.rows - 1) / work.rows;
    const size_t n = static_cast<size_t>(work.pieces) * num_tokens;
    if (bests.size() < n) bests.resize(n);
    work.bests = bests.data(), work.own = Workspace::floats(ws.narrow, n);
    slots.resize(num_tokens);
    int num_kept = 0;
    for (int t = 0; t < num_tokens; t++) slots[t] = has_filter(work.choice(t)) ? num_kept++ : 0;
    work.slots = slots.data();
    if (!scores) work.kept = Workspace::floats(ws.wide, static_cast<size_t>(num_kept) * num_scores);
    return work;
}

static void choose(const float* scores, int num_scores, const int32_t* ids, const Choice* choices, int num_tokens,
                   Chosen* out) {
    const ChoiceWork work = choice_work(scores, num_scores, ids, choices, num_tokens);
    parallel([=](Team& team) {
        team.run(work.pieces, [&](int piece) {
            work.look(piece, scores + static_cast<size_t>(piece) * work.rows, num_scores);
        });
        team.run(num_tokens, [&](int t) { out[t] = work.join(t); });
    });
}

static void head_choose(const Matrix& head, const float* x, const int32_t* ids, const Choice* choices, int num_tokens,
                        Chosen* out) {
    const ChoiceWork work = choice_work(nullptr, head.num_out, ids, choices, num_tokens);
    const Activations act = workspace().activations(num_tokens, groups_of(head));
    parallel([=](Team& team) {
        prepare_plain(team, head.num_in, x, num_tokens, act);
        team.run(work.pieces, [&](int piece) {
            static thread_local std::vector<float> tile;
            if (tile.size() < static_cast<size_t>(num_tokens) * work.rows)
                tile.resize(static_cast<size_t>(num_tokens) * work.rows);
            const int first = piece * work.rows, n = std::min(work.rows, work.num_scores - first);
            const size_t stride = work.rows;
            matmul_rows(part_of(head, first, first + n), 0, n, act, num_tokens, {tile.data(), stride, false});
            work.look(piece, tile.data(), stride);
        });
        team.run(num_tokens, [&](int t) { out[t] = work.join(t); });
    });
}
