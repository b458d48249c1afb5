"""The training path with its derivatives written out, against LEO straight from the paper's equations."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import plain
from helpers.marks import by_default
from helpers.small import HYPER, close, make_batch, make_learner, make_task, pad, shake, stack
from metaleo import closed_form
from metaleo.learners.learner import QUERY
from metaleo.model.gaussian import Slopes, official_scale, smooth_scale
from metaleo.randomness import masks
from metaleo.tasks import Task

EXACT = 1e-9
"""Of the largest entry, in double precision."""
ROUNDING = 2e-5
"""The same in single precision: some hundred times the spacing of its numbers, over ten steps and their derivatives."""
CASES = {
    "1-shot": {"shot": 1},
    "5-shot": {"shot": 5},
    "official": {"shot": 1, "official": True},
    "unequal": {"shot": None},
    "one step": {"shot": 1, "latent_steps": 1, "finetune_steps": 1},
    "no dropout": {"shot": 2, "dropout": False},
    "not stochastic": {"shot": 2, "name": "leo-deterministic"},
    "no latent steps": {"shot": 2, "latent_steps": 0},
    "no fine-tuning steps": {"shot": 2, "finetune_steps": 0},
}


def make_problem(shot=2, name="leo", dropout=True, seed=0, **changes):
    """A learner, three tasks as one tree of arrays, and the noise and the key of each.

    Noise is drawn once for both sides: in another program its float32 numbers may round another way.
    """
    sizes = {"latent_steps": 3, "finetune_steps": 3, **changes}
    learner = shake(make_learner(name, seed=seed, **sizes), 0.2)
    if shot is None:  # as many rows as the largest, and padding where there are fewer
        all_counts = (1, 1, 1), (1, 3, 2), (4, 2, 3)
        tasks = [pad_task(make_batch(seed + i, c), make_batch(seed + 50 + i, c)) for i, c in enumerate(all_counts)]
    else:
        tasks = [make_task(seed + i, shot=shot) for i in range(3)]
    tasks = stack(tasks)
    keys = jax.random.split(jax.random.key(seed), 3)
    draw = jax.jit(jax.vmap(lambda task, key: learner.draw_noise(task.support, HYPER if dropout else None, key)))
    return learner, tasks, (draw(tasks, keys), keys)


def pad_task(*batches):
    return Task(*(pad(batch, 9 - len(batch.inputs)) for batch in batches))


def entry(tree, i):
    return jax.tree.map(lambda leaf: leaf[i], tree)


def plain_loss(learner, task, draws):
    noise, key = draws
    dropout = noise.encoder_mask is not None
    query_mask = masks(key, HYPER.keep, task.query.inputs.shape, QUERY) if dropout else None
    return plain.meta_loss(learner, task, HYPER, noise, query_mask)


def fast_loss(learner, task, draws):
    noise, key = draws
    return learner.meta_loss_with(task, HYPER, noise, None if noise.encoder_mask is None else key)


def of_batch(loss):
    """The mean loss over vmapped tasks, with the losses and infos of each."""

    def mean_loss(learner, tasks, draws):
        losses, infos = jax.vmap(loss, (None, 0, 0))(learner, tasks, draws)
        return losses.mean(), (losses, infos)

    return mean_loss


def plain_results(learner, tasks, draws):
    """Losses, infos and meta-gradient, one task after the other."""
    differentiate = jax.jit(jax.value_and_grad(plain_loss, has_aux=True))
    results = [differentiate(learner, entry(tasks, i), entry(draws, i)) for i in range(len(tasks.support.mask))]
    (losses, infos), gradients = stack(results)
    return losses, infos, jax.tree.map(lambda leaf: leaf.mean(0), gradients)


def check(problem, tolerance):
    gradient, (losses, infos) = jax.jit(jax.grad(of_batch(fast_loss), has_aux=True))(*problem)
    expected_losses, expected_infos, expected = plain_results(*problem)
    assert close(losses, expected_losses, tolerance)
    assert infos.keys() == expected_infos.keys()
    assert close(infos, expected_infos, tolerance)
    assert close(gradient, expected, tolerance)
    return gradient


@pytest.mark.parametrize("case", by_default(["unequal"], CASES))
def test_meta_batch_in_double_precision(float64, case):
    gradient = check(make_problem(**CASES[case]), EXACT)
    steps = {"latent_step_size": "no latent steps", "finetune_step_size": "no fine-tuning steps"}
    for name, without in steps.items():
        assert jnp.any(getattr(gradient, name)) == (case != without)


@pytest.mark.parametrize("case", by_default(["1-shot"], ["1-shot", "5-shot", "unequal"]))
def test_meta_batch_to_float32_rounding(case):
    check(make_problem(**CASES[case]), ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1-shot", "5-shot"])
def test_the_forms_for_a_gpu_give_the_same(float64, case, monkeypatch):
    monkeypatch.setattr(closed_form, "on_gpu", lambda: True)
    check(make_problem(**CASES[case]), EXACT)


@pytest.mark.slow
def test_losses_on_the_way_have_gradients_too(float64):
    """Those of the trace: nothing in Eq. 6 asks for them, but a learner may be looked at through them."""
    learner, tasks, draws = make_problem(shot=1)
    weights = jnp.arange(1.0, 8.0)  # of 3 + 3 steps and the end

    def path(learner, task, draw):
        return jnp.sum(weights * learner.adapt_with(task.support, draw[0]).trace.support_losses)

    together = jax.jit(jax.grad(lambda learner: jax.vmap(path, (None, 0, 0))(learner, tasks, draws).sum()))(learner)
    alone = jax.jit(jax.grad(path))
    each = [alone(learner, entry(tasks, i), entry(draws, i)) for i in range(3)]
    assert close(together, jax.tree.map(lambda *leaves: sum(leaves), *each), EXACT)


@pytest.mark.slow
def test_several_samples_of_each_task(float64):
    """A vmap inside the vmap; what samples say together is -(1/Q) log (1/M) Σ exp(-Q L)."""
    learner, tasks, (_, keys) = make_problem(samples=2)
    loss = of_batch(lambda learner, task, key: learner.meta_loss(task, HYPER, key))
    gradient, (losses, _) = jax.jit(jax.grad(loss, has_aux=True))(learner, tasks, keys)

    @jax.jit
    @jax.value_and_grad
    def sampled(learner, task, key):
        draws = [(learner.draw_noise(task.support, HYPER, own), own) for own in jax.random.split(key, 2)]
        pairs = [plain_loss(learner, task, draw) for draw in draws]
        queries = [info["query_loss"] for _, info in pairs]
        together = -jnp.log(sum(jnp.exp(-12 * query) for query in queries) / 2) / 12
        return together + sum(loss - query for (loss, _), query in zip(pairs, queries, strict=True)) / 2

    results = [sampled(learner, entry(tasks, i), keys[i]) for i in range(3)]
    loss, expected = jax.tree.map(lambda *leaves: sum(leaves) / 3, *results)
    assert close(losses.mean(), loss, 1e-6)  # float32 noise, drawn in two programs
    assert close(gradient, expected, 1e-6)


@pytest.mark.slow
def test_learners_side_by_side(float64):
    """Another vmap outside: two runs, each with weights and tasks of its own."""
    problems = [make_problem(shot=1, seed=seed) for seed in (0, 9)]
    lanes = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)
    gradients, (losses, _) = jax.jit(jax.vmap(jax.grad(of_batch(fast_loss), has_aux=True)))(*lanes)
    for lane, problem in enumerate(problems):
        expected_losses, _, expected = plain_results(*problem)
        assert close(losses[lane], expected_losses, EXACT)
        assert close(entry(gradients, lane), expected, EXACT)


@pytest.mark.slow
def test_one_task_alone(float64):
    learner, tasks, draws = make_problem(shot=1)
    (value, info), gradient = jax.jit(jax.value_and_grad(fast_loss, has_aux=True))(
        learner, entry(tasks, 0), entry(draws, 0)
    )
    losses, infos, expected = plain_results(learner, *first(tasks, draws))
    assert close(value, losses[0], EXACT)
    assert close(info, entry(infos, 0), EXACT)
    assert close(gradient, expected, EXACT)


def first(*trees, i=0):
    """Entry i alone, its axis kept."""
    return jax.tree.map(lambda leaf: leaf[i : i + 1], trees)


@pytest.mark.slow
def test_a_compiled_function_of_one_task_can_be_mapped(float64):
    """What the vmap then sees is a program of one task."""
    problem = make_problem(shot=1)
    gradient, _ = jax.grad(of_batch(jax.jit(fast_loss)), has_aux=True)(*problem)
    assert close(gradient, plain_results(*problem)[2], EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["grad of vmap", "vmap of grad"])
def test_every_task_with_a_learner_of_its_own(float64, order):
    learner, tasks, draws = make_problem(shot=1)
    learners = stack([shake(learner, 0.1, seed) for seed in range(3)])
    if order == "grad of vmap":
        gradients = jax.jit(jax.grad(lambda many: jax.vmap(fast_loss)(many, tasks, draws)[0].sum()))(learners)
    else:
        gradients, _ = jax.jit(jax.vmap(jax.grad(fast_loss, has_aux=True)))(learners, tasks, draws)
    for i in range(3):
        assert close(entry(gradients, i), plain_results(entry(learners, i), *first(tasks, draws, i=i))[2], EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1-shot", "unequal", "no dropout", "not stochastic"])
def test_gradient_with_respect_to_inputs(float64, case):
    """What lies before the learner may be learned too (learners/joint.py)."""
    learner, tasks, draws = make_problem(**CASES[case])

    def inputs_of(task):
        return task.support.inputs, task.query.inputs

    def of_inputs(loss):
        return lambda inputs, task, draw: loss(learner, eqx.tree_at(inputs_of, task, inputs), draw)[0]

    one = jax.jit(jax.grad(of_inputs(plain_loss)))
    expected = [one(inputs_of(entry(tasks, i)), entry(tasks, i), entry(draws, i)) for i in range(3)]
    expected = stack(expected)
    total = jax.jit(jax.grad(lambda inputs: jax.vmap(of_inputs(fast_loss))(inputs, tasks, draws).sum()))
    assert close(total(inputs_of(tasks)), expected, EXACT)
    assert all(jnp.any(part) for part in expected)


@pytest.mark.parametrize(("official", "to_scale"), [(False, smooth_scale), (True, official_scale)])
@pytest.mark.parametrize("initial", [0.0559, 0.5])
def test_slopes_are_the_derivatives_of_the_scale(float64, official, to_scale, initial):
    raw = jnp.concatenate([jnp.linspace(-4, 4, 41), jnp.array([-700.0, -90.0, 60.0, 90.0])])
    slope = jax.grad(lambda raw: to_scale(raw, initial))
    expected = [jax.vmap(f)(raw) for f in (lambda raw: to_scale(raw, initial), slope, jax.grad(slope))]
    for own, other in zip(Slopes(official, initial)(raw), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-12, atol=1e-15)


def test_slopes_stay_finite_in_float32():
    """A code may be anywhere: softplus must not overflow, nor its slopes be NaN."""
    raw = jnp.array([-1e4, -200.0, 0.0, 200.0, 1e4])
    scale, slope, bend = Slopes(False, 0.1)(raw)
    np.testing.assert_allclose(scale, smooth_scale(raw, 0.1), rtol=1e-6)
    np.testing.assert_allclose(slope, jax.vmap(jax.grad(lambda raw: smooth_scale(raw, 0.1)))(raw), rtol=1e-6)
    assert jnp.isfinite(bend).all()
    assert slope[0] == 0
    assert bend[0] == bend[-1] == 0
