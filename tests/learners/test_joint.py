"""A tail that is learned with its learner: the same numbers as the whole network's, and its own gradients."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import HYPER, adapt, close, logits, make_learner, message, meta_gradient, meta_loss, pad
from metaleo import data
from metaleo.checkpoints import load_model, save_model
from metaleo.cli import main
from metaleo.config.schema import TrainConfig
from metaleo.data.metaset import MetaSet
from metaleo.features.backbone import Pass, pool
from metaleo.features.backbone_files import BackboneFile, blank, load_backbone, save_backbone
from metaleo.features.recipes import Architecture
from metaleo.learners import Joint
from metaleo.learners.joint import Tail
from metaleo.learners.registry import Structure
from metaleo.tasks import Task
from metaleo.tasks.episodes import as_they_are, place_rows
from metaleo.tasks.task import labelled, normalise

ARCHITECTURE = Architecture("conv4", 0, 8, side=16, channels=1, share=1.0, layer=4)
SIZES = (2, 2, 8, 8)
STRUCTURE = Structure(dim=32, way=3, latent=4, latent_steps=2, finetune_steps=2, tail=SIZES)
SMALL = (
    "--data", "flat.npz", "--way", "3", "--query", "4", "--meta-batch", "2", "--validate-every", "2",
    "--validation-tasks", "4", "--latent", "4", "--latent-steps", "1", "--finetune-steps", "1", "--out", "run",
)  # fmt: skip


def make_network() -> BackboneFile:
    """A conv-4 whose norms and moments are not those it starts with."""
    random = np.random.default_rng(0)

    def shaken(leaf):
        values = np.asarray(leaf) * random.uniform(0.5, 1.5, leaf.shape) + random.uniform(0, 0.1, leaf.shape)
        return jnp.asarray(values, jnp.zeros(()).dtype)

    with jax.enable_x64(False):
        start = blank(ARCHITECTURE)
    return BackboneFile(jax.tree.map(shaken, start), ARCHITECTURE, {})


def make_tasks(network: BackboneFile, way=3, shot=2, query=4) -> tuple[Task, Task]:
    """The same task twice: all numbers of the layer before the last, and the network's own features."""
    random = np.random.default_rng(1)
    kinds = random.uniform(-1, 1, (way, 1, 16, 16, 1))
    images = kinds + 0.5 * random.uniform(-1, 1, (way, shot + query, 16, 16, 1))

    def batches(part):
        through = Pass(network.trained.moments)
        pixels = jnp.asarray(part.reshape(-1, 16, 16, 1), jnp.zeros(()).dtype)
        network.trained.backbone(pixels, through)
        before, last = through.taps[3, "rectified"], through.taps[4, "rectified"]
        labels = np.repeat(np.arange(way), part.shape[1])
        flat = before.reshape(len(before), -1)
        return labelled(flat, labels, way), labelled(normalise(pool(last)), labels, way)

    support, query_ = batches(images[:, :shot]), batches(images[:, shot:])
    return Task(support[0], query_[0]), Task(support[1], query_[1])


def make_joint(network: BackboneFile) -> Joint:
    return Joint(Tail.of(network), make_learner(dim=8))


def test_is_the_plain_learner_on_the_networks_features():
    network = make_network()
    joint, (flat, plain) = make_joint(network), make_tasks(network)
    close(*(meta_loss(one, task, HYPER, jax.random.key(0)) for one, task in ((joint, flat), (joint.learner, plain))))
    heads = adapt(joint, flat.support).head, adapt(joint.learner, plain.support).head
    close(logits(heads[0], flat.query.inputs), logits(heads[1], plain.query.inputs), 1e-4)


@pytest.mark.slow
def test_gradients_reach_the_tail_and_not_its_moments():
    network = make_network()
    gradient = meta_gradient(make_joint(network), make_tasks(network)[0], HYPER, jax.random.key(0))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient.tail.moments))
    assert all(leaf.any() for leaf in jax.tree.leaves((gradient.tail.stage, gradient.learner)))


@pytest.mark.slow
def test_padding_changes_nothing():
    network = make_network()
    joint, (task, _) = make_joint(network), make_tasks(network)
    padded = Task(pad(task.support, 2), pad(task.query, 3))
    close(*(meta_gradient(joint, one, HYPER, None) for one in (padded, task)), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_meta_gradient_of_the_tail_against_finite_differences(training, float64):
    network = make_network()
    joint, (task, _) = make_joint(network), make_tasks(network)
    hyper, key = dataclasses.replace(HYPER, encoder_penalty=0.0), jax.random.key(3) if training else None
    random = np.random.default_rng(2)

    @jax.jit
    def loss(stage):
        return eqx.tree_at(lambda one: one.tail.stage, joint, stage).meta_loss(task, hyper, key)[0]

    stage = joint.tail.stage
    direction = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), stage)
    ahead, behind = (
        loss(jax.tree.map(lambda leaf, step, size=size: leaf + size * step, stage, direction)) for size in (1e-6, -1e-6)
    )
    parts = jax.tree.map(lambda slope, step: jnp.sum(slope * step), jax.grad(loss)(stage), direction)
    np.testing.assert_allclose(sum(jax.tree.leaves(parts)), (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-8)


def test_model_file_round_trip(tmp_path):
    learner = STRUCTURE.init(jax.random.key(0))
    save_model(tmp_path / "m.safetensors", learner, STRUCTURE, {})
    model = load_model(tmp_path / "m.safetensors")
    assert model.structure == STRUCTURE
    assert model.header["normalise"] == "none"
    assert jax.tree.structure(model.learner) == jax.tree.structure(learner)
    close(model.learner, learner, 0)


@pytest.mark.parametrize("on_device", [True, False])
def test_rows_may_be_taken_as_they_are(on_device):
    features = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    rows = place_rows(MetaSet.from_classes(features, ("a", "b", "c"), ("train",) * 3), on_device, as_they_are)
    np.testing.assert_array_equal(rows.take(jnp.array([0, 5])), features.reshape(-1, 4)[[0, 5]])


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A fresh folder with a network and the numbers that its last stage takes."""
    monkeypatch.chdir(tmp_path)
    network = make_network()
    save_backbone(tmp_path / "network.safetensors", network.trained, ARCHITECTURE, {})
    features = np.random.default_rng(0).uniform(size=(18, 12, 32)).astype(np.float32)
    splits = ("train",) * 8 + ("val",) * 5 + ("test",) * 5
    data.save_data(MetaSet.from_classes(features, tuple(f"class{i}" for i in range(18)), splits), "flat.npz")
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("loose_dtypes")
def test_train_starts_from_the_network_and_goes_on_without_it(here, capsys):
    main(["train", *SMALL, "--joint", "network.safetensors", "--steps", "2"])
    tail = load_model(here / "run/model.safetensors").learner.tail
    start = Tail.of(load_backbone(here / "network.safetensors"))
    close(tail.moments, start.moments, 0)
    change = jax.tree.map(lambda after, before: float(jnp.abs(after - before).max()), tail.stage, start.stage)
    assert all(0 < size < 0.01 for size in jax.tree.leaves(change))

    (here / "network.safetensors").unlink()
    main(["train", "--resume", "--out", "run", "--steps", "4"])
    capsys.readouterr()
    main(["evaluate", "run", "--tasks", "10", "--json"])
    assert json.loads(capsys.readouterr().out)["models"][0]["tasks"] == 10


def test_an_anchor_wants_rows_that_stay_as_they_are():
    config = TrainConfig(joint="network.safetensors", structure=Structure(learner="leo-anchored"))
    assert "--joint changes them: use --learner leo" in message(config.check)


@pytest.mark.usefixtures("loose_dtypes")
@pytest.mark.parametrize("changed", ["features", "network"])
def test_what_does_not_fit_is_one_line(here, capsys, changed):
    others = {
        "features": dataclasses.replace(ARCHITECTURE, width=4),
        "network": Architecture(depth=10, width=1, side=16, layer=7),
    }
    save_backbone(here / "network.safetensors", blank(others[changed]), others[changed], {})
    with pytest.raises(SystemExit) as end:
        main(["train", *SMALL, "--joint", "network.safetensors", "--steps", "2"])
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    assert ("conv-4" if changed == "network" else "2 x 2 x 4 numbers, the data have 32") in said
    assert not (here / "run").exists()
