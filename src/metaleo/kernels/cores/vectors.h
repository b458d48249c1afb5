// Vectors as wide as the processor has them, products of matrices, exponentials and logarithms.
//
// Matrices are rows one after the other. Rows are a multiple of LANES long, except those of the left factor of a product.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, PANEL = 4, DOTS = 5;
#elif defined(__AVX__)
constexpr int LANES = 8, PANEL = 2, DOTS = 3;
#else
constexpr int LANES = 4, PANEL = 4, DOTS = 5;
#endif
// So that what is summed up stays in registers, ROWS × PANEL vectors of it or DOTS × DOTS.
constexpr int ROWS = 6;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef float Anywhere __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const Anywhere*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<Anywhere*>(to) = value; }
inline Vector all(float value) { return value - Vector{}; }
inline Vector where(Integers condition, Vector yes, Vector no) { return condition ? yes : no; }

inline float sum(Vector value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(value);
#else
    float total = 0;
    for (int i = 0; i < LANES; ++i) total += value[i];
    return total;
#endif
}

// Room for so many floats, the thread's own; what was in it before is lost.
inline float* room(long floats) {
    static thread_local std::unique_ptr<float[]> memory;
    static thread_local long size = 0;
    if (floats + LANES > size) {
        size = floats + LANES;
        memory.reset(new float[size]);
    }
    return memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) / 4) % LANES;
}

template <int R, int V>
inline void tile(
    long inner, const float* a, long a_row, const float* b, long b_row, float* c, long c_row, bool add
) {
    Vector sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = add ? load(c + r * c_row + v * LANES) : Vector{};
    for (long k = 0; k < inner; ++k) {
        Vector row[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) row[v] = load(b + k * b_row + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            Vector factor = all(a[r * a_row + k]);
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] += factor * row[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * c_row + v * LANES, sums[r][v]);
}

template <int V>
inline void column(
    long rows, long inner, const float* a, long a_row, const float* b, long b_row, float* c, long c_row, bool add
) {
    long i = 0;
    for (; i + ROWS <= rows; i += ROWS) tile<ROWS, V>(inner, a + i * a_row, a_row, b, b_row, c + i * c_row, c_row, add);
    a += i * a_row, c += i * c_row;
    switch (rows - i) {
        case 5: return tile<5, V>(inner, a, a_row, b, b_row, c, c_row, add);
        case 4: return tile<4, V>(inner, a, a_row, b, b_row, c, c_row, add);
        case 3: return tile<3, V>(inner, a, a_row, b, b_row, c, c_row, add);
        case 2: return tile<2, V>(inner, a, a_row, b, b_row, c, c_row, add);
        case 1: return tile<1, V>(inner, a, a_row, b, b_row, c, c_row, add);
    }
}

// C = A B, or C += A B: rows × inner, inner × columns.
inline void product(long rows, long inner, long columns, const float* a, const float* b, float* c, bool add = false) {
    long j = 0;
    for (; j + PANEL * LANES <= columns; j += PANEL * LANES)
        column<PANEL>(rows, inner, a, inner, b + j, columns, c + j, columns, add);
    for (; j < columns; j += LANES) column<1>(rows, inner, a, inner, b + j, columns, c + j, columns, add);
}

// C = A Bᵀ + E Fᵀ: A and B have rows of one length, E and F of another; or the former alone.
inline void dots(
    long rows, long columns, long inner, const float* a, const float* b, float* c,
    long more = 0, const float* e = nullptr, const float* f = nullptr
) {
    for (long i = 0; i < rows; i += DOTS)
        for (long j = 0; j < columns; j += DOTS) {
            Vector sums[DOTS][DOTS] = {};
            auto add = [&](long length, const float* left, const float* right) {
                const float *lefts[DOTS], *rights[DOTS];
#pragma GCC unroll 8
                for (int n = 0; n < DOTS; ++n) {  // beyond the last one, that once more
                    lefts[n] = left + (i + n < rows ? i + n : rows - 1) * length;
                    rights[n] = right + (j + n < columns ? j + n : columns - 1) * length;
                }
                for (long k = 0; k < length; k += LANES) {
                    Vector own[DOTS];
#pragma GCC unroll 8
                    for (int n = 0; n < DOTS; ++n) own[n] = load(lefts[n] + k);
#pragma GCC unroll 8
                    for (int m = 0; m < DOTS; ++m) {
                        Vector other = load(rights[m] + k);
#pragma GCC unroll 8
                        for (int n = 0; n < DOTS; ++n) sums[n][m] += own[n] * other;
                    }
                }
            };
            add(inner, a, b);
            if (more) add(more, e, f);
            for (int n = 0; n < DOTS && i + n < rows; ++n)
                for (int m = 0; m < DOTS && j + m < columns; ++m) c[(i + n) * columns + j + m] = sum(sums[n][m]);
        }
}

inline void transpose(long rows, long columns, const float* from, float* to) {
    constexpr int BLOCK = 16;
    for (long i = 0; i < rows; i += BLOCK)
        for (long j = 0; j < columns; j += BLOCK)
            for (long k = j; k < j + BLOCK && k < columns; ++k)
                for (long l = i; l < i + BLOCK && l < rows; ++l) to[k * rows + l] = from[l * columns + k];
}

// eˣ, to some units in the last place: 2ⁿ times a series for what is left, at most half a logarithm of two.
inline Vector exponential(Vector x) {
    Integers beyond = x > 88.7f;
    x = where(x < -87.f, all(-87.f), x);
    Vector shifted = x * 1.44269504f + 12582912.f;  // 1.5 · 2²³: rounds to an integer, in the last bits
    Vector whole = shifted - 12582912.f;
    Vector rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector series = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.f;
    Vector power = (Vector)(((Integers)shifted + 127) << 23);
    return where(beyond, all(INFINITY), series * power);
}

// log(1 + x) for x between -1/2 and 1, as 2 artanh(x / (2 + x)).
inline Vector log_one_plus(Vector x) {
    Vector ratio = x / (2.f + x), square = ratio * ratio;
    Vector series = square * (1.f / 13) + 1.f / 11;
    series = series * square + 1.f / 9;
    series = series * square + 1.f / 7;
    series = series * square + 1.f / 5;
    series = series * square + 1.f / 3;
    return 2.f * ratio * (series * square + 1.f);
}

// Of positive numbers that are no denormals.
inline Vector logarithm(Vector x) {
    Integers exponent = ((Integers)x - 0x3f400000) >> 23;  // what is left is from 0.75 to 1.5
    Vector rest = (Vector)((Integers)x - (exponent << 23));
    return __builtin_convertvector(exponent, Vector) * 0.693147181f + log_one_plus(rest - 1.f);
}

inline Vector square_root(Vector x) {
    for (int i = 0; i < LANES; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
}
