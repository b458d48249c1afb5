// The inner loop of the tasks of a run, and the way back: `closed_form.py` has the same, with these names.
//
// Latent steps are taken by all tasks together, for the sake of their products with the decoder; fine-tuning steps by one
// task after the other.

#pragma once
#include <cmath>

#include "vectors.h"

struct Sizes {
    long tasks, way, examples, latent, dim, latent_steps, finetune_steps;

    long rows() const { return tasks * way; }
    long steps() const { return latent_steps + finetune_steps; }
};

struct Slopes {
    bool official;
    float initial;  // σ where the decoder says 0
};

struct Slope {
    Vector scale, slope, bend;
};

// σ(raw), its first and its second derivative: `model/gaussian.py`.
inline Slope slope_at(Slopes slopes, Vector raw) {
    if (slopes.official) {
        Vector growth = exponential(raw), scale = growth - (1 - slopes.initial);
        Vector slope = where(scale > 1e-10f, growth, Vector{});
        return {where(scale < 1e-10f, all(1e-10f), scale), slope, slope};
    }
    float factor = slopes.initial * 1.44269504f;
    Vector small = exponential(where(raw < 0.f, raw, -raw));
    Vector share = where(raw >= 0.f, all(1), small) / (1.f + small);
    Vector scale = where(raw > 0.f, raw, raw - raw) + log_one_plus(small);  // not a number where it is none
    return {factor * scale, factor * share, factor * share * (1.f - share)};
}

// What a run's tasks are given and share.
struct Given {
    const float *to_mean, *to_raw_scale, *step_size, *finetune_step_size;                  // of the learner
    const float *inputs, *finetune_inputs, *projected, *noise, *targets, *share;  // of each task
};

// Logits in place to probabilities; also the loss, and where it is asked for R = ∂loss/∂logits.
inline float softmax(const Sizes& n, const float* targets, const float* share, float* logits, float* residuals) {
    float loss = 0;
    for (long e = 0; e < n.examples; ++e) {
        float most = logits[e], total = 0, missed = 0;
        for (long c = 1; c < n.way; ++c) most = logits[c * n.examples + e] > most ? logits[c * n.examples + e] : most;
        for (long c = 0; c < n.way; ++c) total += residuals[c * n.examples + e] = std::exp(logits[c * n.examples + e] - most);
        float log_total = std::log(total) + most;
        for (long c = 0; c < n.way; ++c) {
            float &logit = logits[c * n.examples + e], target = targets[c * n.examples + e];
            missed += target * (log_total - logit);
            logit = residuals[c * n.examples + e] / total;
            residuals[c * n.examples + e] = share[e] * (logit - target);
        }
        loss += share[e] * missed;
    }
    return loss;
}

inline void residuals_of(const Sizes& n, const float* probabilities, const float* targets, const float* share, float* to) {
    for (long c = 0; c < n.way; ++c)
        for (long e = 0; e < n.examples; ++e)
            to[c * n.examples + e] = share[e] * (probabilities[c * n.examples + e] - targets[c * n.examples + e]);
}

// Of R in place to that of the logits, with what the loss itself adds.
inline void to_logits(
    const Sizes& n, float of_loss, const float* probabilities, const float* residuals, const float* share, float* gradient
) {
    for (long e = 0; e < n.examples; ++e) {
        float mean = 0;
        for (long c = 0; c < n.way; ++c) {
            gradient[c * n.examples + e] *= share[e];
            mean += probabilities[c * n.examples + e] * gradient[c * n.examples + e];
        }
        for (long c = 0; c < n.way; ++c) {
            float& of_logit = gradient[c * n.examples + e];
            of_logit = probabilities[c * n.examples + e] * (of_logit - mean) + of_loss * residuals[c * n.examples + e];
        }
    }
}

struct Path {
    float *adapted, *decoded, *tuned, *losses, *codes, *gradients, *probabilities, *raw;
};

inline void forward_of_run(const Sizes& n, Slopes slopes, const float* code_before, const Given& given, const Path& path) {
    long codes = n.way * n.latent, weights = n.way * n.dim, pairs = n.way * n.examples, seen = n.examples * n.dim;
    float* raw = room(n.rows() * (2 * n.dim + 2 * n.latent) + n.latent * n.dim + 2 * weights + pairs);
    float *pulled = raw + n.rows() * n.dim, *back_from_scale = pulled + n.rows() * n.dim;
    float *code = back_from_scale + n.latent * n.dim, *gradient = code + n.rows() * n.latent;
    float *scale = gradient + n.rows() * n.latent, *slope = scale + weights, *residuals = slope + weights;
    transpose(n.latent, n.dim, given.to_raw_scale, back_from_scale);
    std::memcpy(code, code_before, sizeof(float) * n.tasks * codes);

    for (long s = 0; s < n.latent_steps; ++s) {
        product(n.rows(), n.latent, n.dim, code, given.to_raw_scale, raw);
        for (long t = 0; t < n.tasks; ++t) {
            long step = t * n.latent_steps + s;
            const float *noise = given.noise + (t * (n.latent_steps + 1) + s) * weights, *own = raw + t * weights;
            const float *inputs = given.inputs + step * seen, *projected = given.projected + step * n.examples * n.latent;
            float *probabilities = path.probabilities + (t * n.steps() + s) * pairs;
            float *kept = path.raw + (t * (n.latent_steps + 1) + s) * weights;
            for (long i = 0; i < weights; i += LANES) {
                Vector x = load(own + i), epsilon = load(noise + i);
                Slope at = slope_at(slopes, x);
                store(kept + i, x), store(scale + i, at.scale * epsilon), store(slope + i, at.slope * epsilon);
            }
            dots(n.way, n.examples, n.dim, scale, inputs, probabilities, n.latent, code + t * codes, projected);
            path.losses[t * n.steps() + s] =
                softmax(n, given.targets + t * pairs, given.share + t * n.examples, probabilities, residuals);
            product(n.way, n.examples, n.dim, residuals, inputs, pulled + t * weights);
            for (long i = 0; i < weights; i += LANES)
                store(pulled + t * weights + i, load(pulled + t * weights + i) * load(slope + i));
            product(n.way, n.examples, n.latent, residuals, projected, gradient + t * codes);
        }
        product(n.rows(), n.dim, n.latent, pulled, back_from_scale, gradient, true);
        for (long t = 0; t < n.tasks; ++t)
            for (long i = 0; i < codes; i += LANES) {
                Vector own = load(gradient + t * codes + i), now = load(code + t * codes + i);
                store(path.codes + (t * n.latent_steps + s) * codes + i, now);
                store(path.gradients + (t * n.latent_steps + s) * codes + i, own);
                store(code + t * codes + i, now - load(given.step_size + i % n.latent) * own);
            }
    }
    std::memcpy(path.adapted, code, sizeof(float) * n.tasks * codes);

    product(n.rows(), n.latent, n.dim, code, given.to_raw_scale, raw);
    product(n.rows(), n.latent, n.dim, code, given.to_mean, path.decoded);
    for (long t = 0; t < n.tasks; ++t) {
        float *decoded = path.decoded + t * weights, *tuned = path.tuned + t * weights, *moved = scale;
        const float* noise = given.noise + (t * (n.latent_steps + 1) + n.latent_steps) * weights;
        float* kept = path.raw + (t * (n.latent_steps + 1) + n.latent_steps) * weights;
        for (long i = 0; i < weights; i += LANES) {
            Vector x = load(raw + t * weights + i);
            Vector weight = load(decoded + i) + slope_at(slopes, x).scale * load(noise + i);
            store(kept + i, x), store(decoded + i, weight), store(tuned + i, weight);
        }
        for (long s = 0; s < n.finetune_steps; ++s) {
            const float* inputs = given.finetune_inputs + (t * n.finetune_steps + s) * seen;
            long step = t * n.steps() + n.latent_steps + s;
            dots(n.way, n.examples, n.dim, tuned, inputs, path.probabilities + step * pairs);
            path.losses[step] = softmax(
                n, given.targets + t * pairs, given.share + t * n.examples, path.probabilities + step * pairs, residuals
            );
            product(n.way, n.examples, n.dim, residuals, inputs, moved);
            for (long i = 0; i < weights; i += LANES)
                store(tuned + i, load(tuned + i) - load(given.finetune_step_size + i % n.dim) * load(moved + i));
        }
    }
}

struct Back {
    const float *gradients, *probabilities, *raw, *codes, *of_adapted, *of_decoded, *of_tuned, *of_losses;
    float *of_code, *of_step_size, *of_finetune_step_size, *of_gradients, *of_logits, *rights, *of_means, *of_projected;
};

inline void backward_of_run(const Sizes& n, Slopes slopes, const Given& given, const Back& back) {
    long codes = n.way * n.latent, weights = n.way * n.dim, pairs = n.way * n.examples, seen = n.examples * n.dim;
    long right = (2 * n.latent_steps + 1) * weights;
    float* pulled = room(n.rows() * (2 * n.dim + 2 * n.latent) + 2 * n.latent * n.dim + 3 * weights + 2 * pairs);
    float *through = pulled + n.rows() * n.dim, *back_from_scale = through + n.rows() * n.dim;
    float *back_from_mean = back_from_scale + n.latent * n.dim, *of_code = back_from_mean + n.latent * n.dim;
    float *of_gradient = of_code + n.rows() * n.latent, *moved = of_gradient + n.rows() * n.latent;
    float *slope = moved + weights, *bend = slope + weights, *residuals = bend + weights, *turned = residuals + pairs;
    transpose(n.latent, n.dim, given.to_raw_scale, back_from_scale);
    transpose(n.latent, n.dim, given.to_mean, back_from_mean);
    std::memcpy(of_code, back.of_adapted, sizeof(float) * n.tasks * codes);

    for (long t = 0; t < n.tasks; ++t) {
        float *of_weights = back.of_means + t * weights, *of_rates = back.of_finetune_step_size + t * n.dim;
        const float *targets = given.targets + t * pairs, *share = given.share + t * n.examples;
        std::memcpy(of_weights, back.of_tuned + t * weights, sizeof(float) * weights);
        std::memset(of_rates, 0, sizeof(float) * n.dim);
        for (long s = n.finetune_steps; s--;) {
            const float* inputs = given.finetune_inputs + (t * n.finetune_steps + s) * seen;
            long step = t * n.steps() + n.latent_steps + s;
            float* of_logits = back.of_logits + step * pairs;
            residuals_of(n, back.probabilities + step * pairs, targets, share, residuals);
            product(n.way, n.examples, n.dim, residuals, inputs, moved);
            for (long i = 0; i < weights; i += LANES) {
                Vector own = load(of_weights + i);
                store(of_rates + i % n.dim, load(of_rates + i % n.dim) - own * load(moved + i));
                store(moved + i, -load(given.finetune_step_size + i % n.dim) * own);
            }
            dots(n.way, n.examples, n.dim, moved, inputs, of_logits);
            to_logits(n, back.of_losses[step], back.probabilities + step * pairs, residuals, share, of_logits);
            product(n.way, n.examples, n.dim, of_logits, inputs, of_weights, true);
        }
        const float* noise = given.noise + (t * (n.latent_steps + 1) + n.latent_steps) * weights;
        const float* raw = back.raw + (t * (n.latent_steps + 1) + n.latent_steps) * weights;
        float* last = back.rights + t * right + 2 * n.latent_steps * weights;
        for (long i = 0; i < weights; i += LANES) {
            Vector own = load(of_weights + i) + load(back.of_decoded + t * weights + i);
            Vector of_raw = own * load(noise + i) * slope_at(slopes, load(raw + i)).slope;
            store(of_weights + i, own), store(last + i, of_raw), store(pulled + t * weights + i, of_raw);
        }
    }
    product(n.rows(), n.dim, n.latent, back.of_means, back_from_mean, of_code, true);
    product(n.rows(), n.dim, n.latent, pulled, back_from_scale, of_code, true);

    std::memset(back.of_step_size, 0, sizeof(float) * n.tasks * codes);
    for (long s = n.latent_steps; s--;) {
        for (long t = 0; t < n.tasks; ++t)
            for (long i = 0; i < codes; i += LANES) {
                long step = (t * n.latent_steps + s) * codes + i;
                Vector own = load(of_code + t * codes + i), of_rate = load(back.of_step_size + t * codes + i);
                store(back.of_step_size + t * codes + i, of_rate - own * load(back.gradients + step));
                own = -load(given.step_size + i % n.latent) * own;
                store(of_gradient + t * codes + i, own), store(back.of_gradients + step, own);
            }
        product(n.rows(), n.latent, n.dim, of_gradient, given.to_raw_scale, through);
        for (long t = 0; t < n.tasks; ++t) {
            long step = t * n.latent_steps + s, noisy = t * (n.latent_steps + 1) + s;
            const float *inputs = given.inputs + step * seen, *projected = given.projected + step * n.examples * n.latent;
            const float *noise = given.noise + noisy * weights, *raw = back.raw + noisy * weights;
            const float *probabilities = back.probabilities + (t * n.steps() + s) * pairs;
            const float *share = given.share + t * n.examples;
            float *of_logits = back.of_logits + (t * n.steps() + s) * pairs, *own = through + t * weights;
            float *of_weights = back.rights + t * right + 2 * s * weights, *of_raw = of_weights + weights;
            residuals_of(n, probabilities, given.targets + t * pairs, share, residuals);
            product(n.way, n.examples, n.dim, residuals, inputs, of_weights);
            for (long i = 0; i < weights; i += LANES) {
                Vector epsilon = load(noise + i), passed = load(own + i), of_weight = load(of_weights + i);
                Slope at = slope_at(slopes, load(raw + i));
                Vector sloped = at.slope * epsilon;
                store(slope + i, sloped);
                store(bend + i, passed * of_weight * at.bend * epsilon);
                store(moved + i, passed * sloped);
                store(of_weights + i, of_weight * sloped);
            }
            dots(n.way, n.examples, n.dim, moved, inputs, of_logits, n.latent, of_gradient + t * codes, projected);
            to_logits(n, back.of_losses[t * n.steps() + s], probabilities, residuals, share, of_logits);
            product(n.way, n.examples, n.dim, of_logits, inputs, moved);
            for (long i = 0; i < weights; i += LANES) {
                Vector own_raw = load(bend + i) + load(moved + i) * load(slope + i);
                store(of_raw + i, own_raw), store(pulled + t * weights + i, own_raw);
            }
            product(n.way, n.examples, n.latent, of_logits, projected, of_code + t * codes, true);
            float* of_projected = back.of_projected + step * n.examples * n.latent;
            transpose(n.way, n.examples, residuals, turned);
            product(n.examples, n.way, n.latent, turned, of_gradient + t * codes, of_projected);
            transpose(n.way, n.examples, of_logits, turned);
            product(n.examples, n.way, n.latent, turned, back.codes + step * codes, of_projected, true);
        }
        product(n.rows(), n.dim, n.latent, pulled, back_from_scale, of_code, true);
    }
    std::memcpy(back.of_code, of_code, sizeof(float) * n.tasks * codes);
}
