"""Descent against closed forms, and the closed form of linear heads against descent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.small import DIM, adapt, close, make_batch, make_learner
from metaleo.engines.closed_form import descend_in_products
from metaleo.inner_loop import descend
from metaleo.losses import support_loss
from metaleo.nn.heads import LinearHead


def test_quadratic_has_a_closed_form(float64):
    """For loss Σ c x²/2 each step multiplies x by 1 - αc."""
    curvature, start, step_size = jnp.array([1.0, 3.0]), jnp.array([2.0, -1.0]), jnp.array([0.1, 0.2])
    end, losses = descend(lambda x, _: jnp.sum(curvature * x**2) / 2, start, step_size, 4)
    np.testing.assert_allclose(end, start * (1 - step_size * curvature) ** 4)
    np.testing.assert_allclose(losses[0], 3.5)
    assert losses.shape == (4,)


def test_each_step_sees_its_own_noise():
    end, _ = descend(lambda x, shift: jnp.sum(x * shift), jnp.zeros(2), 1.0, 3, jnp.array([[1.0, 0], [2, 0], [3, 5]]))
    np.testing.assert_allclose(end, [-6, -5])


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("counts", by_default([(1, 4, 2)], [(1, 1, 1), (1, 4, 2)]))
def test_linear_descent_is_descent(draws, counts, float64):
    """Values, and gradients with respect to everything: the start, the step sizes and the inputs."""
    support = make_batch(counts=counts)
    steps = 3
    random = np.random.default_rng(0)
    start, step_size = random.normal(size=(3, DIM)), random.uniform(0.1, 0.5, DIM)
    inputs = random.normal(size=(draws, len(support.inputs), DIM))
    target = random.normal(size=(3, DIM))

    def plain(start, step_size, inputs):
        shown = jnp.broadcast_to(inputs, (steps, *inputs.shape[1:]))
        return descend(
            lambda weights, x: support_loss(jax.vmap(LinearHead(weights))(x), support),
            start, step_size[None, :], steps, shown,
        )[0]  # fmt: skip

    def closed(start, step_size, inputs):
        one = jax.tree.map(lambda leaf: leaf[None], (start, inputs, support))
        return descend_in_products(one[0], step_size, steps, *one[1:])[0]

    arguments = tuple(jnp.asarray(value) for value in (start, step_size, inputs))
    close(closed(*arguments), plain(*arguments), 1e-12)
    gradients = [
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * target), (0, 1, 2)))(*arguments) for f in (plain, closed)
    ]
    close(*gradients, 1e-10)


def test_no_steps_leave_the_start():
    start = jnp.ones((3, DIM))
    end, losses = descend(lambda x, _: jnp.sum(x), start, 1.0, 0)
    close(end, start)
    assert losses.shape == (0,)


def test_long_gradients_are_shortened_and_short_ones_are_not():
    """Of x²/2 the gradient is x: a step of 0.1 along it, of length 2 at most; and differentiable where it is zero."""

    def after_a_step(x):
        return descend(lambda x, _: jnp.sum(x**2) / 2, x, 0.1, 1, max_grad_norm=2.0)[0]

    np.testing.assert_allclose(after_a_step(jnp.array([30.0, 40.0])), [30 - 0.12, 40 - 0.16], rtol=1e-6)
    np.testing.assert_allclose(after_a_step(jnp.array([0.3, 0.4])), [0.27, 0.36], rtol=1e-6)
    assert jnp.isfinite(jax.jacobian(after_a_step)(jnp.zeros(2))).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", by_default(["leo", "maml"], ["leo", "maml", "meta-sgd", "reptile"]))
def test_every_learner_of_networks_keeps_to_its_limit(name):
    """With the limit so low that it binds, adaptation ends elsewhere."""
    mlp = {"network": "mlp", "hidden": 3, "layers": 2, "from_start": True}
    free, bound = (adapt(make_learner(name, max_grad_norm=limit, **mlp), make_batch()) for limit in (None, 1e-3))
    assert np.abs(free.head.parameters - bound.head.parameters).max() > 1e-4
    if name == "leo":  # which descends twice
        assert np.abs(free.trace.adapted_code - bound.trace.adapted_code).max() > 1e-4
