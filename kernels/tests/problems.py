"""Learners and tasks, made up, that the engines are compared on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from metaleo.data.metaset import MetaSet
from metaleo.learners import LEO, HyperParams
from metaleo.nn.heads import linear_network
from metaleo.tasks.episodes import Episodes

HYPER = HyperParams(kl=0.1, encoder_penalty=0.1, keep_prob=0.7)


def make_learner(seed, dim, latent=64, **changes):
    """Away from its symmetric start, as after some training."""
    leo = LEO.init(jax.random.key(seed), linear_network(dim), latent=latent, **changes)
    generator = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(leo)
    leaves = [leaf * (1 + 0.2 * generator.normal(size=leaf.shape).astype(np.float32)) for leaf in leaves]
    leo = jax.tree.unflatten(structure, leaves)
    halves = 0.5 / latent**0.5 * generator.normal(size=(2, latent, dim)).astype(np.float32)
    return eqx.tree_at(
        lambda leo: (leo.decoder.to_mean, leo.decoder.to_raw_scale), leo, tuple(map(jnp.asarray, halves))
    )


def make_tasks(way, shot, query, dim, seed=0):
    generator, classes, images = np.random.default_rng(seed), way + 3, shot + query + 2
    features = generator.normal(size=(classes, 1, dim)) + generator.normal(size=(classes, images, dim))
    names = tuple(map(str, range(classes)))
    return Episodes.over(
        MetaSet.from_classes(features.astype(np.float32), names, ("train",) * classes), way, shot, query
    )


def make_runs(runs, num_tasks, way, shot, query, dim, **changes):
    """A learner of each run, tasks, and of each run indices and keys; of the first task a query is missing."""
    tasks = make_tasks(way, shot, query, dim)
    learners = [make_learner(seed, dim, **changes) for seed in range(runs)]
    learner = jax.tree.map(lambda *leaves: jnp.stack(leaves), *learners)
    keys = jax.random.split(jax.random.key(7), (runs, num_tasks))
    indices = jax.vmap(jax.vmap(tasks.sample_indices))(keys)
    indices = eqx.tree_at(lambda indices: indices.present, indices, indices.present.at[:, 0, 0, 0].set(False))
    return learner, tasks, indices, keys


def losses_and_gradient(engine, tasks):
    """Of all runs: what the outer loop has of an engine."""

    def loss(learner, indices, keys):
        losses, info = engine.meta_losses(learner, tasks, indices, HYPER, keys)
        return jnp.mean(losses), (losses, info)

    return jax.jit(jax.vmap(jax.value_and_grad(loss, has_aux=True)))


def leaves(*trees):
    """Arrays that have the same place in each tree, with its name."""
    assert len({jax.tree.structure(tree) for tree in trees}) == 1
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(trees[0])]
    return zip(names, *map(jax.tree.leaves, trees), strict=True)


def apart(one, other):
    """The largest difference, in terms of the largest number of the other."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return np.abs(one - other).max() / max(1e-30, np.abs(other).max())


def check_close(own, expected, tolerance):
    """Arrays equal to within `tolerance` of the largest number of each."""
    for name, one, other in leaves(own, expected):
        assert apart(one, other) <= tolerance, f"{name}: {apart(one, other):.2g}"
