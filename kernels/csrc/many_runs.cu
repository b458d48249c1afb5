// LEO's inner loop where the GPU is full: a block takes several tasks of a learner, and has all of S in shared memory.
//
// `few_runs.cu` hurries, this wastes nothing: results and names are the same. A product has sixteen rows, one for each
// class of TOGETHER tasks, and what is as wide as the features stays in registers (`weights.cuh`). Threads exchange sums
// over all features: logits, and gradients of codes.
//
// A block may do that in several passes. LATENT is a multiple of 16.

constexpr int CLUSTER = 1, THREADS = DIM % 128 == 0 ? 256 : 128, RESIDENT = 1, TOGETHER = 16 / WAY;

#include "slopes.cuh"
#include "weights.cuh"

#ifndef FULL
#define FULL 250  // blocks, one to a multiprocessor, that keep the largest GPUs busy for two rounds
#endif

constexpr int SEEN = TOGETHER * EXAMPLES, SEEN_EIGHTS = (SEEN + 7) / 8;
constexpr int LATENT_EIGHTS = LATENT / 8, CODE_SHARE = (ROWS * LATENT + THREADS - 1) / THREADS;
constexpr int WAY_EIGHTS = (WAY + 7) / 8, PAIR_SHARE = (SEEN * WAY + THREADS - 1) / THREADS;
constexpr bool STAGED = SEEN <= ROWS;  // inputs are brought to shared memory ahead of their use, where there is room
// of rows in shared memory, which so begin in different banks
constexpr int TWOS = (DIM + 8) / 2, WIDE = DIM + 4, LONG = LATENT + 8, OF_WARP = LATENT + 4, BROAD = 8 * SEEN_EIGHTS + 8;
constexpr int WIDE_ROWS = STAGED && SEEN > TOGETHER * WAY ? SEEN : TOGETHER * WAY;
constexpr int OF_LOGITS = SEEN * WAY, OF_CODES = ROWS * OF_WARP;

static_assert(WAY <= ROWS && LATENT % 16 == 0, "how the tasks are cut");
static_assert(DIM <= 640, "a thread holds as many weights as its warp has features, four times");
static_assert(LATENT_STEPS > 0 && FINETUNE_STEPS > 0, "there are steps of both kinds");

// How many times a block has tasks, all being so many.
__host__ __device__ inline int parts(int tasks) { return (tasks + TOGETHER - 1) / TOGETHER; }
__device__ inline int passes(int tasks) { return (parts(tasks) + clusters() - 1) / clusters(); }

// Blocks of a run: fewer, and so S loaded less often, where the GPU is full anyway.
inline int blocks_of_run(int runs, int tasks) {
    long long most = static_cast<long long>(runs) * parts(tasks) / FULL;
    int passes = most < 1 ? 1 : most < parts(tasks) ? most : parts(tasks);
    return (parts(tasks) + passes - 1) / passes;
}

// Which tasks these are; in the last passes there may be fewer of them, or none.
struct Place {
    int first, tasks;

    __device__ Place(int pass, int all) {
        int skipped = (cluster() * passes(all) + pass) * TOGETHER, left = all - skipped;
        first = run() * all + skipped, tasks = left < TOGETHER ? left : TOGETHER;
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

    __device__ void prefetch_weights(const float* from) const {
        if (thread() < tasks * WAY) prefetch_row(from + (first * WAY + thread()) * DIM, DIM);
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

// Has rows brought to shared memory, each by another warp: what one thread asks for takes a while.
template <class Copy>
__device__ inline void each_row(int rows, Copy copy) {
    int i = warp() + thread() % 32 * WARPS;
    if (i < rows) copy(i);
}

// How often something has come to the shared memory that inputs and noise are brought to.
struct Turns {
    int of_wide = 0, of_inputs = 0;
};

struct Shared {
    Short raw_scale[LATENT * TWOS];  // S; of every sixteen features first those that are even
    Array<WIDE_ROWS * WIDE> wide;    // noise of a step, or the inputs of every other fine-tuning step
    Array<WIDE_ROWS * WIDE> inputs;  // of a step; backward, both: what is then stored
    Array<(STAGED ? SEEN : 1) * LATENT> projected;
    Array<WARPS*(OF_LOGITS > OF_CODES ? OF_LOGITS : OF_CODES)> of_warps;
    Array<ROWS * LONG> codes;                       // or what goes the same way
    Array<ROWS * LONG> codes_then, gradients_then;  // backward: those of the way there
    Array<ROWS * BROAD> residuals;                  // of classes and examples of different tasks: zero
    Array<ROWS * BROAD> of_logits;                  // backward
    Array<OF_LOGITS> probabilities;                 // backward
    Array<OF_LOGITS> targets;
    Array<SEEN> share;
    Array<LATENT> latent_rates;
    Array<DIM> finetune_rates;
    Arrival of_wide, of_inputs;

    __device__ void open() {
        if (thread() == 0) of_wide.open(), of_inputs.open();
        block_sync();
    }

    __device__ void load_learner(const float* to_raw_scale, const float* latent_step_size, const float* finetune_step_size) {
        for (int i = thread(); i < LATENT; i += THREADS) latent_rates[i] = latent_step_size[run() * LATENT + i];
        for (int i = thread(); i < DIM; i += THREADS) finetune_rates[i] = finetune_step_size[run() * DIM + i];
#pragma unroll 20
        for (int i = thread(); i < LATENT * DIM / 4; i += THREADS) {
            float4 numbers = four(to_raw_scale + run() * LATENT * DIM + 4 * i);
            Short* to = raw_scale + i / (DIM / 4) * TWOS + i % (DIM / 4) / 4 * 8 + i % 4;
            to[0] = shorten(numbers.x, numbers.z), to[4] = shorten(numbers.y, numbers.w);
        }
    }

    __device__ void load_targets(const Place& place, const float* of_targets, const float* of_share) {
        for (int i = thread(); i < place.tasks * PAIRS; i += THREADS) targets[i] = of_targets[place.first * PAIRS + i];
        for (int i = thread(); i < place.tasks * EXAMPLES; i += THREADS) share[i] = of_share[place.first * EXAMPLES + i];
        for (int i = thread(); i < ROWS * BROAD; i += THREADS) residuals[i] = 0, of_logits[i] = 0;
    }

    // Has the noise of a step brought here; and a thread's own of it, once it has come.
    __device__ void fetch_noise(const Place& place, const float* noise, int step) {
        if (thread() == 0) of_wide.expect(place.tasks * WAY * DIM);
        each_row(place.tasks * WAY, [&](int n) {
            copy_row(wide.at + n * WIDE, noise + place.row(n, LATENT_STEPS + 1, step) * DIM, DIM, of_wide);
        });
    }
    __device__ void read_noise(const Place& place, Turns& turns, Weights& own) {
        of_wide.wait(turns.of_wide++);
        each_four([&](int i, int d, int tile, int j) {
            int n = group() + 8 * i;
            put(own, tile, j, four(wide.at + (place.has(n) ? n : 0) * WIDE + d));
        });
    }

    // Has codes, or what is like them, copied here: some time before `copies_done`.
    __device__ static void copy_codes(const Place& place, float* to, const float* from, int steps, int step) {
        for (int i = thread(); i < place.tasks * WAY * LATENT / 4; i += THREADS) {
            int n = i / (LATENT / 4), l = i % (LATENT / 4) * 4;
            copy_four(to + n * LONG + l, from + place.row(n, steps, step) * LATENT + l);
        }
    }
    __device__ void copy_step_then(const Place& place, const float* codes, const float* gradients, int step) {
        if (step < 0) return;
        copy_codes(place, codes_then.at, codes, LATENT_STEPS, step);
        copy_codes(place, gradients_then.at, gradients, LATENT_STEPS, step);
    }

    // A thread's own of what is as wide as the features, to be stored after the next barrier; and that, row by row.
    __device__ static void stage(const Place& place, float* to, const Weights& own) {
        each_four([&](int i, int d, int tile, int j) {
            if (place.has(group() + 8 * i)) *reinterpret_cast<float4*>(to + (group() + 8 * i) * WIDE + d) = take(own, tile, j);
        });
        written();
    }
    __device__ static void store(const Place& place, const float* from, float* to, int steps, int step) {
        each_row(place.tasks * WAY,
                 [&](int n) { store_row(to + place.row(n, steps, step) * DIM, from + n * WIDE, DIM); });
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

    // Probabilities and residuals of the logits.
    __device__ void softmax(const Place& place, int step, float* probabilities_out) {
        block_sync();
        for (int first = 0; first < SEEN; first += THREADS / GROUP) {
            int e = first + thread() / GROUP;
            bool seen = place.sees(e);
            float logits[WAY_EIGHTS];
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
            }
        }
        block_sync();
    }

    // Residuals from probabilities, which a thread has its share of.
    __device__ static void read_probabilities(const Place& place, int step, const float* from, float (&own)[PAIR_SHARE]) {
#pragma unroll
        for (int k = 0; k < PAIR_SHARE; ++k) {
            int i = thread() + k * THREADS;
            if (step >= 0 && i < place.tasks * PAIRS) own[k] = from[place.example(i / WAY, STEPS * WAY, step * WAY + i % WAY)];
        }
    }
    __device__ void remember(const Place& place, const float (&own)[PAIR_SHARE]) {
#pragma unroll
        for (int k = 0; k < PAIR_SHARE; ++k) {
            int i = thread() + k * THREADS, e = i / WAY, n = i % WAY;
            if (i >= place.tasks * PAIRS) continue;
            probabilities[target(e, n)] = own[k];
            residuals[residual_at(e, n)] = share[e] * (own[k] - targets[target(e, n)]);
        }
    }

    // ∂/∂logits from ∂/∂residuals.
    __device__ void softmax_backward(const Place& place, int step, float* of_logits_out) {
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
#pragma unroll
            for (int j = 0; j < WAY_EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                if (!seen || n >= WAY) continue;
                float value = probability[j] * (gradient[j] - mean);
                of_logits[residual_at(e, n)] = value;
                of_logits_out[place.example(e, STEPS * WAY, step * WAY + n)] = value;
            }
        }
        block_sync();
    }

    // Parts of all warps, then added to: a thread's share of their sums.
    __device__ void gather_codes(const float (&sums)[LATENT_EIGHTS][4], float (&own)[CODE_SHARE]) {
#pragma unroll
        for (int eight = 0; eight < LATENT_EIGHTS; ++eight) {
            float* to = of_warps.at + warp() * OF_CODES + group() * OF_WARP + 8 * eight;
#pragma unroll
            for (int j = 0; j < 4; ++j) to[j / 2 * 8 * OF_WARP + 2 * member() + j % 2] = sums[eight][j];
        }
        block_sync();
#pragma unroll
        for (int k = 0; k < CODE_SHARE; ++k) {
            int i = thread() + k * THREADS;
            if (i >= ROWS * LATENT) continue;
#pragma unroll
            for (int other = 0; other < WARPS; ++other)
                own[k] += of_warps[other * OF_CODES + i / LATENT * OF_WARP + i % LATENT];
        }
    }
};

constexpr int SHARED_BYTES = sizeof(Shared);

// A left factor in 16 bits, which end where others still have digits: each row is made one with a largest number of 1.
struct Scaled {
    float upper, lower;  // by which the sums of rows `group` and `group` + 8 have to be multiplied

    template <int SIZE>
    __device__ Scaled(const float (&numbers)[SIZE][4], Short (&left)[SIZE / 2][4]) : upper(0), lower(0) {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            upper = fmaxf(upper, fmaxf(fabsf(numbers[i][0]), fabsf(numbers[i][1])));
            lower = fmaxf(lower, fmaxf(fabsf(numbers[i][2]), fabsf(numbers[i][3])));
        }
#pragma unroll
        for (int other = 1; other < 4; other *= 2) {
            upper = fmaxf(upper, shuffle_xor(upper, other)), lower = fmaxf(lower, shuffle_xor(lower, other));
        }
        upper = fmaxf(upper, 1e-30f), lower = fmaxf(lower, 1e-30f);
        float by_upper = fast_divide(1, upper), by_lower = fast_divide(1, lower);
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            left[i / 2][i % 2 * 2] = shorten(by_upper * numbers[i][0], by_upper * numbers[i][1]);
            left[i / 2][i % 2 * 2 + 1] = shorten(by_lower * numbers[i][2], by_lower * numbers[i][3]);
        }
    }

    template <int SIZE>
    __device__ void undo(float (&sums)[SIZE][4]) const {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) sums[i][0] *= upper, sums[i][1] *= upper, sums[i][2] *= lower, sums[i][3] *= lower;
    }
};

// zS
__device__ inline void decode_scale(const float* codes, const Short* raw_scale, Weights& own) {
    float numbers[LATENT_EIGHTS][4];
    Short left[LATENT / 16][4], right[4];
#pragma unroll
    for (int eight = 0; eight < LATENT_EIGHTS; ++eight) {
        const float* from = codes + group() * LONG + 8 * eight + 2 * member();
        float2 upper = two(from), lower = two(from + 8 * LONG);
        numbers[eight][0] = upper.x, numbers[eight][1] = upper.y, numbers[eight][2] = lower.x, numbers[eight][3] = lower.y;
    }
    Scaled scaled(numbers, left);
    each([&](int tile, int j) { own[tile][j] = 0; });
    int lane = thread() % 32;
    const Short* from = raw_scale + lane % 16 * TWOS + warp() * QUADS * 8 + lane / 16 * 4;
#pragma unroll
    for (int l = 0; l < LATENT / 16; ++l)
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            load_short_turned(from + 16 * l * TWOS + 8 * quad, right);
            multiply_short(own[2 * quad], left[l], right[0], right[1]);
            multiply_short(own[2 * quad + 1], left[l], right[2], right[3]);
        }
    scaled.undo(own);
}

// weights × Sᵀ: the part of this warp
__device__ inline void encode_scale(const Weights& own, const Short* raw_scale, float (&sums)[LATENT_EIGHTS][4]) {
    Short left[QUADS][4], right[4];
    Scaled scaled(own, left);
    int lane = thread() % 32;
    const Short* from = raw_scale + (lane % 8 + lane / 16 * 8) * TWOS + warp() * QUADS * 8 + lane / 8 % 2 * 4;
#pragma unroll
    for (int eight = 0; eight < LATENT_EIGHTS; ++eight)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[eight][j] = 0;
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad)
#pragma unroll
        for (int l = 0; l < LATENT / 16; ++l) {
            load_short(from + 16 * l * TWOS + 8 * quad, right);
            multiply_short(sums[2 * l], left[quad], right[0], right[1]);
            multiply_short(sums[2 * l + 1], left[quad], right[2], right[3]);
        }
    scaled.undo(sums);
}

// M is used once, and stays where it is; it is brought near some time before.
__device__ inline void prefetch_mean(const float* to_mean) {
    constexpr int PART = LATENT * DIM / WARPS;
    if (thread() % 32 == 0) prefetch_row(to_mean + (run() * WARPS + warp()) * PART, PART);
}

// own += zM
__device__ inline void decode_mean(const float* codes, const float* to_mean, Weights& own) {
#pragma unroll 4
    for (int eight = 0; eight < LATENT_EIGHTS; ++eight) {
        Left left(codes + 8 * eight, LONG);
        const float* from = to_mean + (8 * eight + 2 * member()) * DIM + warp() * QUADS * 16 + 2 * group();
        float2 upper[QUADS], lower[QUADS];
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            upper[quad] = two(from + 16 * quad), lower[quad] = two(from + DIM + 16 * quad);
        }
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad)
            multiply_columns(own + 2 * quad, left, rounded(upper[quad]), rounded(lower[quad]));
    }
}

// sums += weights × Mᵀ: the part of this warp
__device__ inline void encode_mean(const Weights& own, const float* to_mean, float (&sums)[LATENT_EIGHTS][4]) {
    constexpr int AT_ONCE = 2;
    const float* from = to_mean + group() * DIM + warp() * QUADS * 16 + 4 * member();
#pragma unroll
    for (int first = 0; first < QUADS; first += AT_ONCE) {
        float4 right[AT_ONCE][LATENT_EIGHTS];
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < QUADS; ++i)
#pragma unroll
            for (int eight = 0; eight < LATENT_EIGHTS; ++eight)
                right[i][eight] = four(from + 8 * eight * DIM + 16 * (first + i));
#pragma unroll
        for (int i = 0; i < AT_ONCE && first + i < QUADS; ++i)
#pragma unroll
            for (int eight = 0; eight < LATENT_EIGHTS; ++eight)
                multiply_turned(sums[eight], own[2 * (first + i)], own[2 * (first + i) + 1], rounded(right[i][eight]));
    }
}

// The inputs of a step, and for latent steps the same times Mᵀ.
struct Inputs {
    const Place& place;
    Shared& shared;
    const float *inputs, *projected;
    int steps, step;

    // Every other fine-tuning step has them where noise was.
    __device__ bool in_wide() const { return !projected && step % 2; }
    __device__ float* staged() const { return in_wide() ? shared.wide.at : shared.inputs.at; }

    // Where there is room, has them brought to shared memory.
    __device__ void fetch() const {
        if (!STAGED || step < 0 || step >= steps) return;
        Arrival& arrival = in_wide() ? shared.of_wide : shared.of_inputs;
        if (thread() == 0) arrival.expect(place.tasks * EXAMPLES * (projected ? DIM + LATENT : DIM));
        each_row(place.tasks * EXAMPLES, [&](int e) {
            int at = place.example(e, steps, step);
            copy_row(staged() + e * WIDE, inputs + at * DIM, DIM, arrival);
            if (projected && e % EXAMPLES == 0)
                copy_row(shared.projected.at + e * LATENT, projected + at * LATENT, EXAMPLES * LATENT, arrival);
        });
    }
    __device__ void wait(Turns& turns) const {
        if (!STAGED) return;
        in_wide() ? shared.of_wide.wait(turns.of_wide++) : shared.of_inputs.wait(turns.of_inputs++);
    }
    __device__ const float* row(int e) const {
        return STAGED ? staged() + (place.sees(e) ? e : 0) * WIDE : inputs + place.example(e, steps, step) * DIM;
    }
    __device__ const float* projected_row(int e) const {
        return STAGED ? shared.projected.at + (place.sees(e) ? e : 0) * LATENT
                      : projected + place.example(e, steps, step) * LATENT;
    }

    // Σ_e r[n][e] x[e][d]
    __device__ void rows(const float* r, Weights& own) const {
        each([&](int tile, int j) { own[tile][j] = 0; });
        add_examples<SEEN_EIGHTS>(r, BROAD, [&](int e) { return row(e); }, own);
    }

    // sums += Σ_e r[n][e] p[e][l], each by one of the warps
    __device__ void project(const float* r, float (&sums)[LATENT_EIGHTS][4]) const {
#pragma unroll
        for (int m = 0; m < LATENT_EIGHTS; ++m) {
            if (m % WARPS != warp()) continue;
            for (int eight = 0; eight < SEEN_EIGHTS; ++eight) {
                const float* upper = projected_row(8 * eight + 2 * member()) + 8 * m + group();
                const float* lower = projected_row(8 * eight + 2 * member() + 1) + 8 * m + group();
                multiply(sums[m], Left(r + 8 * eight, BROAD).at, to_tf32(*upper), to_tf32(*lower));
            }
        }
    }

    // This warp's part of Σ_d w[n][d] x[e][d], and with codes of Σ_l p[e][l] z[n][l], for classes and examples of a task
    __device__ void dots(const Weights& own, const float* codes) const {
        Weights left;
        turn(own, left);
#pragma unroll 2
        for (int eight = 0; eight < SEEN_EIGHTS; ++eight) {
            float sums[4] = {};
            if (codes)
                for (int l = warp(); l < LATENT_EIGHTS; l += WARPS) {
                    float2 p = two(projected_row(8 * eight + example_of(group())) + 8 * l + 2 * member());
                    multiply(sums, Left(codes + 8 * l, LONG).at, to_tf32(p.x), to_tf32(p.y));
                }
            sum_features(left, row(8 * eight + example_of(group())), sums);
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
    float* adapted, float* decoded, float* tuned, float* codes, float* gradients, float* probabilities, int tasks
) {
    SHARED(Shared, shared);
    Weights own, slope;
    float code_now[CODE_SHARE], gradient[CODE_SHARE];

    Turns turns;
    shared.open();
#pragma unroll 1
    for (int pass = 0; pass < passes(tasks); ++pass) {
        const Place place(pass, tasks);
        if (place.tasks <= 0) break;
        auto of_latent = [&](int step) { return Inputs{place, shared, latent_inputs, projected, LATENT_STEPS, step}; };
        auto of_finetune = [&](int step) { return Inputs{place, shared, finetune_inputs, nullptr, FINETUNE_STEPS, step}; };
        of_latent(0).fetch();
        shared.fetch_noise(place, noise, 0);
        if (pass == 0) shared.load_learner(to_raw_scale, latent_step_size, finetune_step_size);
        shared.load_targets(place, targets, share);
        each_number(place, [&](int k, int n, int l, bool has) {
            code_now[k] = has ? code[(place.first * WAY + n) * LATENT + l] : 0;
            shared.codes[n * LONG + l] = code_now[k];
        });
        block_sync();

#pragma unroll 1
        for (int step = 0; step < LATENT_STEPS; ++step) {
            Inputs x = of_latent(step);
            if (step == LATENT_STEPS - 1) prefetch_mean(to_mean);
            decode_scale(shared.codes.at, shared.raw_scale, own);
            shared.read_noise(place, turns, slope);
            each([&](int tile, int j) {
                Slopes s = slopes(own[tile][j]);
                own[tile][j] = s.scale * slope[tile][j];
                slope[tile][j] *= s.slope;
            });
            x.wait(turns);
            x.dots(own, shared.codes.at);
            shared.softmax(place, step, probabilities);
            shared.fetch_noise(place, noise, step + 1);
            x.rows(shared.residuals.at, own);
            each([&](int tile, int j) { own[tile][j] *= slope[tile][j]; });
            float sums[LATENT_EIGHTS][4];
            encode_scale(own, shared.raw_scale, sums);
            x.project(shared.residuals.at, sums);
            each_number(place, [&](int k, int, int, bool) { gradient[k] = 0; });
            shared.gather_codes(sums, gradient);
            step + 1 < LATENT_STEPS ? of_latent(step + 1).fetch() : of_finetune(0).fetch();
            each_number(place, [&](int k, int n, int l, bool has) {
                int at = place.row(n, LATENT_STEPS, step) * LATENT + l;
                if (has) codes[at] = code_now[k], gradients[at] = gradient[k];
                code_now[k] -= shared.latent_rates[l] * gradient[k];
                shared.codes[n * LONG + l] = code_now[k];
            });
            block_sync();
        }

        each_number(place, [&](int k, int n, int l, bool has) {
            if (has) adapted[(place.first * WAY + n) * LATENT + l] = code_now[k];
        });
        decode_scale(shared.codes.at, shared.raw_scale, own);
        shared.read_noise(place, turns, slope);
        block_sync();  // all have read the noise
        of_finetune(1).fetch();
        each([&](int tile, int j) { own[tile][j] = slopes(own[tile][j]).scale * slope[tile][j]; });
        decode_mean(shared.codes.at, to_mean + run() * LATENT * DIM, own);
        place.write(decoded, 1, 0, own);

#pragma unroll 1
        for (int step = 0; step < FINETUNE_STEPS; ++step) {
            Inputs x = of_finetune(step);
            x.wait(turns);
            x.dots(own, nullptr);
            shared.softmax(place, LATENT_STEPS + step, probabilities);
            x.rows(shared.residuals.at, slope);
            each_four([&](int, int d, int tile, int j) {
                float4 rate = four(shared.finetune_rates.at + d), weight = take(own, tile, j), by = take(slope, tile, j);
                weight.x -= rate.x * by.x, weight.y -= rate.y * by.y, weight.z -= rate.z * by.z, weight.w -= rate.w * by.w;
                put(own, tile, j, weight);
            });
            block_sync();  // all have read the inputs
            of_finetune(step + 2).fetch();
        }
        place.write(tuned, 1, 0, own);
    }
}

KERNEL adapt_backward(
    const float* to_mean, const float* to_raw_scale, const float* latent_step_size, const float* finetune_step_size,
    const float* latent_inputs, const float* finetune_inputs, const float* projected, const float* noise,
    const float* targets, const float* share, const float* gradients, const float* probabilities, const float* codes,
    const float* adapted, const float* of_adapted, const float* of_decoded,
    const float* of_tuned,  // results follow
    float* of_code, float* of_latent_step_size, float* of_finetune_step_size, float* of_gradients, float* of_logits,
    float* rights, float* of_means, int tasks
) {
    SHARED(Shared, shared);
    Weights own, rest, slope;
    float of_code_now[CODE_SHARE], of_step_size[CODE_SHARE], probabilities_then[PAIR_SHARE];

    Turns turns;
    shared.open();
#pragma unroll 1
    for (int pass = 0; pass < passes(tasks); ++pass) {
        const Place place(pass, tasks);
        if (place.tasks <= 0) break;
        auto of_latent = [&](int step) { return Inputs{place, shared, latent_inputs, projected, LATENT_STEPS, step}; };
        auto of_finetune = [&](int step) { return Inputs{place, shared, finetune_inputs, nullptr, FINETUNE_STEPS, step}; };
        rows_stored();
        of_finetune(FINETUNE_STEPS - 1).fetch();
        of_finetune(FINETUNE_STEPS - 2).fetch();
        place.read(of_tuned, 1, 0, own);
        shared.read_probabilities(place, STEPS - 1, probabilities, probabilities_then);
        shared.copy_codes(place, shared.codes.at, adapted, 1, 0);
        shared.copy_step_then(place, codes, gradients, LATENT_STEPS - 1);
        place.prefetch_weights(of_decoded);
        if (pass == 0) shared.load_learner(to_raw_scale, latent_step_size, finetune_step_size);
        shared.load_targets(place, targets, share);
        each([&](int tile, int j) { slope[tile][j] = 0; });  // here: ∂/∂(step sizes)
        copies_done();
        block_sync();

#pragma unroll 1
        for (int step = FINETUNE_STEPS - 1; step >= 0; --step) {
            Inputs x = of_finetune(step);
            if (step == (FINETUNE_STEPS > 1)) prefetch_mean(to_mean);
            shared.remember(place, probabilities_then);
            shared.read_probabilities(place, LATENT_STEPS + step - 1, probabilities, probabilities_then);
            each_four([&](int, int d, int tile, int j) {
                float4 rate = four(shared.finetune_rates.at + d), weight = take(own, tile, j);
                put(rest, tile, j, {-rate.x * weight.x, -rate.y * weight.y, -rate.z * weight.z, -rate.w * weight.w});
            });
            x.wait(turns);
            x.dots(rest, nullptr);
            shared.softmax_backward(place, LATENT_STEPS + step, of_logits);
            x.rows(shared.residuals.at, rest);
            each([&](int tile, int j) { slope[tile][j] -= own[tile][j] * rest[tile][j]; });
            x.rows(shared.of_logits.at, rest);
            each([&](int tile, int j) { own[tile][j] += rest[tile][j]; });
            block_sync();  // all have read the inputs
            of_finetune(step - 2).fetch();
        }
        shared.fetch_noise(place, noise, LATENT_STEPS);
        place.read(of_decoded, 1, 0, rest);
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

        float sums[LATENT_EIGHTS][4];
        each([&](int tile, int j) { own[tile][j] += rest[tile][j]; });
        shared.stage(place, shared.inputs.at, own);
        decode_scale(shared.codes.at, shared.raw_scale, rest);
        shared.read_noise(place, turns, slope);
        each([&](int tile, int j) { rest[tile][j] = own[tile][j] * slopes(rest[tile][j]).slope * slope[tile][j]; });
        shared.stage(place, shared.wide.at, rest);
        each_number(place, [&](int k, int n, int l, bool has) {
            of_code_now[k] = has ? of_adapted[(place.first * WAY + n) * LATENT + l] : 0;
            of_step_size[k] = 0;
        });
        encode_scale(rest, shared.raw_scale, sums);
        encode_mean(own, to_mean + run() * LATENT * DIM, sums);
        shared.gather_codes(sums, of_code_now);
        shared.store(place, shared.wide.at, rights, 2 * LATENT_STEPS + 1, 2 * LATENT_STEPS);
        rows_stored();
        shared.fetch_noise(place, noise, LATENT_STEPS - 1);
        shared.store(place, shared.inputs.at, of_means, 1, 0);
        if (pass + 1 < passes(tasks)) Place(pass + 1, tasks).prefetch_weights(of_tuned);
#pragma unroll 1
        for (int step = LATENT_STEPS - 1; step >= 0; --step) {
            Inputs x = of_latent(step);
            Weights raw;
            each_number(place, [&](int k, int n, int l, bool has) {
                float of_gradient = -shared.latent_rates[l] * of_code_now[k];
                shared.codes[n * LONG + l] = of_gradient;
                if (has) of_step_size[k] -= of_code_now[k] * shared.gradients_then[n * LONG + l];
                if (has) of_gradients[place.row(n, LATENT_STEPS, step) * LATENT + l] = of_gradient;
            });
            shared.remember(place, probabilities_then);
            shared.read_probabilities(place, step - 1, probabilities, probabilities_then);
            block_sync();
            decode_scale(shared.codes_then.at, shared.raw_scale, raw);
            rows_stored();
            x.fetch();
            shared.read_noise(place, turns, slope);
            each([&](int tile, int j) {
                Slopes s = slopes(raw[tile][j]);
                raw[tile][j] = s.bend * slope[tile][j];
                slope[tile][j] *= s.slope;
            });
            decode_scale(shared.codes.at, shared.raw_scale, own);
            each([&](int tile, int j) {
                raw[tile][j] *= own[tile][j];
                own[tile][j] *= slope[tile][j];
            });
            x.wait(turns);
            x.rows(shared.residuals.at, rest);
            each([&](int tile, int j) {
                float of_weights = rest[tile][j];
                rest[tile][j] = raw[tile][j] * of_weights;
                raw[tile][j] = of_weights * slope[tile][j];
            });
            shared.stage(place, shared.wide.at, raw);
            x.dots(own, shared.codes.at);
            shared.softmax_backward(place, step, of_logits);
            shared.store(place, shared.wide.at, rights, 2 * LATENT_STEPS + 1, 2 * step);
            shared.copy_step_then(place, codes, gradients, step - 1);
            x.rows(shared.of_logits.at, own);
            each([&](int tile, int j) { own[tile][j] = rest[tile][j] + own[tile][j] * slope[tile][j]; });
            shared.stage(place, shared.inputs.at, own);
            encode_scale(own, shared.raw_scale, sums);
            x.project(shared.of_logits.at, sums);
            copies_done();
            shared.gather_codes(sums, of_code_now);
            rows_stored();
            if (step > 0) shared.fetch_noise(place, noise, step - 1);
            shared.store(place, shared.inputs.at, rights, 2 * LATENT_STEPS + 1, 2 * step + 1);
        }
        each_number(place, [&](int k, int n, int l, bool has) {
            int at = (place.first * WAY + n) * LATENT + l;
            if (has) of_code[at] = of_code_now[k], of_latent_step_size[at] = of_step_size[k];
        });
    }
    rows_stored();
}

HANDLER(PROBLEM(many_runs_forward), adapt_forward, blocks_of_run(runs, tasks), tasks)
HANDLER(PROBLEM(many_runs_backward), adapt_backward, blocks_of_run(runs, tasks), tasks)
