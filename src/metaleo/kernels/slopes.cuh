// What both ways to cut the inner loop share: its steps, and σ.
//
// Also constant: LATENT, LATENT_STEPS, FINETUNE_STEPS, OFFICIAL, INITIAL (σ where the decoder says 0).

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
