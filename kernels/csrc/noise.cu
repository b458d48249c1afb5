// Normal numbers in pairs, as `randomness.normals` has them: a thread draws four pairs, for both halves of a task's numbers.
// They are a multiple of eight.

constexpr int THREADS = 256, CLUSTER = 1, RESIDENT = 1, SHARED_BYTES = 0;

#include "random.cuh"

// Blocks of a task.
__host__ __device__ inline int parts(int size) { return (size + 8 * THREADS - 1) / (8 * THREADS); }

__device__ inline float unit(unsigned word) { return static_cast<float>(word >> 8) * 0x1p-24f + 0x1p-25f; }

__device__ inline float2 on_the_circle(unsigned word) {
    float angle = (unit(word) - 0.5f) * 1.5707963267948966f, square = angle * angle;
    float sin = angle * (1 + square * (-1.f / 6 + square * (1.f / 120 + square * (-1.f / 5040 + square * (1.f / 362880)))));
    float cos = 1 + square * (-1.f / 2 + square * (1.f / 24 + square * (-1.f / 720 + square * (1.f / 40320))));
    float sign = word & 2 ? -1.f : 1.f;
    return word & 1 ? float2{-sign * sin, sign * cos} : float2{sign * cos, sign * sin};
}

KERNEL draw(const unsigned* keys, float* numbers, int size) {
    int half = size / 2, of_task = parts(size), first = (cluster() % of_task * THREADS + thread()) * 4;
    int task = (run() * clusters() + cluster()) / of_task;
    if (first >= half) return;
    Stream stream(keys + 2 * task, WEIGHTS);
    float cosines[4], sines[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float radius = fast_root(-2 * logf(unit(stream.word(first + i))));
        float2 direction = on_the_circle(stream.word(half + first + i));
        cosines[i] = radius * direction.x, sines[i] = radius * direction.y;
    }
    float* to = numbers + static_cast<long long>(task) * size + first;
    *reinterpret_cast<float4*>(to) = {cosines[0], cosines[1], cosines[2], cosines[3]};
    *reinterpret_cast<float4*>(to + half) = {sines[0], sines[1], sines[2], sines[3]};
}

HANDLER(draw_normals, draw, tasks * parts(size), size)
