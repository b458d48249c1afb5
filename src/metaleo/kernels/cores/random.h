// The words of `randomness.py`, and its normal numbers.
//
// Constants: GOLDEN, FIRST_FACTOR, SECOND_FACTOR.

#pragma once
#include "vectors.h"

struct Stream {
    uint32_t start, second;

    Stream(const uint32_t* key, uint32_t number)
        : start(key[0] + key[1] * SECOND_FACTOR + number * (GOLDEN * GOLDEN)), second(key[1]) {}

    // Of this position and those that follow.
    Words leading(uint32_t position) const {
        Words x;
        for (int i = 0; i < LANES; ++i) x[i] = i * GOLDEN;
        x += position * GOLDEN + start;
        x = (x ^ (x >> 16)) * FIRST_FACTOR + second;
        return (x ^ (x >> 15)) * SECOND_FACTOR;
    }
    Words words(uint32_t position) const {
        Words x = leading(position);
        return x ^ (x >> 15);
    }
};

// As floats, which have room for 24 bits.
inline Vector high_bits(Words words) { return __builtin_convertvector((Integers)(words >> 8), Vector); }
inline Vector unit(Words words) { return high_bits(words) * 0x1p-24f + 0x1p-25f; }

// In pairs: so many numbers, a multiple of 2 LANES.
inline void normals(const uint32_t* key, uint32_t number, long size, float* to) {
    Stream stream(key, number);
    long half = size / 2;
    for (long i = 0; i < half; i += LANES) {
        Vector radius = square_root(-2.f * logarithm(unit(stream.words(i))));
        Words word = stream.words(half + i);
        Vector angle = (unit(word) - 0.5f) * 1.57079633f, square = angle * angle;
        Vector sin = angle * (1.f + square * (-1.f / 6 + square * (1.f / 120 + square * (-1.f / 5040 + square * (1.f / 362880)))));
        Vector cos = 1.f + square * (-1.f / 2 + square * (1.f / 24 + square * (-1.f / 720 + square * (1.f / 40320))));
        Integers sideways = (word & 1) == 1;
        radius = where((word & 2) == 2, -radius, radius);
        store(to + i, radius * where(sideways, -sin, cos));
        store(to + half + i, radius * where(sideways, cos, sin));
    }
}
