"""The law of engines: the numbers are those of the learner as it is written, to rounding.

Every engine is held against the reference, which is the learner under `jax.vmap`; LEO itself is held against the
paper's equations by test_one_file.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.small import HYPER, Given, close, make_batch, make_learner, make_task, pad, shake, stack
from metaleo import use_engine
from metaleo.engines import all_engines, choose_engine, closed_form
from metaleo.errors import BadInput
from metaleo.nn.encoder_decoder import Scale
from metaleo.nn.heads import Network, dot, linear_network
from metaleo.tasks import Task
from metaleo.training.meta_train import meta_gradient

EXACT = 1e-9
"""Of the largest entry, in double precision."""
ROUNDING = 2e-5
"""The same in single precision: some hundred times the spacing of its numbers, over ten steps and their derivatives."""
CASES = {
    "1-shot": {"shot": 1},
    "5-shot": {"shot": 5},
    "official": {"shot": 1, "official": True},
    "unbalanced and masked": {"shot": None},
    "20-way": {"way": 20, "shot": 1},
    "one step": {"shot": 1, "latent_steps": 1, "finetune_steps": 1},
    "keeping all": {"shot": 2, "keep_prob": 1.0},
    "deterministic": {"shot": 2, "name": "leo-deterministic"},
    "no latent steps": {"shot": 2, "latent_steps": 0},
    "no fine-tuning": {"shot": 2, "finetune_steps": 0},
    "random prior": {"shot": 2, "name": "leo-random-prior"},
}
ENGINES = [name for name in all_engines() if name != "reference"]


def make_problem(shot=2, name="leo", way=3, keep_prob=HYPER.keep_prob, seed=0, **changes):
    """A learner, three tasks, hyper-parameters, and a key for each task."""
    learner = shake(make_learner(name, way, seed, **{"latent_steps": 3, "finetune_steps": 3, **changes}), 0.2)
    if shot is None:  # as many rows as the largest, and padding where there are fewer
        all_counts = (1, 1, 1), (1, 3, 2), (4, 2, 3)
        tasks = [pad_task(make_batch(seed + i, c), make_batch(seed + 50 + i, c)) for i, c in enumerate(all_counts)]
    else:
        tasks = [make_task(seed + i, way, shot) for i in range(3)]
    return (
        learner,
        stack(tasks),
        dataclasses.replace(HYPER, keep_prob=keep_prob),
        jax.random.split(jax.random.key(seed), 3),
    )


def pad_task(*batches):
    return Task(*(pad(batch, 9 - len(batch.inputs)) for batch in batches))


def entry(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def results(engine, learner, tasks, hyper, keys):
    """Losses and infos of each task, and the meta-gradient."""

    def compute(learner, tasks):
        arguments = learner, Given(tasks), jnp.arange(len(keys)), hyper, keys
        return *engine.meta_losses(*arguments), meta_gradient(*arguments, engine)[0]

    return jax.jit(compute)(learner, tasks)


def adapted(engine, learner, tasks):
    return jax.jit(engine.adapt)(learner, tasks.support)


def check(name, problem, tolerance):
    engine, learner, tasks = all_engines()[name], *problem[:2]
    assert engine.supports(learner, 1)
    own, expected = (results(one, *problem) for one in (engine, all_engines()["reference"]))
    assert own[1].keys() == expected[1].keys()
    assert close(own, expected, tolerance)
    heads = (adapted(one, learner, tasks) for one in (engine, all_engines()["reference"]))
    assert close(*heads, tolerance)
    return own[2]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", by_default(["1-shot", "unbalanced and masked"], CASES))
def test_as_the_reference(float64, name, case):
    gradient = check(name, make_problem(**CASES[case]), EXACT)
    steps = {"latent_step_size": "no latent steps", "finetune_step_size": "no fine-tuning"}
    for leaf, without in steps.items():
        assert jnp.any(getattr(gradient, leaf)) == (case != without)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("case", by_default(["1-shot"], ["1-shot", "5-shot", "unbalanced and masked"]))
def test_as_the_reference_in_float32(name, case):
    check(name, make_problem(**CASES[case]), ROUNDING)


@pytest.mark.parametrize("name", ENGINES)
def test_meta_gradient_against_finite_differences(float64, name):
    learner, tasks, hyper, keys = make_problem(**CASES["unbalanced and masked"])
    hyper = dataclasses.replace(hyper, encoder_penalty=0.0)  # no finite difference can see its stop-gradient
    engine, random = all_engines()[name], np.random.default_rng(1)
    gradient = results(engine, learner, tasks, hyper, keys)[2]

    @jax.jit
    def objective(learner):
        losses, _ = engine.meta_losses(learner, Given(tasks), jnp.arange(3), hyper, keys)
        return losses.mean() + engine.regulariser(learner, hyper)

    leaves, structure = jax.tree.flatten(learner)
    for index, (leaf, own) in enumerate(zip(leaves, jax.tree.leaves(gradient), strict=True)):
        direction = random.normal(size=leaf.shape)
        ahead, behind = (
            objective(structure.unflatten([*leaves[:index], leaf + shift * direction, *leaves[index + 1 :]]))
            for shift in (1e-6, -1e-6)
        )
        np.testing.assert_allclose(jnp.sum(own * direction), (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1-shot", "5-shot"])
def test_the_forms_for_a_gpu_give_the_same(float64, case, monkeypatch):
    monkeypatch.setattr(closed_form, "on_gpu", lambda: True)
    check("closed-form", make_problem(**CASES[case]), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_runs_side_by_side(float64, name):
    """Each with weights and tasks of its own."""
    problems = [make_problem(shot=1, seed=seed) for seed in (0, 9)]
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    own = jax.vmap(lambda *problem: results(all_engines()[name], *problem))(*together)
    for run, problem in enumerate(problems):
        assert close(entry(own, run), results(all_engines()["reference"], *problem), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_support_sets_whose_pairs_are_too_many(float64, name, monkeypatch):
    monkeypatch.setattr("metaleo.nn.encoder_decoder.PAIRS_AT_ONCE", 9)
    monkeypatch.setattr(closed_form, "MOST_EXAMPLES", 5)
    check(name, make_problem(shot=2), EXACT)


def own_loss(prediction, target):
    """A hinge for each class."""
    return jnp.sum(jax.nn.relu(1 - prediction * (2 * target - 1)))


FALL_BACK = {
    "another learner": lambda: make_learner("maml"),
    "a network that is not linear": lambda: make_learner(network="mlp", hidden=3),
    "a decoder that is not linear": lambda: make_learner(width=5),
    "several samples": lambda: make_learner(samples=2),
    "limited gradients": lambda: make_learner(max_grad_norm=1.0),
    "a loss of one's own": lambda: with_network(Network(dot, np.zeros(8, np.float32), (8,), loss=own_loss)),
}


def with_network(network):
    return dataclasses.replace(make_learner(), network=network)


@pytest.mark.parametrize("case", FALL_BACK)
def test_what_is_not_supported_falls_back(case):
    learner = FALL_BACK[case]()
    for name in ENGINES:
        assert not all_engines()[name].supports(learner, 1)
        assert choose_engine(learner, name).name == "reference"
    assert choose_engine(learner).name == "reference"


def test_a_linear_network_with_a_loss_of_its_own_is_trained_on_it():
    """It was taken for the paper's classifier, and its inner loop trained on cross-entropy."""
    leo = with_network(dataclasses.replace(linear_network(8), loss=own_loss))
    support = make_batch()
    head = leo.adapt(support).head
    entropic = make_learner().adapt(support).head
    weights = head.parameters
    assert not np.allclose(weights, entropic.weights, rtol=1e-3)

    def total(weights):
        return 3 * jnp.mean(jax.vmap(own_loss)(support.inputs @ weights.T, support.targets))

    trace = leo.adapt(support).trace
    np.testing.assert_allclose(trace.support_losses[-1], total(weights), rtol=1e-5)
    after = trace.decoded_weights
    for _ in range(2):
        after = after - leo.finetune_step_size[None] * jax.grad(total)(after)
    np.testing.assert_allclose(weights, after, rtol=1e-4, atol=1e-6)


def test_engines_can_be_chosen():
    learner = make_learner()
    assert choose_engine(learner).name == ENGINES[0]
    assert choose_engine(learner, "reference").name == "reference"
    with use_engine("reference"):
        assert choose_engine(learner).name == "reference"
        assert choose_engine(learner, "closed-form").name == "closed-form"
    assert choose_engine(learner).name == ENGINES[0]
    with pytest.raises(BadInput, match=r"unknown engine 'warp'; known are auto, .*closed-form, reference"):
        choose_engine(learner, "warp")


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("initial", [0.0559, 0.5])
def test_slopes_are_the_derivatives_of_the_scale(float64, official, initial):
    raw = jnp.concatenate([jnp.linspace(-4, 4, 41), jnp.array([-700.0, -90.0, 60.0, 90.0])])
    scale = Scale(official, initial)
    slope = jax.grad(scale)
    expected = [jax.vmap(f)(raw) for f in (scale, slope, jax.grad(slope))]
    for own, other in zip(closed_form.Slopes(scale)(raw), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-15)


def test_slopes_stay_finite_in_float32():
    """A code may be anywhere: softplus must not overflow, nor its slopes be NaN."""
    raw = jnp.array([-1e4, -200.0, 0.0, 200.0, 1e4])
    scale = Scale(False, 0.1)
    own, slope, bend = closed_form.Slopes(scale)(raw)
    np.testing.assert_allclose(own, scale(raw), rtol=1e-6)
    np.testing.assert_allclose(slope, jax.vmap(jax.grad(scale))(raw), rtol=1e-6)
    assert jnp.isfinite(bend).all()
    assert slope[0] == 0
    assert bend[0] == bend[-1] == 0
