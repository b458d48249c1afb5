// Normal numbers in pairs, as `randomness.normals` has them: a thread draws four pairs, for both halves of a task's numbers.
//
// Also constant: SIZE, a multiple of eight; PARTS, the blocks of a task; STREAM.

constexpr int HALF = SIZE / 2;

__device__ inline float unit(unsigned word) { return static_cast<float>(word >> 8) * 0x1p-24f + 0x1p-25f; }

__device__ inline float2 on_the_circle(unsigned word) {
    float angle = (unit(word) - 0.5f) * 1.5707963267948966f, square = angle * angle;
    float sin = angle * (1 + square * (-1.f / 6 + square * (1.f / 120 + square * (-1.f / 5040 + square * (1.f / 362880)))));
    float cos = 1 + square * (-1.f / 2 + square * (1.f / 24 + square * (-1.f / 720 + square * (1.f / 40320))));
    float sign = word & 2 ? -1.f : 1.f;
    return word & 1 ? float2{-sign * sin, sign * cos} : float2{sign * cos, sign * sin};
}

KERNEL draw_normals(const unsigned* keys, float* numbers) {
    int task = cluster() / PARTS, first = (cluster() % PARTS * THREADS + thread()) * 4;
    if (first >= HALF) return;
    Stream stream(keys + 2 * task, STREAM);
    float cosines[4], sines[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float radius = fast_root(-2 * logf(unit(stream.word(first + i))));
        float2 direction = on_the_circle(stream.word(HALF + first + i));
        cosines[i] = radius * direction.x, sines[i] = radius * direction.y;
    }
    float* to = numbers + static_cast<long long>(task) * SIZE + first;
    *reinterpret_cast<float4*>(to) = {cosines[0], cosines[1], cosines[2], cosines[3]};
    *reinterpret_cast<float4*>(to + HALF) = {sines[0], sines[1], sines[2], sines[3]};
}
