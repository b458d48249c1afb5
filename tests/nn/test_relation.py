"""The relation net against all pairs written out, on an unbalanced, padded support set."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.small import close, make_batch, pad
from metaleo.nn import encoder_decoder as relation
from metaleo.nn.encoder_decoder import RelationNet


def test_against_all_pairs_written_out(float64):
    counts = (1, 3, 2)
    labels = np.repeat(np.arange(3), counts)
    codes = jax.random.normal(jax.random.key(1), (6, 4))
    net = RelationNet.init(jax.random.key(0), 4)

    def relate(a, b):
        hidden = jax.nn.relu(jnp.concatenate([codes[a], codes[b]]) @ net.first)
        return jax.nn.relu(hidden @ net.middle) @ net.last

    expected = np.stack(
        [np.mean([relate(a, b) for a in np.flatnonzero(labels == n) for b in range(6)], axis=0) for n in range(3)]
    )
    close(net(codes, make_batch(counts=counts)), expected, 1e-12)
    padded = jnp.concatenate([codes, jnp.full((2, 4), 9.0)])
    close(net(padded, pad(make_batch(counts=counts), 2)), expected, 1e-12)


@pytest.mark.parametrize("per_class", by_default([False], [True, False]))
def test_many_examples_in_parts(float64, monkeypatch, per_class):
    """The same numbers and gradients, a few pairs at a time."""
    support = pad(make_batch(counts=(1, 6, 4)), 2)
    codes = jax.random.normal(jax.random.key(1), (13, 4))
    net = RelationNet.init(jax.random.key(0), 4)

    def total(net, codes):
        return jnp.sum(net(codes, support, per_class) ** 2)

    whole, gradient = total(net, codes), jax.jit(jax.grad(total))(net, codes)
    monkeypatch.setattr(relation, "PAIRS_AT_ONCE", 25)  # 25 pairs at a time: one example with all its partners
    close(total(net, codes), whole, 1e-12)
    in_parts = jax.jit(jax.grad(lambda *given: total(*given)))(net, codes)  # compiled anew
    jax.tree.map(lambda one, other: close(one, other, 1e-12), in_parts, gradient)
