// LEO's inner loop where the GPU is full: a block takes several tasks of a learner, and has all of S in shared memory.
//
// `few_runs.cu` hurries, this wastes nothing: results and names are the same. A product has sixteen rows, one for each
// class of TOGETHER tasks, and what is as wide as the features stays in registers (`weights.cuh`). Threads exchange sums
// over all features: logits, and gradients of codes.
//
// Also constant: TOGETHER, and PASSES, how often a block does that. LATENT is a multiple of 8.

constexpr int SEEN = TOGETHER * EXAMPLES, SEEN_EIGHTS = (SEEN + 7) / 8;
constexpr int PARTS = (TASKS + TOGETHER - 1) / TOGETHER, BLOCKS = (PARTS + PASSES - 1) / PASSES;  // for a learner's tasks
constexpr int LATENT_EIGHTS = LATENT / 8, CODE_SHARE = (ROWS * LATENT + THREADS - 1) / THREADS;
constexpr int WAY_EIGHTS = (WAY + 7) / 8;
constexpr bool STAGED = SEEN <= ROWS;  // inputs are brought to shared memory ahead of their use, where there is room
// of rows in shared memory, which so begin in different banks
constexpr int TWOS = (DIM + 8) / 2, WIDE = DIM + 4, LONG = LATENT + 8, OF_WARP = LATENT + 4, BROAD = 8 * SEEN_EIGHTS + 8;
constexpr int OF_LOGITS = SEEN * WAY, OF_CODES = ROWS * OF_WARP;

static_assert(TOGETHER * WAY <= ROWS, "how the tasks are cut");

__device__ inline int learner() { return cluster() / BLOCKS; }

// Which tasks these are; in the last passes there may be fewer of them, or none.
struct Place {
    int first, tasks;

    __device__ Place(int pass) {
        int skipped = (cluster() % BLOCKS * PASSES + pass) * TOGETHER, left = TASKS - skipped;
        first = learner() * TASKS + skipped, tasks = left < TOGETHER ? left : TOGETHER;
    }

    __device__ bool has(int row) const { return row < tasks * WAY; }
    __device__ bool sees(int example) const { return example < tasks * EXAMPLES; }

    // Where a row is in arrays over tasks, steps and classes, an example in those of examples; of others, the first.
    __device__ int row(int n, int steps, int step) const {
        n = has(n) ? n : 0;
        return ((first + n / WAY) * steps + step) * WAY + n % WAY;
    }
    __device__ int example(int e, int steps, int step) const {
        e = sees(e) ? e : 0;
        return ((first + e / EXAMPLES) * steps + step) * EXAMPLES + e % EXAMPLES;
    }

    __device__ void read(const float* from, int steps, int step, Weights& own) const {
        each_four([&](int i, int d, int tile, int j) {
            put(own, tile, j, four(from + row(group() + 8 * i, steps, step) * DIM + d));
        });
    }
    __device__ void write(float* to, int steps, int step, const Weights& own) const {
        each_four([&](int i, int d, int tile, int j) {
            if (!has(group() + 8 * i)) return;
            *reinterpret_cast<float4*>(to + row(group() + 8 * i, steps, step) * DIM + d) = take(own, tile, j);
        });
    }
};

// The order of columns where the decoder is turned.
__device__ inline int latent_of(int column) { return column % 4 * 2 + column / 4; }

struct Shared {
    Short raw_scale[LATENT * TWOS];            // S
    Array<ROWS * WIDE> wide;                   // noise of a step, or rows of M
    Array<(STAGED ? SEEN : 1) * WIDE> inputs;  // of a step
    Array<(STAGED ? SEEN : 1) * LONG> projected;
    Array<WARPS*(OF_LOGITS > OF_CODES ? OF_LOGITS : OF_CODES)> of_warps;
    Array<ROWS * LONG> codes;        // or what goes the same way
    Array<ROWS * BROAD> residuals;   // of classes and examples of different tasks: zero
    Array<ROWS * BROAD> of_logits;   // backward
    Array<OF_LOGITS> probabilities;  // backward
    Array<OF_LOGITS> targets;
    Array<SEEN> share;
    Array<STEPS * SEEN> losses;
    Arrival of_noise, of_inputs, of_means[2];

    __device__ void open() {
        if (thread() == 0) of_noise.open(), of_inputs.open(), of_means[0].open(), of_means[1].open();
        block_sync();
    }

    __device__ void load_decoder(const float* to_mean, const float* to_raw_scale) {
        for (int i = thread() * 32; i < LATENT * DIM; i += THREADS * 32) prefetch(to_mean + learner() * LATENT * DIM + i);
#pragma unroll 8
        for (int i = thread(); i < LATENT * DIM / 4; i += THREADS) {
            float4 numbers = four(to_raw_scale + learner() * LATENT * DIM + 4 * i);
            Short* to = raw_scale + i / (DIM / 4) * TWOS + i % (DIM / 4) * 2;
            to[0] = shorten(numbers.x, numbers.y), to[1] = shorten(numbers.z, numbers.w);
        }
    }

    __device__ void load_targets(const Place& place, const float* of_targets, const float* of_share) {
        for (int i = thread(); i < place.tasks * PAIRS; i += THREADS) targets[i] = of_targets[place.first * PAIRS + i];
        for (int i = thread(); i < place.tasks * EXAMPLES; i += THREADS) share[i] = of_share[place.first * EXAMPLES + i];
        for (int i = thread(); i < ROWS * BROAD; i += THREADS) residuals[i] = 0, of_logits[i] = 0;
    }

    // Has the noise of a step brought here; and a thread's own of it, once it has come.
    __device__ void fetch_noise(const Place& place, const float* noise, int step) {
        int n = thread() - 32;
        if (n == 0) of_noise.expect(place.tasks * WAY * DIM);
        if (n >= 0 && place.has(n))
            copy_row(wide.at + n * WIDE, noise + place.row(n, LATENT_STEPS + 1, step) * DIM, DIM, of_noise);
    }
    __device__ void read_noise(const Place& place, int turn, Weights& own) {
        of_noise.wait(turn);
        each_four([&](int i, int d, int tile, int j) {
            int n = group() + 8 * i;
            put(own, tile, j, four(wide.at + (place.has(n) ? n : 0) * WIDE + d));
        });
    }

    // Where a class of an example's task is among targets, and in a row of residuals.
    __device__ static int target(int e, int n) { return e / EXAMPLES * PAIRS + n * EXAMPLES + e % EXAMPLES; }
    __device__ static int residual_at(int e, int n) { return (e / EXAMPLES * WAY + n) * BROAD + e; }

    __device__ float logit(int e, int n) {
        float sum = 0;
#pragma unroll
        for (int other = 0; other < WARPS; ++other) sum += of_warps[other * OF_LOGITS + e * WAY + n];
        return sum;
    }

    // Probabilities and residuals of the logits, and each example's share of the loss.
    __device__ void softmax(const Place& place, int step, float* probabilities_out) {
        block_sync();
        for (int first = 0; first < SEEN; first += THREADS / GROUP) {
            int e = first + thread() / GROUP;
            bool seen = place.sees(e);
            float logits[WAY_EIGHTS], loss = 0;
#pragma unroll
            for (int j = 0; j < WAY_EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                logits[j] = seen && n < WAY ? logit(e, n) : -3e38f;
            }
            float total = log_total(logits);
#pragma unroll
            for (int j = 0; j < WAY_EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                if (!seen || n >= WAY) continue;
                float probability = fast_exp(logits[j] - total), its_target = targets[target(e, n)];
                residuals[residual_at(e, n)] = share[e] * (probability - its_target);
                probabilities_out[place.example(e, STEPS * WAY, step * WAY + n)] = probability;
                loss += its_target * (total - logits[j]);
            }
            loss = sum_of_eight(loss);
            if (seen && thread() % GROUP == 0) losses[step * SEEN + e] = share[e] * loss;
        }
        block_sync();
    }

    // Residuals from probabilities.
    __device__ void remember(const Place& place, int step, const float* probabilities_in) {
        for (int i = thread(); i < place.tasks * PAIRS; i += THREADS) {
            int e = i / WAY, n = i % WAY;
            float probability = probabilities_in[place.example(e, STEPS * WAY, step * WAY + n)];
            probabilities[target(e, n)] = probability;
            residuals[residual_at(e, n)] = share[e] * (probability - targets[target(e, n)]);
        }
    }

    // ∂/∂logits from ∂/∂residuals and ∂/∂loss.
    __device__ void softmax_backward(const Place& place, int step, const float* of_losses, float* of_logits_out) {
        block_sync();
        for (int first = 0; first < SEEN; first += THREADS / GROUP) {
            int e = first + thread() / GROUP;
            bool seen = place.sees(e);
            float gradient[WAY_EIGHTS], probability[WAY_EIGHTS], mean = 0;
#pragma unroll
            for (int j = 0; j < WAY_EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                bool own = seen && n < WAY;
                gradient[j] = own ? share[e] * logit(e, n) : 0;
                probability[j] = own ? probabilities[target(e, n)] : 0;
                mean += probability[j] * gradient[j];
            }
            mean = sum_of_eight(mean);
            float of_loss = seen ? of_losses[(place.first + e / EXAMPLES) * STEPS + step] : 0;
#pragma unroll
            for (int j = 0; j < WAY_EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                if (!seen || n >= WAY) continue;
                float value = probability[j] * (gradient[j] - mean) + of_loss * residuals[residual_at(e, n)];
                of_logits[residual_at(e, n)] = value;
                of_logits_out[place.example(e, STEPS * WAY, step * WAY + n)] = value;
            }
        }
        block_sync();
    }

    // Parts of all warps, then a thread's share of their sums.
    __device__ void gather_codes(const float (&sums)[LATENT_EIGHTS][4], float (&own)[CODE_SHARE]) {
#pragma unroll
        for (int eight = 0; eight < LATENT_EIGHTS; ++eight) {
            float* to = of_warps.at + warp() * OF_CODES + group() * OF_WARP + 8 * eight;
#pragma unroll
            for (int j = 0; j < 4; ++j) to[j / 2 * 8 * OF_WARP + latent_of(2 * member() + j % 2)] = sums[eight][j];
        }
        block_sync();
#pragma unroll
        for (int k = 0; k < CODE_SHARE; ++k) {
            int i = thread() + k * THREADS;
            own[k] = 0;
            if (i >= ROWS * LATENT) continue;
#pragma unroll
            for (int other = 0; other < WARPS; ++other)
                own[k] += of_warps[other * OF_CODES + i / LATENT * OF_WARP + i % LATENT];
        }
    }
};

static_assert(sizeof(Shared) - LATENT * TWOS * (sizeof(Short) - 4) == SHARED_BYTES,
              "the launch reserves another amount of shared memory");

// Half of the decoder: S, which is in shared memory, ...
struct RawScale {
    const Short* matrix;
    __device__ void begin() const {}
    __device__ void ready(int) const {}
    __device__ void done(int) const {}
    __device__ float2 two_of(int l, int d) const { return lengthen(matrix[l * TWOS + d / 2]); }
    __device__ float4 four_of(int l, int d) const {
        struct alignas(2 * sizeof(Short)) Pair {
            Short first, second;
        } pair = *reinterpret_cast<const Pair*>(matrix + l * TWOS + d / 2);
        float2 first = lengthen(pair.first), second = lengthen(pair.second);
        return {first.x, first.y, second.x, second.y};
    }
};

// ... or M, of which eight rows at a time are brought there, eight others being on their way.
struct Mean {
    Shared& shared;
    const float* matrix;
    int pass;

    __device__ void fetch(int eight) const {
        Arrival& arrival = shared.of_means[eight % 2];
        int i = thread() - 32;
        if (eight >= LATENT_EIGHTS || i < 0 || i >= 8) return;
        if (i == 0) arrival.expect(8 * DIM);
        copy_row(shared.wide.at + (eight % 2 * 8 + i) * WIDE, matrix + (8 * eight + i) * DIM, DIM, arrival);
    }
    __device__ void begin() const {
        block_sync();  // nobody reads what was there
        fetch(0);
        fetch(1);
    }
    __device__ void ready(int eight) const {
        shared.of_means[eight % 2].wait(pass * ((LATENT_EIGHTS + 1 - eight % 2) / 2) + eight / 2);
    }
    __device__ void done(int eight) const {
        block_sync();
        fetch(eight + 2);
    }
    __device__ const float* at(int l, int d) const { return shared.wide.at + l % 16 * WIDE + d; }
    __device__ float2 two_of(int l, int d) const { return rounded(two(at(l, d))); }
    __device__ float4 four_of(int l, int d) const { return rounded(four(at(l, d))); }
};

// codes × half of the decoder
template <class Half>
__device__ inline void decode(const float* codes, Half matrix, Weights& own) {
    each([&](int tile, int j) { own[tile][j] = 0; });
    matrix.begin();
#pragma unroll
    for (int eight = 0; eight < LATENT_EIGHTS; ++eight) {
        Left left(codes + 8 * eight, LONG);
        int l = 8 * eight + 2 * member();
        matrix.ready(eight);
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            int d = (warp() * QUADS + quad) * 16 + 2 * group();
            multiply_columns(own + 2 * quad, left, matrix.two_of(l, d), matrix.two_of(l + 1, d));
        }
        matrix.done(eight);
    }
}

// sums += weights × half of the decoder, turned: the part of this warp
template <class Half>
__device__ inline void encode(const Weights& own, Half matrix, float (&sums)[LATENT_EIGHTS][4]) {
    float left[TILES][4];
    each([&](int tile, int j) { left[tile][j] = to_tf32(own[tile][j % 2 * 2 + j / 2]); });
    matrix.begin();
#pragma unroll
    for (int eight = 0; eight < LATENT_EIGHTS; ++eight) {
        int l = 8 * eight + latent_of(group());
        matrix.ready(eight);
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            float4 right = matrix.four_of(l, (warp() * QUADS + quad) * 16 + 4 * member());
            multiply(sums[eight], left[2 * quad], right.x, right.z);
            multiply(sums[eight], left[2 * quad + 1], right.y, right.w);
        }
        matrix.done(eight);
    }
}

// The inputs of a step, and for latent steps the same times Mᵀ.
struct Inputs {
    const Place& place;
    Shared& shared;
    const float *inputs, *projected;
    int steps, step;

    // Where there is room, has them brought to shared memory.
    __device__ void fetch() const {
        int e = thread();
        if (!STAGED || e >= 32) return;
        if (e == 0) shared.of_inputs.expect(place.tasks * EXAMPLES * (projected ? DIM + LATENT : DIM));
        if (!place.sees(e)) return;
        copy_row(shared.inputs.at + e * WIDE, inputs + place.example(e, steps, step) * DIM, DIM, shared.of_inputs);
        if (!projected) return;
        const float* from = projected + place.example(e, steps, step) * LATENT;
        copy_row(shared.projected.at + e * LONG, from, LATENT, shared.of_inputs);
    }
    __device__ void wait(int turn) const {
        if (STAGED) shared.of_inputs.wait(turn);
    }
    __device__ const float* row(int e) const {
        return STAGED ? shared.inputs.at + (place.sees(e) ? e : 0) * WIDE : inputs + place.example(e, steps, step) * DIM;
    }
    __device__ const float* projected_row(int e) const {
        return STAGED ? shared.projected.at + (place.sees(e) ? e : 0) * LONG
                      : projected + place.example(e, steps, step) * LATENT;
    }

    // Σ_e r[n][e] x[e][d]
    __device__ void rows(const float* r, Weights& own) const {
        sum_examples<SEEN_EIGHTS>(r, BROAD, [&](int e) { return row(e); }, own);
    }

    // sums += Σ_e r[n][e] p[e][l]: examples are shared out among the warps
    __device__ void project(const float* r, float (&sums)[LATENT_EIGHTS][4]) const {
        for (int eight = warp(); eight < SEEN_EIGHTS; eight += WARPS) {
            Left left(r + 8 * eight, BROAD);
            const float* upper = projected_row(8 * eight + 2 * member()) + latent_of(group());
            const float* lower = projected_row(8 * eight + 2 * member() + 1) + latent_of(group());
#pragma unroll
            for (int m = 0; m < LATENT_EIGHTS; ++m) multiply(sums[m], left.at, to_tf32(upper[8 * m]), to_tf32(lower[8 * m]));
        }
    }

    // This warp's part of Σ_d w[n][d] x[e][d], and with codes of Σ_l p[e][l] z[n][l], for classes and examples of a task
    __device__ void dots(const Weights& own, const float* codes) const {
#pragma unroll 2
        for (int eight = 0; eight < SEEN_EIGHTS; ++eight) {
            float sums[4] = {};
            sum_features(own, row(8 * eight + example_of(group())), sums);
            if (codes)
                for (int l = warp(); l < LATENT_EIGHTS; l += WARPS) {
                    float2 p = two(projected_row(8 * eight + example_of(group())) + 8 * l + 2 * member());
                    multiply(sums, Left(codes + 8 * l, LONG).at, to_tf32(p.x), to_tf32(p.y));
                }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int n = group() + j / 2 * 8, e = 8 * eight + example_of(2 * member() + j % 2);
                if (e < SEEN && n / WAY == e / EXAMPLES) shared.of_warps[warp() * OF_LOGITS + e * WAY + n % WAY] = sums[j];
            }
        }
    }
};

// A thread's share of the codes' numbers.
template <class Use>
__device__ inline void each_number(const Place& place, Use use) {
#pragma unroll
    for (int k = 0; k < CODE_SHARE; ++k) {
        int i = thread() + k * THREADS, n = i / LATENT, l = i % LATENT;
        if (i < ROWS * LATENT) use(k, n, l, place.has(n));
    }
}

KERNEL adapt_forward(
    const float* code, const float* to_mean, const float* to_raw_scale, const float* latent_step_size,
    const float* finetune_step_size, const float* latent_inputs, const float* finetune_inputs, const float* projected,
    const float* noise, const float* targets, const float* share,  // results follow
    float* adapted, float* decoded, float* tuned, float* losses, float* codes, float* gradients, float* probabilities,
    float* raw
) {
    SHARED(Shared, shared);
    Weights own, slope;
    float code_now[CODE_SHARE], gradient[CODE_SHARE], step_size[CODE_SHARE];
    const RawScale scale{shared.raw_scale};
    const float* step_sizes = finetune_step_size + learner() * DIM;

    shared.open();
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        const Place place(pass);
        if (place.tasks <= 0) break;
        auto of_latent = [&](int step) { return Inputs{place, shared, latent_inputs, projected, LATENT_STEPS, step}; };
        auto of_finetune = [&](int step) { return Inputs{place, shared, finetune_inputs, nullptr, FINETUNE_STEPS, step}; };
        of_latent(0).fetch();
        shared.fetch_noise(place, noise, 0);
        if (pass == 0) shared.load_decoder(to_mean, to_raw_scale);
        shared.load_targets(place, targets, share);
        each_number(place, [&](int k, int n, int l, bool has) {
            code_now[k] = has ? code[(place.first * WAY + n) * LATENT + l] : 0;
            step_size[k] = latent_step_size[learner() * LATENT + l];
            shared.codes[n * LONG + l] = code_now[k];
        });
        block_sync();

#pragma unroll 1
        for (int step = 0; step < LATENT_STEPS; ++step) {
            Inputs x = of_latent(step);
            decode(shared.codes.at, scale, own);
            place.write(raw, LATENT_STEPS + 1, step, own);
            shared.read_noise(place, pass * (LATENT_STEPS + 1) + step, slope);
            each([&](int tile, int j) {
                Slopes s = slopes(own[tile][j]);
                own[tile][j] = s.scale * slope[tile][j];
                slope[tile][j] *= s.slope;
            });
            x.wait(pass * STEPS + step);
            x.dots(own, shared.codes.at);
            shared.softmax(place, step, probabilities);
            shared.fetch_noise(place, noise, step + 1);
            x.rows(shared.residuals.at, own);
            each([&](int tile, int j) { own[tile][j] *= slope[tile][j]; });
            float sums[LATENT_EIGHTS][4] = {};
            encode(own, scale, sums);
            x.project(shared.residuals.at, sums);
            shared.gather_codes(sums, gradient);
            step + 1 < LATENT_STEPS ? of_latent(step + 1).fetch() : of_finetune(0).fetch();
            each_number(place, [&](int k, int n, int l, bool has) {
                int at = place.row(n, LATENT_STEPS, step) * LATENT + l;
                if (has) codes[at] = code_now[k], gradients[at] = gradient[k];
                code_now[k] -= step_size[k] * gradient[k];
                shared.codes[n * LONG + l] = code_now[k];
            });
            block_sync();
        }

        each_number(place, [&](int k, int n, int l, bool has) {
            if (has) adapted[(place.first * WAY + n) * LATENT + l] = code_now[k];
        });
        decode(shared.codes.at, scale, own);
        place.write(raw, LATENT_STEPS + 1, LATENT_STEPS, own);
        shared.read_noise(place, pass * (LATENT_STEPS + 1) + LATENT_STEPS, slope);
        each([&](int tile, int j) { slope[tile][j] *= slopes(own[tile][j]).scale; });
        decode(shared.codes.at, Mean{shared, to_mean + learner() * LATENT * DIM, pass}, own);
        each([&](int tile, int j) { own[tile][j] += slope[tile][j]; });
        place.write(decoded, 1, 0, own);

#pragma unroll 1
        for (int step = 0; step < FINETUNE_STEPS; ++step) {
            Inputs x = of_finetune(step);
            x.wait(pass * STEPS + LATENT_STEPS + step);
            x.dots(own, nullptr);
            shared.softmax(place, LATENT_STEPS + step, probabilities);
            x.rows(shared.residuals.at, slope);
            each_four([&](int, int d, int tile, int j) {
                float4 rate = four(step_sizes + d), weight = take(own, tile, j), by = take(slope, tile, j);
                weight.x -= rate.x * by.x, weight.y -= rate.y * by.y, weight.z -= rate.z * by.z, weight.w -= rate.w * by.w;
                put(own, tile, j, weight);
            });
            block_sync();  // all have read the inputs
            if (step + 1 < FINETUNE_STEPS) of_finetune(step + 1).fetch();
        }
        place.write(tuned, 1, 0, own);
        for (int i = thread(); i < place.tasks * STEPS; i += THREADS) {
            float sum = 0;
            for (int e = 0; e < EXAMPLES; ++e) sum += shared.losses[i % STEPS * SEEN + i / STEPS * EXAMPLES + e];
            losses[place.first * STEPS + i] = sum;
        }
    }
}

KERNEL adapt_backward(
    const float* to_mean, const float* to_raw_scale, const float* latent_step_size, const float* finetune_step_size,
    const float* latent_inputs, const float* finetune_inputs, const float* projected, const float* noise,
    const float* targets, const float* share, const float* gradients, const float* probabilities, const float* raw,
    const float* of_adapted, const float* of_decoded, const float* of_tuned, const float* of_losses,  // results follow
    float* of_code, float* of_latent_step_size, float* of_finetune_step_size, float* of_gradients, float* of_logits,
    float* rights, float* of_means
) {
    SHARED(Shared, shared);
    Weights own, rest, slope;
    float of_code_now[CODE_SHARE], of_step_size[CODE_SHARE], step_size[CODE_SHARE], sum[CODE_SHARE];
    const RawScale scale{shared.raw_scale};
    const float* step_sizes = finetune_step_size + learner() * DIM;

    shared.open();
#pragma unroll 1
    for (int pass = 0; pass < PASSES; ++pass) {
        const Place place(pass);
        if (place.tasks <= 0) break;
        auto of_latent = [&](int step) { return Inputs{place, shared, latent_inputs, projected, LATENT_STEPS, step}; };
        auto of_finetune = [&](int step) { return Inputs{place, shared, finetune_inputs, nullptr, FINETUNE_STEPS, step}; };
        of_finetune(FINETUNE_STEPS - 1).fetch();
        shared.fetch_noise(place, noise, LATENT_STEPS);
        if (pass == 0) shared.load_decoder(to_mean, to_raw_scale);
        shared.load_targets(place, targets, share);
        place.read(of_tuned, 1, 0, own);
        each([&](int tile, int j) { slope[tile][j] = 0; });  // here: ∂/∂(step sizes)

#pragma unroll 1
        for (int step = FINETUNE_STEPS - 1; step >= 0; --step) {
            Inputs x = of_finetune(step);
            block_sync();
            shared.remember(place, LATENT_STEPS + step, probabilities);
            each_four([&](int, int d, int tile, int j) {
                float4 rate = four(step_sizes + d), weight = take(own, tile, j);
                put(rest, tile, j, {-rate.x * weight.x, -rate.y * weight.y, -rate.z * weight.z, -rate.w * weight.w});
            });
            x.wait(pass * STEPS + FINETUNE_STEPS - 1 - step);
            x.dots(rest, nullptr);
            shared.softmax_backward(place, LATENT_STEPS + step, of_losses, of_logits);
            x.rows(shared.residuals.at, rest);
            each([&](int tile, int j) { slope[tile][j] -= own[tile][j] * rest[tile][j]; });
            x.rows(shared.of_logits.at, rest);
            each([&](int tile, int j) { own[tile][j] += rest[tile][j]; });
            block_sync();  // all have read the inputs
            step > 0 ? of_finetune(step - 1).fetch() : of_latent(LATENT_STEPS - 1).fetch();
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)  // of all tasks here, with the first of them
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float sum = (place.has(group()) ? slope[tile][j] : 0) + (place.has(group() + 8) ? slope[tile][j + 2] : 0);
                sum += shuffle_xor(sum, 4);
                sum += shuffle_xor(sum, 8);
                sum += shuffle_xor(sum, 16);
                int d = (warp() * QUADS + tile / 2) * 16 + member() * 4 + j * 2 + tile % 2;
                if (group() < place.tasks) of_finetune_step_size[(place.first + group()) * DIM + d] = group() == 0 ? sum : 0;
            }

        float sums[LATENT_EIGHTS][4] = {};
        place.read(of_decoded, 1, 0, rest);
        each([&](int tile, int j) { own[tile][j] += rest[tile][j]; });
        place.write(of_means, 1, 0, own);
        place.read(raw, LATENT_STEPS + 1, LATENT_STEPS, rest);
        shared.read_noise(place, pass * (LATENT_STEPS + 1), slope);
        encode(own, Mean{shared, to_mean + learner() * LATENT * DIM, pass}, sums);
        shared.fetch_noise(place, noise, LATENT_STEPS - 1);
        each([&](int tile, int j) { own[tile][j] *= slopes(rest[tile][j]).slope * slope[tile][j]; });
        place.write(rights, 2 * LATENT_STEPS + 1, 2 * LATENT_STEPS, own);
        encode(own, scale, sums);
        shared.gather_codes(sums, sum);
        each_number(place, [&](int k, int n, int l, bool has) {
            of_code_now[k] = has ? of_adapted[(place.first * WAY + n) * LATENT + l] + sum[k] : 0;
            step_size[k] = latent_step_size[learner() * LATENT + l];
            of_step_size[k] = 0;
        });

#pragma unroll 1
        for (int step = LATENT_STEPS - 1; step >= 0; --step) {
            Inputs x = of_latent(step);
            Weights raw_now;
            place.read(raw, LATENT_STEPS + 1, step, raw_now);
            each_number(place, [&](int k, int n, int l, bool has) {
                int at = place.row(n, LATENT_STEPS, step) * LATENT + l;
                float of_gradient = -step_size[k] * of_code_now[k];
                shared.codes[n * LONG + l] = of_gradient;
                if (has) of_step_size[k] -= of_code_now[k] * gradients[at], of_gradients[at] = of_gradient;
            });
            shared.remember(place, step, probabilities);
            block_sync();
            decode(shared.codes.at, scale, own);
            x.wait(pass * STEPS + STEPS - 1 - step);
            x.rows(shared.residuals.at, rest);
            shared.read_noise(place, pass * (LATENT_STEPS + 1) + LATENT_STEPS - step, slope);
            each([&](int tile, int j) {
                Slopes s = slopes(raw_now[tile][j]);
                float back = own[tile][j], of_weights = rest[tile][j];
                rest[tile][j] = back * of_weights * s.bend * slope[tile][j];
                slope[tile][j] *= s.slope;
                own[tile][j] = back * slope[tile][j];
                raw_now[tile][j] = of_weights * slope[tile][j];
            });
            place.write(rights, 2 * LATENT_STEPS + 1, 2 * step, raw_now);
            x.dots(own, shared.codes.at);
            shared.softmax_backward(place, step, of_losses, of_logits);
            if (step > 0) shared.fetch_noise(place, noise, step - 1);
            x.rows(shared.of_logits.at, own);
            each([&](int tile, int j) { own[tile][j] = rest[tile][j] + own[tile][j] * slope[tile][j]; });
            place.write(rights, 2 * LATENT_STEPS + 1, 2 * step + 1, own);
#pragma unroll
            for (int eight = 0; eight < LATENT_EIGHTS; ++eight)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[eight][j] = 0;
            encode(own, scale, sums);
            x.project(shared.of_logits.at, sums);
            shared.gather_codes(sums, sum);
            if (step > 0) of_latent(step - 1).fetch();
#pragma unroll
            for (int k = 0; k < CODE_SHARE; ++k) of_code_now[k] += sum[k];
        }
        each_number(place, [&](int k, int n, int l, bool has) {
            int at = (place.first * WAY + n) * LATENT + l;
            if (has) of_code[at] = of_code_now[k], of_latent_step_size[at] = of_step_size[k];
        });
    }
}
