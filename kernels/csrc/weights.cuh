// Weights in registers, sixteen rows of them: the sums of one product are laid out as the first factor of the next. Each warp
// has QUADS times sixteen of the features.
#pragma once

#include "common.cuh"

constexpr int ROWS = 16, QUADS = DIM / WARPS / 16, TILES = 2 * QUADS;

static_assert(DIM % (16 * WARPS) == 0, "how the features are cut");

// What a thread has of the weights: of rows `group` and `group` + 8, and of every sixteen features four in a row. Column c
// of a product is feature 2 c in one tile and 2 c + 1 in the next; a thread has columns 2 `member` and the one after it.
using Weights = float[TILES][4];

template <class Use>
__device__ inline void each(Use use) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int j = 0; j < 4; ++j) use(tile, j);
}

// Its fours: which of the rows, from which feature on, and where they are.
template <class Use>
__device__ inline void each_four(Use use) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) use(i, (warp() * QUADS + quad) * 16 + member() * 4, 2 * quad, 2 * i);
}

__device__ inline void put(Weights& own, int tile, int j, float4 numbers) {
    own[tile][j] = numbers.x, own[tile + 1][j] = numbers.y, own[tile][j + 1] = numbers.z, own[tile + 1][j + 1] = numbers.w;
}

__device__ inline float4 take(const Weights& own, int tile, int j) {
    return {own[tile][j], own[tile + 1][j], own[tile][j + 1], own[tile + 1][j + 1]};
}

// Products. Two neighbours of eight numbers that are summed over belong to a thread.

struct Left {
    float at[4];
    // eight columns of sixteen rows in shared memory
    __device__ Left(const float* from, int stride) {
        float2 upper = two(from + group() * stride + member() * 2), lower = two(from + (group() + 8) * stride + member() * 2);
        at[0] = to_tf32(upper.x), at[1] = to_tf32(lower.x), at[2] = to_tf32(upper.y), at[3] = to_tf32(lower.y);
    }
    // the sums of another product
    __device__ Left(const float (&sums)[4]) : at{to_tf32(sums[0]), to_tf32(sums[2]), to_tf32(sums[1]), to_tf32(sums[3])} {}
};

// Two tiles of columns, from two rows of the right factor.
__device__ inline void multiply_columns(float (*sums)[4], const Left& left, float2 upper, float2 lower) {
    multiply(sums[0], left.at, upper.x, lower.x);
    multiply(sums[1], left.at, upper.y, lower.y);
}

// The sum over two tiles of the left factor, with four columns of the right one turned.
__device__ inline void multiply_turned(float (&sums)[4], const Left& first, const Left& second, float4 right) {
    multiply(sums, first.at, right.x, right.z);
    multiply(sums, second.at, right.y, right.w);
}

__device__ inline float2 rounded(float2 x) { return {to_tf32(x.x), to_tf32(x.y)}; }
__device__ inline float4 rounded(float4 x) { return {to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w)}; }

// The order of columns where examples are turned.
__device__ inline int example_of(int column) { return column / 2 + column % 2 * 4; }

// own += Σ_e r[n][e] x[e][d]; `row` says where the inputs of an example are.
template <int EIGHTS, class Row>
__device__ inline void add_examples(const float* r, int stride, Row row, Weights& own) {
#pragma unroll 2
    for (int eight = 0; eight < EIGHTS; ++eight) {
        Left left(r + 8 * eight, stride);
        const float *upper = row(8 * eight + 2 * member()), *lower = row(8 * eight + 2 * member() + 1);
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            int d = (warp() * QUADS + quad) * 16 + 2 * group();
            multiply_columns(own + 2 * quad, left, rounded(two(upper + d)), rounded(two(lower + d)));
        }
    }
}

// Weights as the first factor of products.
__device__ inline void turn(const Weights& own, Weights& left) {
    each([&](int tile, int j) { left[tile][j] = to_tf32(own[tile][j % 2 * 2 + j / 2]); });
}

// sums += Σ_d w[n][d] x[e][d] over the features of this warp, for eight examples of which this thread reads one
__device__ inline void sum_features(const Weights& left, const float* inputs, float (&sums)[4]) {
    float others[4] = {};  // in two rows of products, since each waits for the one before it
#pragma unroll
    for (int quad = 0; quad < QUADS; ++quad) {
        float4 right = rounded(four(inputs + (warp() * QUADS + quad) * 16 + 4 * member()));
        multiply(sums, left[2 * quad], right.x, right.z);
        multiply(others, left[2 * quad + 1], right.y, right.w);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[j] += others[j];
}
