// Clipping and Adam in two passes over the memory: `outer_loop.make_optimiser`.

#pragma once
#include <vector>

#include "vectors.h"

struct Adam {
    float clip, first_decay, first_share, second_decay, second_share, small;  // a share is what its decay lacks of one
};

struct Leaf {
    long size;  // a multiple of LANES
    const float *gradient, *first, *second;
    float *direction, *new_first, *new_second;
};

// The two corrections are of the moments' bias. Returns whether all of the gradient is finite; otherwise nothing changes.
inline bool adam_step(Adam adam, const float* corrections, const std::vector<Leaf>& leaves) {
    auto clipped = [&](Vector x) {
        x = where(x > adam.clip, all(adam.clip), x);
        return where(x < -adam.clip, all(-adam.clip), x);
    };
    Vector squares = {}, zeros = {};
    for (const Leaf& leaf : leaves)
        for (long i = 0; i < leaf.size; i += LANES) {
            Vector x = load(leaf.gradient + i), within = clipped(x);
            squares += within * within, zeros += 0.f * x;
        }
    bool finite = sum(zeros) == 0;
    float by_first = 1 / corrections[0], by_second = 1 / corrections[1];
    float norm = std::sqrt(sum(squares)), scale = norm < adam.clip ? 1 : adam.clip / norm;
    for (const Leaf& leaf : leaves)
        for (long i = 0; i < leaf.size; i += LANES) {
            Vector first = load(leaf.first + i), second = load(leaf.second + i), direction = {};
            if (finite) {
                Vector x = scale * clipped(load(leaf.gradient + i));
                first = adam.first_decay * first + adam.first_share * x;
                second = adam.second_decay * second + adam.second_share * x * x;
                direction = by_first * first / (square_root(by_second * second) + adam.small);
            }
            store(leaf.new_first + i, first), store(leaf.new_second + i, second), store(leaf.direction + i, direction);
        }
    return finite;
}
