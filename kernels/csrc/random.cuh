// The words of `randomness.py`, and the streams of `learners/learner.py`.
#pragma once

#include "cluster.cuh"

constexpr unsigned STEP = 0x9E3779B9, FIRST = 0x21F0AAAD, SECOND = 0x735A2D97;
constexpr unsigned QUERY = 1, WEIGHTS = 3;

struct Stream {
    unsigned start, second;

    __device__ Stream(const unsigned* key, unsigned number)
        : start(key[0] + key[1] * SECOND + number * (STEP * STEP)), second(key[1]) {}

    __device__ unsigned leading(unsigned position) const {
        unsigned x = position * STEP + start;
        x = (x ^ (x >> 16)) * FIRST + second;
        return (x ^ (x >> 15)) * SECOND;
    }
    __device__ unsigned word(unsigned position) const {
        unsigned x = leading(position);
        return x ^ (x >> 15);
    }
};
