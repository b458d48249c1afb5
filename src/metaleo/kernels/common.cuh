// What both ways to cut the inner loop share: σ and its slopes, and a thread's place in the products of its warp.
//
// Constants: WAY, EXAMPLES, LATENT, DIM, LATENT_STEPS, FINETUNE_STEPS, TASKS (that share a learner), THREADS, CLUSTER,
// SHARED_BYTES, OFFICIAL, INITIAL (σ where the decoder says 0).

constexpr int WARPS = THREADS / 32, STEPS = LATENT_STEPS + FINETUNE_STEPS;
constexpr int PAIRS = WAY * EXAMPLES, CODES = WAY * LATENT;
constexpr int GROUP = 8;  // threads to an example of a softmax

template <int SIZE>
struct alignas(16) Array {
    float at[SIZE];
    __device__ float& operator[](int i) { return at[i]; }
};

__device__ inline float2 two(const float* address) { return *reinterpret_cast<const float2*>(address); }
__device__ inline float4 four(const float* address) { return *reinterpret_cast<const float4*>(address); }

// A warp's products are shared by eight groups of four threads: `multiply` says how.
__device__ inline int warp() { return thread() / 32; }
__device__ inline int group() { return thread() % 32 / 4; }
__device__ inline int member() { return thread() % 4; }

// Over the eight threads of an example.
__device__ inline float sum_of_eight(float value) {
#pragma unroll
    for (int other = GROUP / 2; other > 0; other /= 2) value += shuffle_xor(value, other);
    return value;
}

__device__ inline float most_of_eight(float value) {
#pragma unroll
    for (int other = GROUP / 2; other > 0; other /= 2) value = fmaxf(value, shuffle_xor(value, other));
    return value;
}

// log Σ exp of an example's logits, a part of which each of eight threads has.
template <int PARTS>
__device__ inline float log_total(const float (&logits)[PARTS]) {
    float most = logits[0], sum = 0;
#pragma unroll
    for (int j = 1; j < PARTS; ++j) most = fmaxf(most, logits[j]);
    most = most_of_eight(most);
#pragma unroll
    for (int j = 0; j < PARTS; ++j) sum += fast_exp(logits[j] - most);
    return most + fast_log(sum_of_eight(sum));
}

struct Slopes {
    float scale, slope, bend;
};

// σ(raw), its first and its second derivative: `model/gaussian.py`.
__device__ inline Slopes slopes(float raw) {
#if OFFICIAL
    float growth = fast_exp(raw), scale = growth - (1 - INITIAL);
    float slope = scale > 1e-10f ? growth : 0;
    return {fmaxf(scale, 1e-10f), slope, slope};
#else
    float small = fast_exp(-fabsf(raw)), share = fast_divide(raw >= 0 ? 1 : small, 1 + small);
    float factor = INITIAL * 1.4426950408889634f;
    return {factor * (fmaxf(raw, 0) + fast_log(1 + small)), factor * share, factor * share * (1 - share)};
#endif
}
