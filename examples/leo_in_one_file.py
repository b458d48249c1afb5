"""LEO in one file: meta-learning with Latent Embedding Optimization (Rusu et al., ICLR 2019), from data to a table.

Read it from top to bottom beside the paper (arxiv.org/abs/1807.05960); "lines" are those of its Algorithm 1. In shapes
`way` is the paper's N (classes of a task), `shot` its K (labelled examples of each), `dim` the length of a feature
vector, `latent` that of a code. A task is a support set and a query set, each a pair: inputs (example, dim) and one-hot
targets (example, way). Details that are not as in the paper, and why: docs/deviations.md.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy

SAMPLE = Path(__file__).parent.parent / "src/metaleo/assets/data/miniimagenet.safetensors"  # real image features
LATENT, LATENT_STEPS, FINETUNE_STEPS = 64, 5, 5
QUERY, META_BATCH = 15, 12  # query examples of each class, tasks in a meta-step


class Hyper(NamedTuple):
    learning_rate: float = 3.25e-4  # η of Algorithm 1
    kl: float = 2.81e-3  # β of Eq. 6
    encoder_penalty: float = 4.5e-7  # γ of Eq. 6
    l2: float = 1.39e-4  # λ₁ of Eq. 7
    orthogonality: float = 22.1  # λ₂ of Eq. 7
    keep_prob: float = 0.609  # the probability that dropout keeps a feature


def load(path):
    """Features of the training and of the test classes, each (class, image, dim), every vector at length one."""
    arrays = safetensors.numpy.load_file(path) if path.suffix == ".safetensors" else dict(np.load(path))
    if "split" not in arrays:  # a .safetensors file has its strings in the header
        with safetensors.safe_open(path, framework="np") as file:
            arrays["split"] = np.array(json.loads(file.metadata()["split"]))
    features = arrays["features"] * arrays.get("scale", np.float32(1))  # stored as small integers, or as they are
    features /= np.maximum(np.linalg.norm(features, axis=2, keepdims=True), 1e-6)
    return [jnp.asarray(features[arrays["split"] == split], jnp.float32) for split in ("train", "test")]


def sample_task(key, features, way, shot):
    """Line 5: distinct classes, and of each distinct images for the support set and the query set."""
    class_key, image_key = jax.random.split(key)
    classes = jax.random.permutation(class_key, features.shape[0])[:way]
    images = jax.vmap(lambda key: jax.random.permutation(key, features.shape[1]))(jax.random.split(image_key, way))
    chosen = features[classes[:, None], images[:, : shot + QUERY]]  # (way, shot + QUERY, dim)
    support, query = chosen[:, :shot].reshape(way * shot, -1), chosen[:, shot:].reshape(way * QUERY, -1)
    targets = [jnp.repeat(jnp.eye(way), count, axis=0) for count in (shot, QUERY)]
    return (support, targets[0]), (query, targets[1])


def draw_noise(key, task, hyper):
    """All that is random in training on one task: normal numbers, and dropout as factors, 0 or 1 / keep_prob."""
    (inputs, targets), (query, _) = task
    keys, way, dim = jax.random.split(key, 4), targets.shape[1], inputs.shape[1]
    code = jax.random.normal(keys[0], (way, LATENT))
    weights = jax.random.normal(keys[1], (LATENT_STEPS + 1, way, dim))  # for each time that weights are decoded
    kept = jax.random.bernoulli(keys[2], hyper.keep_prob, (1 + LATENT_STEPS + FINETUNE_STEPS, *inputs.shape))
    query_kept = jax.random.bernoulli(keys[3], hyper.keep_prob, query.shape)
    return code, weights, jnp.where(kept, 1 / hyper.keep_prob, 0.0), jnp.where(query_kept, 1 / hyper.keep_prob, 0.0)


def init_params(key, dim):
    """Lines 1 and 2: φ, all that is meta-learned."""
    init, keys = jax.nn.initializers.glorot_uniform(), jax.random.split(key, 5)
    networks = {"encoder": init(keys[0], (dim, LATENT)), "decoder": init(keys[1], (LATENT, 2 * dim))}
    networks["relation"] = [init(key, (2 * LATENT, 2 * LATENT)) for key in keys[2:]]
    return networks | {"latent_step_size": jnp.full(LATENT, 1.0), "finetune_step_size": jnp.full(dim, 0.001)}  # α


def mean_and_scale(output, initial):
    """The halves of a network's output: a mean, and a standard deviation that is `initial` where the output is 0."""
    mean, raw_scale = jnp.split(output, 2, axis=1)
    return mean, initial * jax.nn.softplus(raw_scale) / jax.nn.softplus(0.0)


def encode(params, inputs, targets):
    """Eq. 3: mean and scale of a code for each class, (way, latent), from pairs of its examples with all examples."""
    hidden, (first, middle, last) = inputs @ params["encoder"], params["relation"]
    count = len(hidden)  # way * shot
    pairs = jnp.concatenate([jnp.repeat(hidden, count, axis=0), jnp.tile(hidden, (count, 1))], axis=1)
    related = jax.nn.relu(jax.nn.relu(pairs @ first) @ middle) @ last  # (count * count, 2 latent)
    by_example = jnp.mean(related.reshape(count, count, -1), axis=1)  # (count, 2 latent)
    by_class = targets.T @ by_example / jnp.sum(targets, axis=0)[:, None]  # (way, 2 latent)
    return mean_and_scale(by_class, 0.1)


def decode(params, code, noise):
    """Eq. 4: the weights of each class, (way, dim), sampled given its code."""
    way, dim = len(code), params["decoder"].shape[1] // 2
    mean, scale = mean_and_scale(code @ params["decoder"], (2 / (way + dim)) ** 0.5)
    return mean + scale * noise


def cross_entropy(weights, inputs, targets):
    """Eq. 5, with the mean over the examples instead of their sum."""
    logits = inputs @ weights.T  # (example, way)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.sum(targets * logits, axis=1))


def descend(loss, start, step_size, noise):
    """Lines 10-12: x ← x - α ∘ ∇loss(x), a step for each entry of the noise."""
    return jax.lax.scan(lambda x, now: (x - step_size[None] * jax.grad(loss)(x, *now), None), start, noise)[0]


def adapt(params, inputs, targets, code_noise, weights_noise, dropout):
    """Lines 7-13, then fine-tuning (Section 4.2.3): the weights for a support set, and what Eq. 6 needs besides."""

    def loss(weights, dropout):  # Eq. 5, its sum divided by the shots
        return targets.shape[1] * cross_entropy(weights, inputs * dropout, targets)

    def latent_loss(code, dropout, noise):
        return loss(decode(params, code, noise), dropout)

    encoder_dropout, latent_dropout, finetune_dropout = jnp.split(dropout, [1, len(weights_noise)])
    mean, scale = encode(params, inputs * encoder_dropout[0], targets)
    code = mean + scale * code_noise  # (way, latent)
    adapted_code = descend(latent_loss, code, params["latent_step_size"], (latent_dropout, weights_noise[:-1]))
    decoded = decode(params, adapted_code, weights_noise[-1])  # (way, dim)
    weights = descend(loss, decoded, params["finetune_step_size"], (finetune_dropout,))
    return weights, (mean, scale, code, adapted_code)


def regulariser(params, hyper):
    """Eq. 7: R, with the correlations C_d as cosines between the decoder's rows."""
    squares = sum(jnp.sum(weight**2) for weight in (params["encoder"], *params["relation"], params["decoder"]))
    rows = params["decoder"] / jnp.linalg.norm(params["decoder"], axis=1, keepdims=True)
    return hyper.l2 * squares / 2 + hyper.orthogonality * jnp.mean((rows @ rows.T - jnp.eye(len(rows))) ** 2)


def meta_loss(params, task, hyper, noise):
    """Eq. 6 for one task; norms are means over entries."""
    (support, (query, query_targets)), (*support_noise, query_dropout) = task, noise
    weights, (mean, scale, code, adapted_code) = adapt(params, *support, *support_noise)
    query_loss = cross_entropy(weights, query * query_dropout, query_targets)
    kl = jnp.mean((scale**2 + mean**2 - 1) / 2 - jnp.log(scale))  # of N(mean, scale²) to N(0, 1)
    encoder_penalty = jnp.mean((jax.lax.stop_gradient(adapted_code) - code) ** 2)
    return query_loss + hyper.kl * kl + hyper.encoder_penalty * encoder_penalty + regulariser(params, hyper)


def meta_train(params, key, features, way, shot, steps, hyper):
    """Lines 3-18: Adam behind two clips of the meta-gradient, of each entry and of the norm."""
    optimiser = optax.chain(optax.clip(0.1), optax.clip_by_global_norm(0.1), optax.adam(hyper.learning_rate))
    state = optimiser.init(params)
    losses = jax.vmap(meta_loss, (None, 0, None, 0))

    @jax.jit
    def meta_step(params, state, key, features):
        task_keys, noise_keys = jax.random.split(key, (2, META_BATCH))
        tasks = jax.vmap(lambda key: sample_task(key, features, way, shot))(task_keys)
        noise = jax.vmap(lambda key, task: draw_noise(key, task, hyper))(noise_keys, tasks)
        loss, gradient = jax.value_and_grad(lambda params: jnp.mean(losses(params, tasks, hyper, noise)))(params)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    for step in range(1, steps + 1):
        params, state, loss = meta_step(params, state, jax.random.fold_in(key, step), features)
        if step % 500 == 0:
            print(f"meta-step {step}: loss {loss:.2f}", flush=True)
    return params


def evaluate(params, key, features, way, shot, tasks):
    """Accuracies of LEO and of nearest centroids on the same tasks, (task, 2); codes and weights are the means."""
    no_noise = 0.0, jnp.zeros(LATENT_STEPS + 1), jnp.ones(1 + LATENT_STEPS + FINETUNE_STEPS)

    def solve(key):
        (inputs, targets), (query, query_targets) = sample_task(key, features, way, shot)
        centroids = targets.T @ inputs
        centroids /= jnp.linalg.norm(centroids, axis=1, keepdims=True)
        weights = jnp.stack([adapt(params, inputs, targets, *no_noise)[0], centroids])  # (2, way, dim)
        return jnp.mean(jnp.argmax(weights @ query.T, axis=1) == jnp.argmax(query_targets, axis=1)[None], axis=1)

    return np.asarray(jax.lax.map(solve, jax.random.split(key, tasks), batch_size=20))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SAMPLE, help="features [class, image, dim] and split [class]")
    for name, default in {"way": 5, "shot": 1, "steps": 3000, "tasks": 2000, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    options = parser.parse_args(arguments)
    way, shot, (train, test) = options.way, options.shot, load(options.data)
    if not (2 <= way <= min(len(train), len(test)) and 1 <= shot <= train.shape[1] - QUERY):
        parser.error(f"{way}-way {shot}-shot tasks need more classes, or more than {QUERY} images of each")
    init_key, train_key, test_key = jax.random.split(jax.random.key(options.seed), 3)
    params = meta_train(init_params(init_key, train.shape[2]), train_key, train, way, shot, options.steps, Hyper())
    accuracies = 100 * evaluate(params, test_key, test, way, shot, options.tasks)
    print(f"{way}-way {shot}-shot, {options.tasks} tasks of {len(test)} unseen classes: accuracy, 95 % interval")
    for name, mean, spread in zip(("LEO", "nearest centroid"), accuracies.mean(0), accuracies.std(0), strict=True):
        print(f"{name:18}{mean:6.2f} ± {1.96 * spread / options.tasks**0.5:.2f} %")


if __name__ == "__main__":
    main()
