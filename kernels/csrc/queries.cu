// The query loss of a linear classifier, and its gradient: a block has a task and takes its queries sixteen at a time. The
// rows of a table that the queries are stay where they are, and are read once.
//
// Weights are in registers as in `weights.cuh`; of the inputs a thread copies and drops what it reads for the logits.
// Dropout is that of `randomness.masks`. EXAMPLES are queries.

constexpr int CLUSTER = 1, THREADS = 256;

#include "random.cuh"
#include "weights.cuh"

constexpr int TAKEN = 16, TURNS = (EXAMPLES + TAKEN - 1) / TAKEN;
constexpr int WIDE = DIM + 4, BROAD = TAKEN + 8;  // of rows in shared memory
constexpr int WAY_EIGHTS = (WAY + 7) / 8;

static_assert(WAY <= ROWS, "how the classes are cut");

struct Shared {
    Array<2 * TAKEN * WIDE> inputs;  // these, and the next ones
    Array<WARPS * TAKEN * WAY> logits;
    Array<ROWS * BROAD> residuals;
    Array<TAKEN> losses, correct;
    Array<PAIRS> targets;
    Array<EXAMPLES> share;
    alignas(16) int rows[EXAMPLES];

    __device__ float* input(int turn, int e) { return inputs.at + (turn % 2 * TAKEN + e) * WIDE; }
};

constexpr int SHARED_BYTES = sizeof(Shared), RESIDENT = 2 * SHARED_BYTES <= MOST_SHARED ? 2 : 1;

// A thread's own of the inputs, which is what it reads of them in `sum_features`: which of the examples, and from which
// feature on.
template <class Use>
__device__ inline void each_own(Use use) {
#pragma unroll
    for (int eight = 0; eight < TAKEN / 8; ++eight)
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad)
            use(8 * eight + example_of(group()), (warp() * QUADS + quad) * 16 + 4 * member());
}

KERNEL judge(
    const float* weights, const unsigned* keys, const float* keep, const float* targets, const float* share, const int* rows,
    const float* table,  // results follow
    float* losses, float* accuracies, float* of_weights
) {
    SHARED(Shared, shared);
    int task = run() * clusters() + cluster();
    Stream stream(keys + 2 * task, QUERY);
    float kept = keep[task], scale = kept > 0 ? 1 / kept : 0, loss = 0, correct = 0;
    unsigned last = static_cast<unsigned>(rintf(kept * 0x1p24f)) * 256 - 1;  // of the words whose feature is kept
    Weights left, sums;

    auto fetch = [&](int turn) {
        each_own([&](int e, int d) {
            int query = turn * TAKEN + e < EXAMPLES ? turn * TAKEN + e : 0;  // whose residuals are zero there
            copy_four(shared.input(turn, e) + d, table + static_cast<long long>(shared.rows[query]) * DIM + d);
        });
    };
    auto drop = [&](int turn) {
        each_own([&](int e, int d) {
            unsigned position = (turn * TAKEN + e) * DIM + d;
            float4& x = *reinterpret_cast<float4*>(shared.input(turn, e) + d);
            auto factor = [&](int i) { return stream.leading(position + i) <= last ? scale : 0; };
            x = {x.x * factor(0), x.y * factor(1), x.z * factor(2), x.w * factor(3)};
        });
    };

    for (int i = thread(); i < EXAMPLES; i += THREADS) shared.rows[i] = rows[task * EXAMPLES + i];
    for (int i = thread(); i < EXAMPLES; i += THREADS) shared.share[i] = share[task * EXAMPLES + i];
    for (int i = thread(); i < PAIRS; i += THREADS) shared.targets[i] = targets[task * PAIRS + i];
    for (int i = thread(); i < ROWS * BROAD; i += THREADS) shared.residuals[i] = 0;
    each_four([&](int i, int d, int tile, int j) {
        int n = group() + 8 * i;
        put(sums, tile, j, n < WAY ? four(weights + (task * WAY + n) * DIM + d) : float4{0, 0, 0, 0});
    });
    turn(sums, left);
    each([&](int tile, int j) { sums[tile][j] = 0; });
    block_sync();
    fetch(0);

#pragma unroll 1
    for (int turn = 0; turn < TURNS; ++turn) {
        copies_done();
        drop(turn);
        if (turn + 1 < TURNS) fetch(turn + 1);
#pragma unroll
        for (int eight = 0; eight < TAKEN / 8; ++eight) {
            float parts[4] = {};
            sum_features(left, shared.input(turn, 8 * eight + example_of(group())), parts);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int n = group() + j / 2 * 8, e = 8 * eight + example_of(2 * member() + j % 2);
                if (n < WAY) shared.logits[(warp() * TAKEN + e) * WAY + n] = parts[j];
            }
        }
        block_sync();
        for (int first = 0; first < TAKEN; first += THREADS / GROUP) {
            int e = first + thread() / GROUP, query = turn * TAKEN + e;
            if (e >= TAKEN) break;
            bool seen = query < EXAMPLES;
            float logits[WAY_EIGHTS], most = -3e38f, asked = -3e38f, its_share = seen ? shared.share[query] : 0;
#pragma unroll
            for (int j = 0; j < WAY_EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                bool has = seen && n < WAY;
                float sum = 0;
#pragma unroll
                for (int other = 0; other < WARPS; ++other) sum += has ? shared.logits[(other * TAKEN + e) * WAY + n] : 0;
                logits[j] = has ? sum : -3e38f;
                most = fmaxf(most, logits[j]), asked = fmaxf(asked, has ? shared.targets[query * WAY + n] : -3e38f);
            }
            most = most_of_eight(most), asked = most_of_eight(asked);
            float total = log_total(logits), most_at = -WAY, asked_at = -WAY;  // of the first of each, what it lacks of 0
#pragma unroll
            for (int j = 0; j < WAY_EIGHTS; ++j) {
                int n = thread() % GROUP + j * GROUP;
                if (!seen || n >= WAY) continue;
                float target = shared.targets[query * WAY + n];
                if (logits[j] == most) most_at = fmaxf(most_at, -n);
                if (target == asked) asked_at = fmaxf(asked_at, -n);
                shared.residuals[n * BROAD + e] = its_share * (fast_exp(logits[j] - total) - target);
                loss += its_share * target * (total - logits[j]);
            }
            if (!seen)
                for (int n = thread() % GROUP; n < WAY; n += GROUP) shared.residuals[n * BROAD + e] = 0;
            bool right = most_of_eight(most_at) == most_of_eight(asked_at);
            if (thread() % GROUP == 0) correct += right ? its_share : 0;
        }
        block_sync();
        add_examples<TAKEN / 8>(shared.residuals.at, BROAD, [&](int e) { return shared.input(turn, e); }, sums);
    }

    each_four([&](int i, int d, int tile, int j) {
        int n = group() + 8 * i;
        if (n < WAY) *reinterpret_cast<float4*>(of_weights + (task * WAY + n) * DIM + d) = take(sums, tile, j);
    });
    loss = sum_of_eight(loss);
    if (thread() % GROUP == 0 && thread() / GROUP < TAKEN)
        shared.losses[thread() / GROUP] = loss, shared.correct[thread() / GROUP] = correct;
    block_sync();
    if (thread() == 0) {
        loss = correct = 0;
        for (int e = 0; e < TAKEN; ++e) loss += shared.losses[e], correct += shared.correct[e];
        losses[task] = loss, accuracies[task] = correct;
    }
}

#define NAME_OF(way, examples, dim) judge_queries_##way##_##examples##_##dim
#define WITH_NUMBERS(...) NAME_OF(__VA_ARGS__)
HANDLER(WITH_NUMBERS(WAY, EXAMPLES, DIM), judge, tasks)
