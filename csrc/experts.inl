// A mixture of experts in place of an MLP. Part of kernels.inl.

// Unit of work after routing: some tokens, one after another in `act`, times a matrix.
struct Job {
    Matrix matrix;
    Activations act;
    int num_tokens;
    Output out;
};
struct JobPiece {
    int job, first, last;  // rows of the matrix
};

struct ExpertsWorkspace {  // of the calling thread, beside the common one
    Codes sorted, inner, shared;
    std::vector<float> normed, logits, weights, outputs, shared_outputs;
    std::vector<int32_t> ids, places, tokens, starts;
    std::vector<Job> first_jobs, second_jobs;
    std::vector<JobPiece> first_pieces, second_pieces;
};

static ExpertsWorkspace& experts_workspace() {
    static thread_local ExpertsWorkspace instance;
    return instance;
}

static float dot(const float* a, const float* b, int size) {
    f32x8 sums[4] = {all(0), all(0), all(0), all(0)};
    int i = 0;
    for (; i + 32 <= size; i += 32)
        times<4>(EACH(v) { sums[v] = fma(load(a + i + 8 * v), load(b + i + 8 * v), sums[v]); });
    for (; i + 8 <= size; i += 8) sums[0] = fma(load(a + i), load(b + i), sums[0]);
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < size; i++) total += a[i] * b[i];
    return total;
}

// A product with a matrix of floats [N, K], as a phase: for few outputs.
static void float_matmul(Team& team, const float* matrix, int num_out, int num_in, const float* x, int num_tokens,
                         float* out, size_t stride) {
    const int per_piece = 8;
    team.run((num_out + per_piece - 1) / per_piece, [&](int piece) {
        const int last = std::min(num_out, (piece + 1) * per_piece);
        for (int t = 0; t < num_tokens; t++)
            for (int n = piece * per_piece; n < last; n++)
                out[t * stride + n] =
                    dot(matrix + static_cast<size_t>(n) * num_in, x + static_cast<size_t>(t) * num_in, num_in);
    });
}

// As prepare_normed, and keeps the floats.
static void prepare_kept(Team& team, const float* norm, float eps, int size, const float* x, int num_tokens, float* normed,
                         const Activations& to) {
    prepare(team, num_tokens, to, [&](int t, float* row) {
        normalise(norm, eps, size, x + static_cast<size_t>(t) * size, row);
        std::memcpy(normed + static_cast<size_t>(t) * size, row, size * sizeof(float));
    });
}

// The experts of a token: the largest logits (of equal ones the first), in ascending order of ids, with the weights of
// a softmax. What else is routed does not matter; ids are valid even if logits are NaN.
static void route(const float* logits, int num_experts, int num_active, bool normalised, int32_t* ids, float* weights) {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<char> taken;
    scores.assign(padded(num_experts, 8), HIDDEN);
    taken.assign(num_experts, 0);
    std::memcpy(scores.data(), logits, num_experts * sizeof(float));
    f32x8 largest = all(HIDDEN), sums = all(0);
    for (size_t i = 0; i < scores.size(); i += 8) largest = max(largest, load(&scores[i]));
    const f32x8 best = all(max_of(largest));
    for (size_t i = 0; i < scores.size(); i += 8) {
        const f32x8 x = load(&scores[i]);
        const f32x8 score = where_less(x, all(HIDDEN / 2), all(0), exp(x - best));
        store(&scores[i], score);
        sums = sums + score;
    }
    float chosen = 0;
    for (int n = 0; n < num_active; n++) {
        int next = -1;
        for (int e = 0; e < num_experts; e++)
            if (!taken[e] && (next < 0 || logits[e] > logits[next])) next = e;
        taken[next] = 1;
        chosen += scores[next];
    }
    const float total = normalised ? chosen : sum(sums);
    for (int e = 0, n = 0; e < num_experts; e++)
        if (taken[e]) ids[n] = e, weights[n] = scores[e] / total, n++;
}

static Activations from_token(const Activations& act, int token) {
    const size_t at = static_cast<size_t>(token) * act.groups;
    return {act.codes + 32 * at, act.scales + at, act.weighted + at, act.sums + at, act.groups};
}

static void copy_token(const Activations& from, int token, const Activations& to, int place) {
    const Activations a = from_token(from, token), b = from_token(to, place);
    std::memcpy(b.codes, a.codes, 32 * static_cast<size_t>(a.groups));
    std::memcpy(b.scales, a.scales, a.groups * sizeof(float));
    std::memcpy(b.weighted, a.weighted, a.groups * sizeof(float));
    std::memcpy(b.sums, a.sums, a.groups * sizeof(int32_t));
}

static void cut_jobs(const std::vector<Job>& jobs, std::vector<JobPiece>& pieces) {
    int total_rows = 0;
    for (const Job& job : jobs) total_rows += job.matrix.num_out;
    const int rows = rows_per_piece(total_rows);
    pieces.clear();
    for (size_t j = 0; j < jobs.size(); j++)
        for (int first = 0, num_out = jobs[j].matrix.num_out; first < num_out; first += rows)
            pieces.push_back({static_cast<int>(j), first, std::min(num_out, first + rows)});
}

static void run_jobs(Team& team, const Job* jobs, const JobPiece* pieces, int num_pieces) {
    team.run(num_pieces, [&](int i) {
        const Job& job = jobs[pieces[i].job];
        matmul_rows(job.matrix, pieces[i].first, pieces[i].last, job.act, job.num_tokens, job.out);
    });
}

static Matrix of_expert(Matrix first, int expert) {
    first.data += expert * packed_bytes(first.kind, first.num_out, first.num_in);
    return first;
}

// Tokens are sorted by expert, so that an expert's matrices are read once for all of its tokens. Each token's outputs
// lie apart until they are added up in the order of experts: so it does not matter who else went to them.
static void experts_half(const ExpertsHalf& half, float* x, int num_tokens) {
    const int size = half.gate.num_in, width = half.down.num_in, num_experts = half.num_experts, active = half.num_active;
    const int shared_width = half.shared_router ? half.shared_down.num_in : 0, num_sorted = num_tokens * active;
    ExpertsWorkspace& ws = experts_workspace();
    const auto floats = [](std::vector<float>& v, size_t n) { return Workspace::floats(v, n); };
    const auto ints = [](std::vector<int32_t>& v, size_t n) { return v.resize(std::max(v.size(), n)), v.data(); };
    const Activations act = workspace().activations(num_tokens, groups_of(half.gate));
    float* normed = floats(ws.normed, static_cast<size_t>(num_tokens) * size);
    float* logits = floats(ws.logits, static_cast<size_t>(num_tokens) * (num_experts + 1));
    float* weights = floats(ws.weights, static_cast<size_t>(num_tokens) * (active + 1));  // the last is the shared expert's
    int32_t* ids = ints(ws.ids, num_sorted);
    parallel([=](Team& team) {
        prepare_kept(team, half.norm, half.eps, size, x, num_tokens, normed, act);
        float_matmul(team, half.router, num_experts, size, normed, num_tokens, logits, num_experts);
        team.run(num_tokens, [&](int t) {
            float* own = weights + static_cast<size_t>(t) * (active + 1);
            route(logits + static_cast<size_t>(t) * num_experts, num_experts, active, half.normalised, ids + t * active, own);
            if (half.shared_router)
                own[active] = 1 / (1 + exp1(-dot(half.shared_router, normed + static_cast<size_t>(t) * size, size)));
        });
    });

    int32_t* starts = ints(ws.starts, num_experts + 1);  // of each expert's tokens among the sorted
    int32_t* places = ints(ws.places, num_sorted);       // of each token's experts among the sorted
    int32_t* tokens = ints(ws.tokens, num_sorted);
    std::fill(starts, starts + num_experts + 1, 0);
    for (int i = 0; i < num_sorted; i++) starts[ids[i] + 1]++;
    for (int e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
    for (int i = 0; i < num_sorted; i++) places[i] = starts[ids[i]]++, tokens[places[i]] = i / active;
    for (int e = num_experts; e > 0; e--) starts[e] = starts[e - 1];
    starts[0] = 0;

    const Activations sorted = ws.sorted.of(num_sorted, act.groups);
    const Activations inner = ws.inner.of(num_sorted, groups_of(half.down));
    float* wide = floats(workspace().wide, static_cast<size_t>(num_sorted) * 2 * width);
    float* outputs = floats(ws.outputs, static_cast<size_t>(num_sorted) * size);
    ws.first_jobs.clear(), ws.second_jobs.clear();
    for (int e = 0; e < num_experts; e++) {
        const int start = starts[e], count = starts[e + 1] - start;
        if (!count) continue;
        const size_t stride = 2 * static_cast<size_t>(width), out_stride = size;
        const Activations own = from_token(sorted, start), own_inner = from_token(inner, start);
        float* to = wide + start * stride;
        ws.first_jobs.push_back({of_expert(half.gate, e), own, count, {to, stride, false}});
        ws.first_jobs.push_back({of_expert(half.up, e), own, count, {to + width, stride, false}});
        ws.second_jobs.push_back({of_expert(half.down, e), own_inner, count, {outputs + start * out_stride, out_stride, false}});
    }
    Activations shared_inner = {};
    float *shared_wide = nullptr, *shared_out = nullptr;
    if (shared_width) {
        shared_inner = ws.shared.of(num_tokens, groups_of(half.shared_down));
        shared_wide = floats(workspace().narrow, static_cast<size_t>(num_tokens) * 2 * shared_width);
        shared_out = floats(ws.shared_outputs, static_cast<size_t>(num_tokens) * size);
        const size_t stride = 2 * static_cast<size_t>(shared_width);
        ws.first_jobs.push_back({half.shared_gate, act, num_tokens, {shared_wide, stride, false}});
        ws.first_jobs.push_back({half.shared_up, act, num_tokens, {shared_wide + shared_width, stride, false}});
        ws.second_jobs.push_back({half.shared_down, shared_inner, num_tokens, {shared_out, static_cast<size_t>(size), false}});
    }
    cut_jobs(ws.first_jobs, ws.first_pieces), cut_jobs(ws.second_jobs, ws.second_pieces);
    const Job *first_jobs = ws.first_jobs.data(), *second_jobs = ws.second_jobs.data();
    const JobPiece *first_pieces = ws.first_pieces.data(), *second_pieces = ws.second_pieces.data();
    const int num_first = static_cast<int>(ws.first_pieces.size()), num_second = static_cast<int>(ws.second_pieces.size());
    parallel([=](Team& team) {
        const int per_piece = 16;
        team.run((num_sorted + per_piece - 1) / per_piece, [&](int piece) {
            const int last = std::min(num_sorted, (piece + 1) * per_piece);
            for (int place = piece * per_piece; place < last; place++) copy_token(act, tokens[place], sorted, place);
        });
        run_jobs(team, first_jobs, first_pieces, num_first);
        prepare(team, num_sorted, inner, [&](int place, float* row) {
            const float* gate = wide + static_cast<size_t>(place) * 2 * width;
            swiglu(gate, gate + width, width, row);
        });
        prepare(team, shared_width ? num_tokens : 0, shared_inner, [&](int t, float* row) {
            const float* gate = shared_wide + static_cast<size_t>(t) * 2 * shared_width;
            swiglu(gate, gate + shared_width, shared_width, row);
        });
        run_jobs(team, second_jobs, second_pieces, num_second);
        team.run(num_tokens, [&](int t) {
            const float* own = weights + static_cast<size_t>(t) * (active + 1);
            const int32_t* at = places + static_cast<size_t>(t) * active;
            float* to = x + static_cast<size_t>(t) * size;
            const auto sum_at = [&](int i, auto read, auto every) {
                auto total = every(0.0f);
                for (int n = 0; n < active; n++)
                    total = total + every(own[n]) * read(outputs + static_cast<size_t>(at[n]) * size + i);
                if (shared_width) total = total + every(own[active]) * read(shared_out + static_cast<size_t>(t) * size + i);
                return read(to + i) + total;
            };
            int i = 0;
            for (; i + 8 <= size; i += 8) store(to + i, sum_at(i, [](const float* p) { return load(p); }, all));
            for (; i < size; i++) to[i] = sum_at(i, [](const float* p) { return *p; }, [](float a) { return a; });
        });
    });
}
