// The query loss of a linear classifier, and its gradient: a block has a task, and each warp takes every WARPS-th query. The
// rows of a table that the queries are stay where they are, and are read once.
//
// A thread has so many fours of the features of the weights, and of their gradient; dropout is that of `randomness.masks`.
// Also constant: STREAM. DIM is a multiple of 128; EXAMPLES are queries.

constexpr int FOURS = DIM / 128;

__device__ inline int feature(int j) { return 128 * j + 4 * (thread() % 32); }

struct Shared {
    Array<WARPS * WAY * DIM> of_weights;
    Array<2 * WARPS * DIM> inputs;  // of a query of each warp, and of its next one
    Array<PAIRS> targets;
    Array<EXAMPLES> share;
    Array<WARPS> losses, correct;
    alignas(16) int rows[EXAMPLES];

    __device__ float* input(int e) { return inputs.at + (e / WARPS % 2 * WARPS + warp()) * DIM; }

    // Every thread has that copied which it reads itself.
    __device__ void fetch(int e, const float* table) {
        if (e >= EXAMPLES) return;
        const float* row = table + static_cast<long long>(rows[e]) * DIM;
#pragma unroll
        for (int j = 0; j < FOURS; ++j) copy_four(input(e) + feature(j), row + feature(j));
    }
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the launch reserves another amount of shared memory");

__device__ inline float sum_of_warp(float value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) value += shuffle_xor(value, other);
    return value;
}

__device__ inline float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }

__device__ inline void add(float4& to, float by, float4 numbers) {
    to.x += by * numbers.x, to.y += by * numbers.y, to.z += by * numbers.z, to.w += by * numbers.w;
}

KERNEL judge_queries(
    const float* weights, const unsigned* keys, const float* keep, const float* targets, const float* share, const int* rows,
    const float* table,  // results follow
    float* losses, float* accuracies, float* of_weights
) {
    SHARED(Shared, shared);
    int task = cluster();
    Stream stream(keys + 2 * task, STREAM);
    float kept = keep[task], scale = 1 / kept, loss = 0, correct = 0;
    unsigned limit = static_cast<unsigned>(rintf(kept * 0x1p24f));  // of the leading 24 bits
    float4 own[WAY][FOURS], sums[WAY][FOURS];
#pragma unroll
    for (int n = 0; n < WAY; ++n)
#pragma unroll
        for (int j = 0; j < FOURS; ++j) own[n][j] = four(weights + (task * WAY + n) * DIM + feature(j)), sums[n][j] = {0, 0, 0, 0};

    for (int i = thread(); i < PAIRS; i += THREADS) shared.targets[i] = targets[task * PAIRS + i];
    for (int i = thread(); i < EXAMPLES; i += THREADS) {
        shared.share[i] = share[task * EXAMPLES + i], shared.rows[i] = rows[task * EXAMPLES + i];
    }
    block_sync();
    shared.fetch(warp(), table);

#pragma unroll 1
    for (int e = warp(); e < EXAMPLES; e += WARPS) {
        float4 x[FOURS];
        copies_done();
#pragma unroll
        for (int j = 0; j < FOURS; ++j) x[j] = four(shared.input(e) + feature(j));
        shared.fetch(e + WARPS, table);
#pragma unroll
        for (int j = 0; j < FOURS; ++j) {
            unsigned position = e * DIM + feature(j);
            x[j].x = stream.word(position) >> 8 < limit ? x[j].x * scale : 0;
            x[j].y = stream.word(position + 1) >> 8 < limit ? x[j].y * scale : 0;
            x[j].z = stream.word(position + 2) >> 8 < limit ? x[j].z * scale : 0;
            x[j].w = stream.word(position + 3) >> 8 < limit ? x[j].w * scale : 0;
        }
        float logits[WAY], most = -3e38f, asked = -3e38f, total = 0, its_share = shared.share[e];
        int most_at = 0, asked_at = 0;
#pragma unroll
        for (int n = 0; n < WAY; ++n) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < FOURS; ++j) sum += dot(own[n][j], x[j]);
            logits[n] = sum;
        }
#pragma unroll
        for (int n = 0; n < WAY; ++n) logits[n] = sum_of_warp(logits[n]);
#pragma unroll
        for (int n = 0; n < WAY; ++n) {
            float target = shared.targets[e * WAY + n];
            if (logits[n] > most) most = logits[n], most_at = n;
            if (target > asked) asked = target, asked_at = n;
        }
#pragma unroll
        for (int n = 0; n < WAY; ++n) total += fast_exp(logits[n] - most);
        total = most + fast_log(total);
        correct += most_at == asked_at ? its_share : 0;
#pragma unroll
        for (int n = 0; n < WAY; ++n) {
            float target = shared.targets[e * WAY + n];
            float residual = its_share * (fast_exp(logits[n] - total) - target);
            loss += its_share * target * (total - logits[n]);
#pragma unroll
            for (int j = 0; j < FOURS; ++j) add(sums[n][j], residual, x[j]);
        }
    }
#pragma unroll
    for (int n = 0; n < WAY; ++n)
#pragma unroll
        for (int j = 0; j < FOURS; ++j)
            *reinterpret_cast<float4*>(shared.of_weights.at + (warp() * WAY + n) * DIM + feature(j)) = sums[n][j];
    if (thread() % 32 == 0) shared.losses[warp()] = loss, shared.correct[warp()] = correct;
    block_sync();
    for (int i = 4 * thread(); i < WAY * DIM; i += 4 * THREADS) {
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int other = 0; other < WARPS; ++other) add(sum, 1, four(shared.of_weights.at + other * WAY * DIM + i));
        *reinterpret_cast<float4*>(of_weights + task * WAY * DIM + i) = sum;
    }
    if (thread() == 0) {
        loss = correct = 0;
        for (int other = 0; other < WARPS; ++other) loss += shared.losses[other], correct += shared.correct[other];
        losses[task] = loss, accuracies[task] = correct;
    }
}
