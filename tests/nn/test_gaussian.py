"""Scales and divergences against numbers worked out another way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from metaleo.nn.encoder_decoder import Gaussian, Scale


@pytest.mark.parametrize(("mean", "scale"), [(0.0, 1.0), (0.7, 0.3), (-2.0, 2.5)])
def test_kl_against_numerical_integration(mean, scale, float64):
    grid = np.linspace(mean - 12 * scale, mean + 12 * scale, 20001)
    log_q = -(((grid - mean) / scale) ** 2) / 2 - np.log(scale * np.sqrt(2 * np.pi))
    log_p = -(grid**2) / 2 - np.log(np.sqrt(2 * np.pi))
    integral = np.trapezoid(np.exp(log_q) * (log_q - log_p), grid)
    np.testing.assert_allclose(Gaussian(jnp.full(3, mean), jnp.full(3, scale)).kl_to_standard(), integral, atol=1e-8)


def test_sampled_kl_has_the_right_mean(float64):
    gaussian = Gaussian(jnp.array([0.5, -1.0]), jnp.array([0.2, 1.5]))
    noise = jax.random.normal(jax.random.key(0), (200_000, 2))
    estimates = jax.vmap(Gaussian.sampled_kl_to_standard, (None, 0))(gaussian, noise)
    np.testing.assert_allclose(estimates.mean(), gaussian.kl_to_standard(), atol=4 * estimates.std() / 200_000**0.5)


def test_sampled_kl_survives_a_vanishing_scale():
    """σ = 1e-10 is where (z - μ)/σ is nothing but rounding error in float32."""
    noise = jnp.array([1.0, -2.0])
    kl = Gaussian(jnp.array([0.3, 0.3]), jnp.full(2, 1e-10)).sampled_kl_to_standard(noise)
    np.testing.assert_allclose(kl, np.mean((0.09 - noise**2) / 2 - np.log(1e-10)), rtol=1e-5)


def test_scales():
    raw = jnp.array([-5.0, 0.0, 1.0])
    smooth, official = Scale(False, 0.1), Scale(True, 0.1)
    np.testing.assert_allclose(smooth(raw), 0.1 * np.log2(1 + np.exp(raw)), rtol=1e-5)
    np.testing.assert_allclose(official(raw), [1e-10, 0.1, np.e - 0.9], rtol=1e-5)
    assert jax.grad(smooth)(jnp.float32(-5.0)) > 0
    assert jax.grad(official)(jnp.float32(-5.0)) == 0  # the dead zone that the other is without
