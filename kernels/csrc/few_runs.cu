// LEO's inner loop: a cluster of blocks takes all steps of a task, each block a slice of the features.
//
// `closed_form.py` says what is computed, and is what every other device does; names are the same. Codes, logits and
// residuals are small, and every block has all of them. What is as wide as the features is only ever in slices, and
// S stays in registers for all steps. Blocks exchange what is summed over all features: logits, and gradients of codes.
//
// DIM / CLUSTER and LATENT are multiples of 16. A warp has sixteen features.

constexpr int CLUSTER = DIM % 64 == 0 ? 4 : DIM % 32 == 0 ? 2 : 1, THREADS = 2 * DIM / CLUSTER, RESIDENT = 1;

#include "slopes.cuh"

constexpr int SLICE = DIM / CLUSTER;
constexpr int SLOTS = LATENT_STEPS > FINETUNE_STEPS ? LATENT_STEPS : FINETUNE_STEPS;
constexpr int EIGHTS = (WAY + 7) / 8, ROOM = 8 * EIGHTS;  // classes in eights, as the products of a warp have them
constexpr int PADDED = (EXAMPLES + 7) / 8 * 8;
constexpr int OWN = 4 * EIGHTS;
constexpr int WIDE = SLICE + 16 - SLICE % 32, LONG = LATENT + 16 - LATENT % 32;  // rows begin in different banks
constexpr int SIXTEENTHS = LATENT / 16;

static_assert(DIM % 16 == 0 && THREADS <= 512, "how the features are cut");
static_assert(LATENT % 16 == 0 && LATENT <= 64, "a thread holds as many numbers of the decoder as a code has, three times");
static_assert(LATENT_STEPS > 0 && FINETUNE_STEPS > 0, "there are steps of both kinds");

__device__ inline int task() { return run() * clusters() + cluster(); }

// Rows of global memory into rows of shared memory; their width is a multiple of four.
__device__ inline void load_rows(float* to, int to_stride, const float* from, int from_stride, int rows, int width) {
    for (int i = thread(); i < rows * width / 4; i += THREADS) {
        int row = i / (width / 4), column = i % (width / 4) * 4;
        copy_four(to + row * to_stride + column, from + row * from_stride + column);
    }
}

__device__ inline void load(float* to, const float* from, int size) {
    for (int i = thread(); i < size; i += THREADS) to[i] = from[i];
}

// Products

// Of sixteen numbers that are summed over, a thread reads four. Their order does not matter, so they are four in a row.

// The weights that a thread looks after, as products lay them out: of two features, two classes of each eight.
struct Owner {
    __device__ int d(int j) const { return warp() * 16 + group() + j / 2 % 2 * 8; }
    __device__ int way(int j) const { return j / 4 * 8 + member() * 2 + j % 2; }
    __device__ bool has(int j) const { return way(j) < WAY; }
    __device__ int weight(int j) const { return way(j) * WIDE + d(j); }                   // in the slice
    __device__ int column(int j) const { return way(j) * DIM + rank() * SLICE + d(j); }  // in all features
};

// A thread's four numbers of row `first` + group; where there is no such row, of another one.
__device__ inline float4 four_of_row(const float* matrix, int first, int rows, int stride) {
    int row = first + group();
    return four(matrix + (row < rows ? row : rows - 1) * stride + member() * 4);
}

// sums += a bᵀ over sixteen columns: sixteen rows of a from one on, by eight of b.
__device__ inline void multiply_rows(
    float (&sums)[4], const float* a, int of_a, int a_rows, const float* b, int of_b, int b_rows, int stride
) {
    float4 upper = four_of_row(a, of_a, a_rows, stride), lower = four_of_row(a, of_a + 8, a_rows, stride);
    float4 right = four_of_row(b, of_b, b_rows, stride);
    float first[4] = {to_tf32(upper.x), to_tf32(lower.x), to_tf32(upper.y), to_tf32(lower.y)};
    float second[4] = {to_tf32(upper.z), to_tf32(lower.z), to_tf32(upper.w), to_tf32(lower.w)};
    multiply(sums, first, to_tf32(right.x), to_tf32(right.y));
    multiply(sums, second, to_tf32(right.z), to_tf32(right.w));
}

// Σ_e r[e][n] x[e][d] of the owner's weights; r has room for all eights of classes, and is zero beyond the examples.
__device__ inline void rows(const float* r, const float* x, float (&own)[OWN]) {
    int d = warp() * 16 + group();
#pragma unroll
    for (int j = 0; j < OWN; ++j) own[j] = 0;
#pragma unroll
    for (int first = 0; first < EXAMPLES; first += 8) {
        int e = first + member();
        const float *upper = x + (e < EXAMPLES ? e : 0) * WIDE + d, *lower = x + (e + 4 < EXAMPLES ? e + 4 : 0) * WIDE + d;
        float left[4] = {to_tf32(upper[0]), to_tf32(upper[8]), to_tf32(lower[0]), to_tf32(lower[8])};
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            const float* right = r + e * ROOM + eight * 8 + group();
            float sums[4] = {own[eight * 4], own[eight * 4 + 1], own[eight * 4 + 2], own[eight * 4 + 3]};
            multiply(sums, left, to_tf32(right[0]), to_tf32(right[4 * ROOM]));
#pragma unroll
            for (int j = 0; j < 4; ++j) own[eight * 4 + j] = sums[j];
        }
    }
}

// Half of the decoder in registers, laid out for codes times it, ...
struct Columns {
    float at[2 * SIXTEENTHS][4];

    __device__ void load(const float* decoder) {
        decoder += run() * LATENT * DIM + rank() * SLICE + warp() * 16 + group();
#pragma unroll
        for (int k = 0; k < 2 * SIXTEENTHS; ++k) {
            const float* from = decoder + (k / 2 * 16 + member() * 4 + k % 2 * 2) * DIM;
            at[k][0] = to_tf32(from[0]), at[k][1] = to_tf32(from[8]);
            at[k][2] = to_tf32(from[DIM]), at[k][3] = to_tf32(from[DIM + 8]);
        }
    }

    // The owner's weights.
    __device__ void times(const float* codes, float (&own)[OWN]) const {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            float sums[4] = {}, others[4] = {};
#pragma unroll
            for (int k = 0; k < SIXTEENTHS; ++k) {
                float4 code = four_of_row(codes + k * 16, eight * 8, WAY, LONG);
                multiply(sums, at[2 * k], to_tf32(code.x), to_tf32(code.y));
                multiply(others, at[2 * k + 1], to_tf32(code.z), to_tf32(code.w));
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) own[eight * 4 + j] = sums[j] + others[j];
        }
    }
};

// ... and for weights times its transpose.
struct Rows {
    float at[SIXTEENTHS][2][4];

    __device__ void load(const float* decoder) {
        decoder += run() * LATENT * DIM + rank() * SLICE + warp() * 16 + member() * 4;
#pragma unroll
        for (int m = 0; m < SIXTEENTHS; ++m) {
            float4 upper = four(decoder + (m * 16 + group()) * DIM), lower = four(decoder + (m * 16 + group() + 8) * DIM);
            at[m][0][0] = to_tf32(upper.x), at[m][0][1] = to_tf32(lower.x);
            at[m][0][2] = to_tf32(upper.y), at[m][0][3] = to_tf32(lower.y);
            at[m][1][0] = to_tf32(upper.z), at[m][1][1] = to_tf32(lower.z);
            at[m][1][2] = to_tf32(upper.w), at[m][1][3] = to_tf32(lower.w);
        }
    }

    // sums of sixteen latent dimensions += this warp's part of Σ_d u[n][d] S[l][d]
    __device__ void times(const float* u, int eight, int m, float (&sums)[4]) const {
        float4 four_u = four_of_row(u + warp() * 16, eight * 8, WAY, WIDE);
        multiply(sums, at[m][0], to_tf32(four_u.x), to_tf32(four_u.y));
        multiply(sums, at[m][1], to_tf32(four_u.z), to_tf32(four_u.w));
    }
};

// Sums over the blocks of a cluster. Two inboxes, in turn: whoever sends to one for the second time has had an answer to
// the first.
struct Exchange {
    Inbox inboxes[2];
    Array<CLUSTER * (PAIRS > CODES ? PAIRS : CODES)> parts[2];

    __device__ void open() {
        if (thread() == 0) inboxes[0].open(), inboxes[1].open();
    }
    __device__ void send(int turn, int i, int size, float value) {
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block)
            inboxes[turn % 2].send(block, parts[turn % 2].at + rank() * size + i, value);
    }
    __device__ void wait(int turn, int size) { inboxes[turn % 2].receive(CLUSTER * size, turn / 2); }

    __device__ float total(int turn, int i, int size) {
        float sum = 0;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) sum += parts[turn % 2][block * size + i];
        return sum;
    }
};

struct Shared {
    Array<SLOTS * EXAMPLES * WIDE> inputs;  // of the latent steps, or of fine-tuning
    Array<LATENT_STEPS * EXAMPLES * LONG> projected;
    Array<WAY * LONG> code;         // or its gradient
    Array<WAY * LONG> of_gradient;  // backward
    Array<CODES> of_step_size;      // backward
    Array<WAY * WIDE> weights;      // or what goes the same way
    Array<WAY * WIDE> decoded;      // backward: gradient
    Array<STEPS * PAIRS> probabilities;
    Array<PADDED * ROOM> residuals;
    Array<PADDED * ROOM> of_logits;  // backward
    Array<WARPS * (LATENT > EXAMPLES ? LATENT : EXAMPLES) * ROOM> of_warps;
    Array<PAIRS> targets;
    Array<EXAMPLES> share;
    Array<LATENT> step_size;
    Exchange exchange;

    __device__ float* inputs_at(int step) { return inputs.at + step * EXAMPLES * WIDE; }
    __device__ float* projected_at(int step) { return projected.at + step * EXAMPLES * LONG; }

    __device__ void load_inputs(const float* from, int step, int steps) {
        from += (task() * steps + step) * EXAMPLES * DIM + rank() * SLICE;
        load_rows(inputs_at(step), WIDE, from, DIM, EXAMPLES, SLICE);
    }
    __device__ void begin(const float* of_targets, const float* of_share, const float* of_step_size, const float* from) {
        exchange.open();
        load(targets.at, of_targets + task() * PAIRS, PAIRS);
        load(share.at, of_share + task() * EXAMPLES, EXAMPLES);
        load(step_size.at, of_step_size + run() * LATENT, LATENT);
        from += task() * LATENT_STEPS * EXAMPLES * LATENT;
        load_rows(projected.at, LONG, from, LATENT, LATENT_STEPS * EXAMPLES, LATENT);
        for (int i = thread(); i < PADDED * ROOM; i += THREADS) residuals[i] = 0, of_logits[i] = 0;
    }

    // This block's part of Σ_d x[e][d] a[n][d], and with codes of Σ_l p[e][l] b[n][l], to all blocks of the cluster.
    __device__ void send_dots(int turn, const float* x, const float* p = nullptr, const float* b = nullptr) {
#pragma unroll
        for (int first = 0; first < EXAMPLES; first += 16)
#pragma unroll
            for (int eight = 0; eight < EIGHTS; ++eight) {
                float sums[4] = {};
                multiply_rows(sums, x + warp() * 16, first, EXAMPLES, weights.at + warp() * 16, eight * 8, WAY, WIDE);
                if (p)
                    for (int l = (warp() * CLUSTER + rank()) * 16; l < LATENT; l += WARPS * CLUSTER * 16)
                        multiply_rows(sums, p + l, first, EXAMPLES, b + l, eight * 8, WAY, LONG);
                int e = first + group();
                float* to = of_warps.at + (warp() * EXAMPLES + e) * ROOM + eight * 8 + member() * 2;
                if (e < EXAMPLES) *reinterpret_cast<float2*>(to) = {sums[0], sums[1]};
                if (e + 8 < EXAMPLES) *reinterpret_cast<float2*>(to + 8 * ROOM) = {sums[2], sums[3]};
            }
        block_sync();
        for (int i = thread(); i < PAIRS; i += THREADS) {
            float sum = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) sum += of_warps[(other * EXAMPLES + i / WAY) * ROOM + i % WAY];
            exchange.send(turn, i % WAY * EXAMPLES + i / WAY, PAIRS, sum);
        }
    }

    // This block's part of Σ_d u[n][d] S[l][d], `times` giving those of a warp, and with inputs of Σ_e r[e][n] p[e][l].
    template <class Times>
    __device__ void send_codes(int turn, Times times, const float* r = nullptr, const float* p = nullptr) {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight)
#pragma unroll
            for (int m = 0; m < SIXTEENTHS; ++m) {
                float sums[4] = {};
                times(eight, m, sums);
                float* to = of_warps.at + (warp() * LATENT + m * 16 + group()) * ROOM + eight * 8 + member() * 2;
                *reinterpret_cast<float2*>(to) = {sums[0], sums[1]};
                *reinterpret_cast<float2*>(to + 8 * ROOM) = {sums[2], sums[3]};
            }
        block_sync();
        for (int i = thread(); i < CODES; i += THREADS) {
            int l = i / WAY, n = i % WAY;
            float sum = 0;
#pragma unroll
            for (int other = 0; other < WARPS; ++other) sum += of_warps[(other * LATENT + l) * ROOM + n];
            if (p)
                for (int e = rank(); e < EXAMPLES; e += CLUSTER) sum = fmaf(r[e * ROOM + n], p[e * LONG + l], sum);
            exchange.send(turn, n * LATENT + l, CODES, sum);
        }
    }

    __device__ float residual(float probability, int n, int e) {
        return share[e] * (probability - targets[n * EXAMPLES + e]);
    }

    // Residuals from probabilities.
    __device__ void remember(int step) {
        for (int i = thread(); i < PAIRS; i += THREADS) {
            int n = i / EXAMPLES, e = i % EXAMPLES;
            residuals[e * ROOM + n] = residual(probabilities[step * PAIRS + i], n, e);
        }
    }

    // Probabilities and residuals of the logits, once they have come.
    __device__ void softmax(int turn, int step) {
        exchange.wait(turn, PAIRS);
        for (int first = 0; first < EXAMPLES; first += THREADS / GROUP) {
            int e = first + thread() / GROUP;
            float logits[EIGHTS];
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                logits[j] = e < EXAMPLES && n < WAY ? exchange.total(turn, n * EXAMPLES + e, PAIRS) : -3e38f;
            }
            float total = log_total(logits);
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                if (e >= EXAMPLES || n >= WAY) continue;
                float probability = fast_exp(logits[j] - total);
                residuals[e * ROOM + n] = residual(probability, n, e);
                probabilities[step * PAIRS + n * EXAMPLES + e] = probability;
            }
        }
        block_sync();
    }

    // ∂/∂logits from ∂/∂residuals, once they have come.
    __device__ void softmax_backward(int turn, int step, float* of_logits_out) {
        exchange.wait(turn, PAIRS);
        for (int first = 0; first < EXAMPLES; first += THREADS / GROUP) {
            int e = first + thread() / GROUP;
            float gradient[EIGHTS], probability[EIGHTS], mean = 0;
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP, i = n * EXAMPLES + e;
                bool own = e < EXAMPLES && n < WAY;
                gradient[j] = own ? share[e] * exchange.total(turn, i, PAIRS) : 0;
                probability[j] = own ? probabilities[step * PAIRS + i] : 0;
                mean += probability[j] * gradient[j];
            }
            mean = sum_of_eight(mean);
#pragma unroll
            for (int j = 0; j < EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                if (e >= EXAMPLES || n >= WAY) continue;
                float value = probability[j] * (gradient[j] - mean);
                of_logits[e * ROOM + n] = value;
                if (rank() == 0) of_logits_out[(task() * STEPS + step) * PAIRS + n * EXAMPLES + e] = value;
            }
        }
        block_sync();
    }
};

constexpr int SHARED_BYTES = sizeof(Shared);

// Where a code's number is in shared memory.
__device__ inline int code_at(int i) { return i / LATENT * LONG + i % LATENT; }

// z ← z - α ∘ ∇L(zM + σ(zS) ∘ ε), then θ = zM + σ(zS) ∘ ε, then θ ← θ - α ∘ ∇L(θ)
KERNEL adapt_forward(
    const float* code, const float* to_mean, const float* to_raw_scale, const float* latent_step_size,
    const float* finetune_step_size, const float* latent_inputs, const float* finetune_inputs, const float* projected,
    const float* noise, const float* targets, const float* share,  // results follow
    float* adapted, float* decoded, float* tuned, float* codes, float* gradients, float* probabilities,
    float* raw
) {
    SHARED(Shared, shared);
    Owner owner;
    Columns mean_columns, columns;
    Rows matrix_rows;
    float own[OWN], slope[OWN], noise_now[OWN], step_sizes[2];
    int turn = 0;
    const float* own_noise = noise + task() * (LATENT_STEPS + 1) * WAY * DIM;
    float* own_raw = raw + task() * (LATENT_STEPS + 1) * WAY * DIM;

    shared.begin(targets, share, latent_step_size, projected);
    for (int step = 0; step < LATENT_STEPS; ++step) shared.load_inputs(latent_inputs, step, LATENT_STEPS);
    for (int step = LATENT_STEPS; step < FINETUNE_STEPS; ++step) shared.load_inputs(finetune_inputs, step, FINETUNE_STEPS);
    for (int i = thread(); i < CODES; i += THREADS) shared.code[code_at(i)] = code[task() * CODES + i];
    columns.load(to_raw_scale);
    matrix_rows.load(to_raw_scale);
    mean_columns.load(to_mean);
    for (int k = 0; k < 2; ++k)
        step_sizes[k] = finetune_step_size[run() * DIM + rank() * SLICE + owner.d(2 * k)];
#pragma unroll
    for (int j = 0; j < OWN; ++j) noise_now[j] = owner.has(j) ? own_noise[owner.column(j)] : 0;
    copies_done();
    cluster_sync();  // all inboxes are open

#pragma unroll 1
    for (int step = 0; step < LATENT_STEPS; ++step) {
        const float *x = shared.inputs_at(step), *p = shared.projected_at(step);
        columns.times(shared.code.at, own);
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            Slopes s = slopes(own[j]);
            slope[j] = s.slope * noise_now[j];
            if (!owner.has(j)) continue;
            shared.weights[owner.weight(j)] = s.scale * noise_now[j];
            own_raw[step * WAY * DIM + owner.column(j)] = own[j];
            noise_now[j] = own_noise[(step + 1) * WAY * DIM + owner.column(j)];  // ahead of its use
        }
        block_sync();
        shared.send_dots(turn, x, p, shared.code.at);
        shared.softmax(turn++, step);
        rows(shared.residuals.at, x, own);
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            if (owner.has(j)) shared.weights[owner.weight(j)] = own[j] * slope[j];
        block_sync();
        auto times = [&](int eight, int m, float(&sums)[4]) { matrix_rows.times(shared.weights.at, eight, m, sums); };
        shared.send_codes(turn, times, shared.residuals.at, p);
        if (step < FINETUNE_STEPS) shared.load_inputs(finetune_inputs, step, FINETUNE_STEPS);  // these were read
        shared.exchange.wait(turn, CODES);
        for (int i = thread(); i < CODES; i += THREADS) {
            float gradient = shared.exchange.total(turn, i, CODES), code_now = shared.code[code_at(i)];
            int at = (task() * LATENT_STEPS + step) * CODES + i;
            if (rank() == 0) codes[at] = code_now, gradients[at] = gradient;
            shared.code[code_at(i)] = code_now - shared.step_size[i % LATENT] * gradient;
        }
        ++turn;
        block_sync();
    }

    float means[OWN];
    columns.times(shared.code.at, own);
    mean_columns.times(shared.code.at, means);
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        if (owner.has(j)) own_raw[LATENT_STEPS * WAY * DIM + owner.column(j)] = own[j];
        own[j] = means[j] + slopes(own[j]).scale * noise_now[j];
        if (owner.has(j)) decoded[task() * WAY * DIM + owner.column(j)] = own[j];
    }
    copies_done();

#pragma unroll 1
    for (int step = 0; step < FINETUNE_STEPS; ++step) {
        const float* x = shared.inputs_at(step);
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            if (owner.has(j)) shared.weights[owner.weight(j)] = own[j];
        block_sync();
        shared.send_dots(turn, x);
        shared.softmax(turn++, LATENT_STEPS + step);
        rows(shared.residuals.at, x, means);
#pragma unroll
        for (int j = 0; j < OWN; ++j) own[j] -= step_sizes[j / 2 % 2] * means[j];
    }

#pragma unroll
    for (int j = 0; j < OWN; ++j)
        if (owner.has(j)) tuned[task() * WAY * DIM + owner.column(j)] = own[j];
    if (rank() > 0) return;
    for (int i = thread(); i < CODES; i += THREADS) adapted[task() * CODES + i] = shared.code[code_at(i)];
    for (int i = thread(); i < STEPS * PAIRS; i += THREADS)
        probabilities[task() * STEPS * PAIRS + i] = shared.probabilities[i];
}

KERNEL adapt_backward(
    const float* to_mean, const float* to_raw_scale, const float* latent_step_size, const float* finetune_step_size,
    const float* latent_inputs, const float* finetune_inputs, const float* projected, const float* noise,
    const float* targets, const float* share, const float* gradients, const float* probabilities, const float* raw,
    const float* of_adapted, const float* of_decoded, const float* of_tuned,  // results follow
    float* of_code, float* of_latent_step_size, float* of_finetune_step_size, float* of_gradients, float* of_logits,
    float* rights, float* of_means
) {
    SHARED(Shared, shared);
    Owner owner;
    Columns columns;
    Rows mean_rows, matrix_rows;
    float own[OWN], sums[OWN], raw_now[OWN], noise_now[OWN], step_sizes[2], of_step_sizes[2] = {};
    int turn = 0;
    const float* own_noise = noise + task() * (LATENT_STEPS + 1) * WAY * DIM;
    const float* own_raw = raw + task() * (LATENT_STEPS + 1) * WAY * DIM;
    float* own_rights = rights + task() * (2 * LATENT_STEPS + 1) * WAY * DIM;

    shared.begin(targets, share, latent_step_size, projected);
    for (int step = 0; step < FINETUNE_STEPS; ++step) shared.load_inputs(finetune_inputs, step, FINETUNE_STEPS);
    for (int step = FINETUNE_STEPS; step < LATENT_STEPS; ++step) shared.load_inputs(latent_inputs, step, LATENT_STEPS);
    load(shared.probabilities.at, probabilities + task() * STEPS * PAIRS, STEPS * PAIRS);
    for (int i = thread(); i < CODES; i += THREADS) {
        shared.code[code_at(i)] = of_adapted[task() * CODES + i];
        shared.of_step_size[i] = 0;
    }
    columns.load(to_raw_scale);
    matrix_rows.load(to_raw_scale);
    mean_rows.load(to_mean);
    for (int k = 0; k < 2; ++k)
        step_sizes[k] = finetune_step_size[run() * DIM + rank() * SLICE + owner.d(2 * k)];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        own[j] = owner.has(j) ? of_tuned[task() * WAY * DIM + owner.column(j)] : 0;
        raw_now[j] = owner.has(j) ? own_raw[LATENT_STEPS * WAY * DIM + owner.column(j)] : 0;
        noise_now[j] = owner.has(j) ? own_noise[LATENT_STEPS * WAY * DIM + owner.column(j)] : 0;
    }
    copies_done();
    cluster_sync();

#pragma unroll 1
    for (int step = FINETUNE_STEPS - 1; step >= 0; --step) {
        const float* x = shared.inputs_at(step);
        shared.remember(LATENT_STEPS + step);
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            if (owner.has(j)) shared.weights[owner.weight(j)] = -step_sizes[j / 2 % 2] * own[j];
        block_sync();
        if (step + 1 < FINETUNE_STEPS && step + 1 < LATENT_STEPS)  // these were read
            shared.load_inputs(latent_inputs, step + 1, LATENT_STEPS);
        shared.send_dots(turn, x);
        rows(shared.residuals.at, x, sums);
#pragma unroll
        for (int j = 0; j < OWN; ++j)
            if (owner.has(j)) of_step_sizes[j / 2 % 2] -= own[j] * sums[j];
        shared.softmax_backward(turn++, LATENT_STEPS + step, of_logits);
        rows(shared.of_logits.at, x, sums);
#pragma unroll
        for (int j = 0; j < OWN; ++j) own[j] += sums[j];
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        float sum = of_step_sizes[k] + shuffle_xor(of_step_sizes[k], 1);
        sum += shuffle_xor(sum, 2);
        if (member() == 0) of_finetune_step_size[task() * DIM + rank() * SLICE + owner.d(2 * k)] = sum;
    }

#pragma unroll
    for (int j = 0; j < OWN; ++j) {
        if (!owner.has(j)) continue;
        own[j] += of_decoded[task() * WAY * DIM + owner.column(j)];
        float of_raw = own[j] * slopes(raw_now[j]).slope * noise_now[j];
        shared.decoded[owner.weight(j)] = own[j];
        shared.weights[owner.weight(j)] = of_raw;
        of_means[task() * WAY * DIM + owner.column(j)] = own[j];
        own_rights[2 * LATENT_STEPS * WAY * DIM + owner.column(j)] = of_raw;
        raw_now[j] = own_raw[(LATENT_STEPS - 1) * WAY * DIM + owner.column(j)];
        noise_now[j] = own_noise[(LATENT_STEPS - 1) * WAY * DIM + owner.column(j)];
    }
    block_sync();
    if (FINETUNE_STEPS > 0) shared.load_inputs(latent_inputs, 0, LATENT_STEPS);
    auto of_both = [&](int eight, int m, float(&sums)[4]) {
        mean_rows.times(shared.decoded.at, eight, m, sums);
        matrix_rows.times(shared.weights.at, eight, m, sums);
    };
    shared.send_codes(turn, of_both);
    shared.exchange.wait(turn, CODES);
    for (int i = thread(); i < CODES; i += THREADS) shared.code[code_at(i)] += shared.exchange.total(turn, i, CODES);
    ++turn;
    copies_done();

#pragma unroll 1
    for (int step = LATENT_STEPS - 1; step >= 0; --step) {
        const float *x = shared.inputs_at(step), *p = shared.projected_at(step);
        float back[OWN], slope[OWN], rest[OWN];
        for (int i = thread(); i < CODES; i += THREADS) {
            int at = (task() * LATENT_STEPS + step) * CODES + i;
            float of_code_now = shared.code[code_at(i)], of_gradient = -shared.step_size[i % LATENT] * of_code_now;
            shared.of_gradient[code_at(i)] = of_gradient;
            shared.of_step_size[i] -= of_code_now * gradients[at];
            if (rank() == 0) of_gradients[at] = of_gradient;
        }
        shared.remember(step);
        block_sync();
        columns.times(shared.of_gradient.at, back);
        rows(shared.residuals.at, x, sums);
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            Slopes s = slopes(raw_now[j]);
            slope[j] = s.slope * noise_now[j];
            rest[j] = back[j] * sums[j] * s.bend * noise_now[j];
            if (!owner.has(j)) continue;
            shared.weights[owner.weight(j)] = back[j] * slope[j];
            own_rights[2 * step * WAY * DIM + owner.column(j)] = sums[j] * slope[j];
            if (step == 0) continue;
            raw_now[j] = own_raw[(step - 1) * WAY * DIM + owner.column(j)];  // ahead of their use
            noise_now[j] = own_noise[(step - 1) * WAY * DIM + owner.column(j)];
        }
        block_sync();
        shared.send_dots(turn, x, p, shared.of_gradient.at);
        shared.softmax_backward(turn++, step, of_logits);
        rows(shared.of_logits.at, x, sums);
#pragma unroll
        for (int j = 0; j < OWN; ++j) {
            if (!owner.has(j)) continue;
            float of_raw = rest[j] + sums[j] * slope[j];
            shared.weights[owner.weight(j)] = of_raw;
            own_rights[(2 * step + 1) * WAY * DIM + owner.column(j)] = of_raw;
        }
        block_sync();
        auto times = [&](int eight, int m, float(&sums)[4]) { matrix_rows.times(shared.weights.at, eight, m, sums); };
        shared.send_codes(turn, times, shared.of_logits.at, p);
        shared.exchange.wait(turn, CODES);
        for (int i = thread(); i < CODES; i += THREADS) shared.code[code_at(i)] += shared.exchange.total(turn, i, CODES);
        ++turn;
    }
    if (rank() > 0) return;
    for (int i = thread(); i < CODES; i += THREADS) {
        of_code[task() * CODES + i] = shared.code[code_at(i)];
        of_latent_step_size[task() * CODES + i] = shared.of_step_size[i];
    }
}

HANDLER(PROBLEM(few_runs_forward), adapt_forward, tasks)
HANDLER(PROBLEM(few_runs_backward), adapt_backward, tasks)
