"""LEO in one file, and the library: the same numbers, from code that shares nothing."""

import ast
import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import leo_in_one_file as one_file
from helpers.marks import by_default
from helpers.small import (
    DIM,
    HYPER,
    adapt,
    close,
    initialise,
    logits,
    make_batch,
    make_learner,
    make_metaset,
    make_task,
    meta_loss,
    meta_loss_with,
    pad,
    shake,
)
from metaleo import data
from metaleo._jax.random import dropout_masks
from metaleo.config.presets import PRESETS
from metaleo.config.schema import TrainConfig
from metaleo.learners import NearestCentroid
from metaleo.learners.base import QUERY
from metaleo.learners.leo_noise import draw_noise
from metaleo.learners.registry import Structure
from metaleo.tasks import Batch, Task
from metaleo.tasks.task import normalise

EXACT = 1e-9
"""Of the largest entry, in double precision."""
CASES = {
    "1-shot": {"shot": 1},
    "5-shot": {"shot": 5},
    "unbalanced and masked": {"shot": None},
    "20-way": {"way": 20, "shot": 1},
    "one step": {"latent_steps": 1, "finetune_steps": 1},
    "keeping all": {"keep_prob": 1.0},
    "deterministic": {"name": "leo-deterministic"},
    "no latent steps": {"latent_steps": 0},
    "no fine-tuning": {"finetune_steps": 0},
}


def make_problem(shot=2, name="leo", way=3, keep_prob=HYPER.keep_prob, **changes):
    leo = shake(make_learner(name, way, **{"latent_steps": 3, "finetune_steps": 2, **changes}), 0.2)
    if shot is None:
        task = Task(pad(make_batch(0, (1, 3, 2)), 3), pad(make_batch(1, (4, 2, 3)), 2))
    else:
        task = make_task(0, way, shot)
    return leo, task, dataclasses.replace(HYPER, keep_prob=keep_prob)


def to_params(leo):
    """Of a LEO, or of a gradient with respect to one."""
    return {
        "encoder": leo.encoder.weight,
        "relation": [leo.relation.first, leo.relation.middle, leo.relation.last],
        "decoder": leo.decoder.weight,
        "latent_step_size": leo.latent_step_size,
        "finetune_step_size": leo.finetune_step_size,
    }


def to_task(task):
    """Without the rows behind the masks."""
    return tuple((batch.inputs[batch.mask], batch.targets[batch.mask]) for batch in (task.support, task.query))


def to_noise(leo, task, noise, query_mask, keep):
    normals = noise.code, noise.weights
    if not leo.stochastic:
        codes = task.support.way, len(leo.latent_step_size)
        normals = jnp.zeros(codes), jnp.zeros((leo.latent_steps + 1, task.support.way, leo.network.size))
    kept = jnp.concatenate([noise.encoder_mask[None], noise.latent_masks, noise.finetune_masks])
    kept, query_kept = kept[:, task.support.mask], query_mask[task.query.mask]
    return *normals, *(jnp.where(mask, 1 / keep, 0.0) for mask in (kept, query_kept))


def loss_and_gradient(leo, task, hyper, noise):
    return jax.jit(jax.value_and_grad(one_file.meta_loss))(to_params(leo), to_task(task), hyper, noise)


@pytest.mark.parametrize("case", by_default(["1-shot", "5-shot", "unbalanced and masked"], CASES))
def test_meta_loss_and_meta_gradient_are_the_librarys(float64, case):
    leo, task, hyper = make_problem(**CASES[case])
    key = jax.random.key(1)
    noise = jax.jit(draw_noise)(leo, task.support, hyper, key)

    @jax.jit
    @jax.value_and_grad
    def library(leo):
        return meta_loss_with(leo, task, hyper, noise, key)[0] + leo.regulariser(hyper)

    loss, gradient = library(leo)
    query_mask = dropout_masks(key, hyper.keep_prob, task.query.inputs.shape, QUERY)
    own_hyper = hyper if leo.stochastic else dataclasses.replace(hyper, kl=0.0)
    own = loss_and_gradient(leo, task, own_hyper, to_noise(leo, task, noise, query_mask, hyper.keep_prob))
    assert close(own, (loss, to_params(gradient)), EXACT)
    from_key, _ = meta_loss(leo, task, hyper, key)
    assert close(from_key, loss, 1e-6)  # float32 numbers, drawn in two programs


@pytest.mark.parametrize("shot", [1, 5])
def test_without_noise_too(float64, shot):
    """Evaluation has neither noise nor the penalties on codes."""
    leo, task, hyper = make_problem(shot)
    loss, gradient = jax.jit(
        jax.value_and_grad(lambda leo: leo.meta_loss(task, hyper, None)[0] + leo.regulariser(hyper))
    )(leo)
    no_noise = 0.0, jnp.zeros(leo.latent_steps + 1), jnp.ones(1 + leo.latent_steps + leo.finetune_steps), 1.0
    own = loss_and_gradient(leo, task, dataclasses.replace(hyper, kl=0.0, encoder_penalty=0.0), no_noise)
    assert close(own, (loss, to_params(gradient)), EXACT)


def test_accuracies_are_the_librarys():
    leo = shake(make_learner(latent_steps=one_file.LATENT_STEPS, finetune_steps=one_file.FINETUNE_STEPS))
    metaset = make_metaset(images=20)
    features = jnp.asarray(metaset.read(metaset.rows).reshape(len(metaset.counts), -1, metaset.dim))
    key, tasks = jax.random.key(3), 4
    own = one_file.evaluate(to_params(leo), key, features, 3, 2, tasks)
    for task_key, found in zip(jax.random.split(key, tasks), own, strict=True):
        (inputs, targets), (query, query_targets) = one_file.sample_task(task_key, features, 3, 2)
        support = Batch(inputs, targets, jnp.ones(len(inputs), bool))
        for learner, accuracy in zip((leo, NearestCentroid()), found, strict=True):
            guesses = np.argmax(logits(adapt(learner, support).head, query), axis=1)
            np.testing.assert_allclose(accuracy, np.mean(guesses == np.argmax(query_targets, axis=1)), rtol=1e-6)


def test_drawn_noise_has_its_laws():
    features = jnp.zeros((6, 40, 8))
    task, hyper = one_file.sample_task(jax.random.key(0), features, 5, 2), one_file.Hyper()
    code, weights, *dropout = one_file.draw_noise(jax.random.key(1), task, hyper)
    assert (code.shape, weights.shape) == ((5, one_file.LATENT), (one_file.LATENT_STEPS + 1, 5, 8))
    assert [factor.shape for factor in dropout] == [(11, 10, 8), (75, 8)]
    for normal in (code, weights):
        assert abs(float(normal.mean())) < 0.3
        assert 0.8 < float(normal.std()) < 1.2
    for factor in dropout:
        np.testing.assert_allclose(np.unique(factor), [0, 1 / hyper.keep_prob], rtol=1e-6)
        assert abs(float((factor > 0).mean()) - hyper.keep_prob) < 0.1


def test_a_sampled_task_has_distinct_classes_and_disjoint_sets():
    classes, images, way, shot = 7, 20, 5, 3
    numbers = np.stack(np.broadcast_arrays(np.arange(classes)[:, None], np.arange(images)), axis=-1)
    features = jnp.asarray(numbers, jnp.float32)  # each row says where it is from
    keys = jax.random.split(jax.random.key(0), 50)
    tasks = jax.jit(jax.vmap(lambda key: one_file.sample_task(key, features, way, shot)))(keys)
    each = zip(*map(np.asarray, jax.tree.leaves(tasks)), strict=True)
    for support, support_targets, query, query_targets in each:
        rows = np.concatenate([support, query])
        labels = np.argmax(np.concatenate([support_targets, query_targets]), axis=1)
        assert len(np.unique(rows, axis=0)) == len(rows) == way * (shot + one_file.QUERY)
        own = [set(rows[labels == label, 0]) for label in range(way)]  # the classes behind each label
        assert all(len(one) == 1 for one in own)
        assert len(set.union(*own)) == way
        assert (support_targets.sum(0) == shot).all()
        assert (query_targets.sum(0) == one_file.QUERY).all()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_features_are_read_as_by_the_library(tmp_path, suffix):
    metaset = make_metaset()
    path = tmp_path / f"features{suffix}"
    data.save_data(metaset, path)
    for own, split in zip(one_file.load(path), ("train", "test"), strict=True):
        part = metaset.subset(split)
        assert own.shape[:2] == (len(part.counts), part.counts[0])
        assert close(own.reshape(-1, part.dim), normalise(part.read(part.rows)), 1e-6)


def test_the_sample_is_read_with_its_scale():
    _, test = one_file.load(one_file.SAMPLE)
    part = data.load_data("sample").subset("test")
    assert test.shape == (20, 100, 640)
    assert close(test[3], normalise(part.read(part.rows[300:400])), 1e-6)


def test_its_numbers_are_the_presets():
    preset = PRESETS["metaleo-mini-1shot"]
    assert one_file.Hyper()._asdict() == dataclasses.asdict(preset.hyper)
    structure, config = Structure(), TrainConfig()
    sizes = structure.latent, structure.latent_steps, structure.finetune_steps
    assert sizes == (one_file.LATENT, one_file.LATENT_STEPS, one_file.FINETUNE_STEPS)
    assert (config.query, config.meta_batch) == (one_file.QUERY, one_file.META_BATCH)
    assert preset.structure == structure
    assert preset.clip == "global"
    own = one_file.init_params(jax.random.key(0), DIM)
    library = to_params(initialise(dataclasses.replace(structure, dim=DIM), jax.random.key(0)))
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, library)
    for name in ("latent_step_size", "finetune_step_size"):
        assert close(own[name], library[name])
    for name in ("encoder", "decoder"):  # uniform between the same bounds
        assert abs(float(jnp.abs(own[name]).max() / jnp.abs(library[name]).max()) - 1) < 0.05


def test_it_is_short_and_stands_alone():
    text = Path(one_file.__file__).read_text("utf-8")
    assert len(text.splitlines()) < 200
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
    packages = {name.split(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages == {"jax", "numpy", "optax", "safetensors"}


@pytest.mark.usefixtures("loose_dtypes")
def test_it_runs(tmp_path, capsys):
    data.save_data(make_metaset(images=17), tmp_path / "features.npz")
    flags = f"--data {tmp_path}/features.npz --way 3 --shot 2 --steps 2 --tasks 4 --seed 1"
    one_file.main(flags.split())
    title, leo, centroid = capsys.readouterr().out.splitlines()
    assert title.startswith("3-way 2-shot, 4 tasks of 5 unseen classes")
    assert (leo.split()[0], centroid.split()[:2]) == ("LEO", ["nearest", "centroid"])
    for line in (leo, centroid):
        *_, mean, _, interval, _ = line.split()
        assert 0 <= float(mean) <= 100
        assert float(interval) >= 0
    with pytest.raises(SystemExit):
        one_file.main(flags.replace("--way 3", "--way 6").split())
    assert "6-way 2-shot tasks need more classes" in capsys.readouterr().err
