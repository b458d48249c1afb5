// What all kernels share: a thread's place in the products of its warp, and softmax.
//
// Constants of a problem: WAY, EXAMPLES, DIM.
#pragma once

#include "cluster.cuh"

constexpr int WARPS = THREADS / 32, PAIRS = WAY * EXAMPLES;
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
