// The query loss of a linear classifier and its gradient, a few queries at a time: rows of a table, read where they lie.

#pragma once
#include "random.h"

struct Queries {
    long way, queries, dim;
    uint32_t stream;
};

inline void judge_task(
    const Queries& n, const float* weights, const uint32_t* key, float keep, const float* targets, const float* share,
    const int32_t* rows, const float* table, float* loss, float* right, float* of_weights
) {
    constexpr long TAKEN = 2 * DOTS;
    float *inputs = room(TAKEN * n.dim + 2 * n.way * TAKEN), *logits = inputs + TAKEN * n.dim;
    float* residuals = logits + n.way * TAKEN;
    Stream stream(key, n.stream);
    Vector below = all(std::nearbyint(keep * 0x1p24f));
    float scale = 1 / keep;
    *loss = *right = 0;
    std::memset(of_weights, 0, sizeof(float) * n.way * n.dim);
    for (long first = 0; first < n.queries; first += TAKEN) {
        long taken = n.queries - first < TAKEN ? n.queries - first : TAKEN;
        for (long e = 0; e < taken; ++e) {
            const float* row = table + rows[first + e] * n.dim;
            const float* next = first + e + TAKEN < n.queries ? table + rows[first + e + TAKEN] * n.dim : row;
            for (long d = 0; d < n.dim; d += LANES) {
                __builtin_prefetch(next + d, 0, 2);  // not so near that it is in the way
                Integers kept = high_bits(stream.leading((first + e) * n.dim + d)) < below;
                store(inputs + e * n.dim + d, where(kept, load(row + d) * scale, Vector{}));
            }
        }
        dots(n.way, taken, n.dim, weights, inputs, logits);
        for (long e = 0; e < taken; ++e) {
            const float* target = targets + (first + e) * n.way;
            float total = 0, missed = 0;
            long most = 0, asked = 0;
            for (long c = 1; c < n.way; ++c) {
                if (logits[c * taken + e] > logits[most * taken + e]) most = c;
                if (target[c] > target[asked]) asked = c;
            }
            for (long c = 0; c < n.way; ++c)
                total += residuals[c * taken + e] = std::exp(logits[c * taken + e] - logits[most * taken + e]);
            float log_total = std::log(total) + logits[most * taken + e];
            for (long c = 0; c < n.way; ++c) {
                missed += target[c] * (log_total - logits[c * taken + e]);
                residuals[c * taken + e] = share[first + e] * (residuals[c * taken + e] / total - target[c]);
            }
            *loss += share[first + e] * missed;
            *right += most == asked ? share[first + e] : 0;
        }
        product(n.way, taken, n.dim, residuals, inputs, of_weights, true);
    }
}
