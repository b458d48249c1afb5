// The loss of linear classifiers on query sets, and its gradient, while the inputs are at hand: a block for each task.
//
// Inputs come sixteen rows at a time, and are multiplied as they come; the loss follows, and then the gradient, from the
// same rows. DIM is a multiple of 16 WARPS.

constexpr int EIGHTS = (EXAMPLES + 7) / 8, LOTS = (EXAMPLES + 15) / 16, WAY_EIGHTS = (WAY + 7) / 8;
constexpr int WIDE = DIM + 4, BROAD = 8 * EIGHTS + 8;  // rows begin in different banks

static_assert(WAY <= ROWS && EXAMPLES <= THREADS, "how a task is cut");

struct Shared {
    Array<EXAMPLES * WIDE> inputs;
    Array<WARPS * PAIRS> of_warps;
    Array<ROWS * BROAD> residuals;
    Array<EXAMPLES> losses, hits;
    Arrival of_inputs[LOTS];

    __device__ const float* row(int e) const { return inputs.at + (e < EXAMPLES ? e : 0) * WIDE; }
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the launch reserves another amount of shared memory");

// Which of an example's numbers is the largest, the first of equals; a part of them each of eight threads has.
__device__ inline float place_of_most(const float (&numbers)[WAY_EIGHTS]) {
    float most = numbers[0], place = -3e38f;
#pragma unroll
    for (int j = 1; j < WAY_EIGHTS; ++j) most = fmaxf(most, numbers[j]);
    most = most_of_eight(most);
#pragma unroll
    for (int j = 0; j < WAY_EIGHTS; ++j)
        if (numbers[j] == most) place = fmaxf(place, -(thread() % GROUP + j * GROUP));
    return most_of_eight(place);
}

// `share`: what an example counts in the means.
KERNEL judge(
    const float* weights, const float* inputs, const float* targets, const float* share,  // results follow
    float* loss, float* accuracy, float* of_logits, float* of_weights
) {
    SHARED(Shared, shared);
    const int task = cluster();
    if (thread() == 0)
        for (int lot = 0; lot < LOTS; ++lot) shared.of_inputs[lot].open();
    for (int i = thread(); i < ROWS * BROAD; i += THREADS) shared.residuals[i] = 0;
    block_sync();
    if (thread() < EXAMPLES) {
        int e = thread(), left = EXAMPLES - e;
        if (e % 16 == 0) shared.of_inputs[e / 16].expect((left < 16 ? left : 16) * DIM);
        copy_row(shared.inputs.at + e * WIDE, inputs + (task * EXAMPLES + e) * DIM, DIM, shared.of_inputs[e / 16]);
    }
    Weights own;
    each_four([&](int i, int d, int tile, int j) {
        int n = group() + 8 * i;
        put(own, tile, j, four(weights + (task * WAY + (n < WAY ? n : 0)) * DIM + d));
    });

#pragma unroll 2
    for (int eight = 0; eight < EIGHTS; ++eight) {
        float sums[4] = {};
        if (eight % 2 == 0) shared.of_inputs[eight / 2].wait(0);
        sum_features(own, shared.row(8 * eight + example_of(group())), sums);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int n = group() + j / 2 * 8, e = 8 * eight + example_of(2 * member() + j % 2);
            if (e < EXAMPLES && n < WAY) shared.of_warps[warp() * PAIRS + e * WAY + n] = sums[j];
        }
    }
    block_sync();

    for (int first = 0; first < EXAMPLES; first += THREADS / GROUP) {
        int e = first + thread() / GROUP;
        float logits[WAY_EIGHTS], of_classes[WAY_EIGHTS], its_loss = 0, its_share = e < EXAMPLES ? share[task * EXAMPLES + e] : 0;
#pragma unroll
        for (int j = 0; j < WAY_EIGHTS; ++j) {
            int n = thread() % GROUP + j * GROUP;
            bool mine = e < EXAMPLES && n < WAY;
            logits[j] = mine ? 0 : -3e38f;
            of_classes[j] = mine ? targets[(task * EXAMPLES + e) * WAY + n] : -3e38f;
            for (int other = 0; mine && other < WARPS; ++other) logits[j] += shared.of_warps[other * PAIRS + e * WAY + n];
        }
        float total = log_total(logits);
        bool hit = place_of_most(logits) == place_of_most(of_classes);
#pragma unroll
        for (int j = 0; j < WAY_EIGHTS; ++j) {
            int n = thread() % GROUP + j * GROUP;
            if (e >= EXAMPLES || n >= WAY) continue;
            float residual = its_share * (fast_exp(logits[j] - total) - of_classes[j]);
            shared.residuals[n * BROAD + e] = residual;
            of_logits[(task * EXAMPLES + e) * WAY + n] = residual;
            its_loss += of_classes[j] * (total - logits[j]);
        }
        its_loss = sum_of_eight(its_loss);
        if (e < EXAMPLES && thread() % GROUP == 0) shared.losses[e] = its_share * its_loss, shared.hits[e] = hit ? its_share : 0;
    }
    block_sync();

    sum_examples<EIGHTS>(shared.residuals.at, BROAD, [&](int e) { return shared.row(e); }, own);
    each_four([&](int i, int d, int tile, int j) {
        int n = group() + 8 * i;
        if (n < WAY) *reinterpret_cast<float4*>(of_weights + (task * WAY + n) * DIM + d) = take(own, tile, j);
    });
    if (thread() < 2) {
        float sum = 0;
        for (int e = 0; e < EXAMPLES; ++e) sum += thread() == 0 ? shared.losses[e] : shared.hits[e];
        (thread() == 0 ? loss : accuracy)[task] = sum;
    }
}
