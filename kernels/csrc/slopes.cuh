// What both ways to cut the inner loop share: its steps, and σ.
//
// Also constant: LATENT, LATENT_STEPS, FINETUNE_STEPS, OFFICIAL.
#pragma once

#include "common.cuh"

// What XLA knows a kernel as, for this problem.
#define NAME_OF(name, way, examples, latent, dim, latent_steps, finetune_steps, official) \
    name##_##way##_##examples##_##latent##_##dim##_##latent_steps##_##finetune_steps##_##official
#define WITH_NUMBERS(...) NAME_OF(__VA_ARGS__)
#define PROBLEM(name) WITH_NUMBERS(name, WAY, EXAMPLES, LATENT, DIM, LATENT_STEPS, FINETUNE_STEPS, OFFICIAL)

constexpr double root(double x) {
    double y = 1;
    for (int i = 0; i < 60; ++i) y = (y + x / y) / 2;
    return y;
}

constexpr float INITIAL = root(2. / (WAY + DIM));  // σ where the decoder says 0
constexpr int STEPS = LATENT_STEPS + FINETUNE_STEPS, CODES = WAY * LATENT;

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
