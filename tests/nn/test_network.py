"""Any network as a function of one vector, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import close, message
from metaleo.config.presets import PRESETS
from metaleo.losses import cross_entropy
from metaleo.nn.heads import Network, gaussian_nll, linear_network, named_network
from metaleo.tasks.sines_and_lines import points
from metaleo.tasks.task import Batch

KEY = jax.random.key(0)
SQUARED = gaussian_nll(1.0)


def make_mlp(**changes):
    settings = {"in_size": 3, "out_size": 2, "width_size": 4, "depth": 1, "key": KEY}
    return eqx.nn.MLP(**{**settings, **changes})


def test_the_papers_network_has_1761_parameters():
    """Appendix A.2: three layers, 40 units, one number in and out."""
    network = PRESETS["sines-and-lines"].structure.generated()
    assert network.size == 1761
    assert (network.inputs, network.targets, network.per_class) == ((1,), (1,), False)


def test_a_module_from_its_own_vector_is_itself():
    model, x = make_mlp(), jnp.array([0.3, -1.0, 2.0])
    network = Network.of(model, SQUARED, (3,), (2,))
    assert network.size == 3 * 4 + 4 + 4 * 2 + 2
    close(network.apply(jnp.asarray(network.start), x), model(x))
    doubled = jax.tree.map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, model)
    close(network.apply(2 * jnp.asarray(network.start), x), doubled(x))


def test_functions_over_a_tree():
    tree = {"slope": jnp.ones((2, 3)), "shift": jnp.zeros(2)}
    network = Network.over(tree, lambda tree, x: tree["slope"] @ x + tree["shift"], SQUARED, (3,), (2,))
    theta = jnp.arange(8.0)  # leaves come in the order of their names: shift, then slope
    close(network.apply(theta, jnp.ones(3)), theta[2:].reshape(2, 3).sum(1) + theta[:2])


def test_a_network_per_class_gives_logits():
    network = named_network("mlp", 3, hidden=4, layers=2, channels=1, targets=None, noise=None)
    parameters = jax.random.normal(KEY, (5, network.size))
    logits = network.head(parameters)(jnp.ones(3))
    assert logits.shape == (5,)
    close(logits[2], network.apply(parameters[2], jnp.ones(3)))


def test_a_gru_reads_a_row_in_its_order():
    network = named_network("gru", 6, hidden=4, layers=1, channels=2, targets=None, noise=None)
    model = eqx.nn.GRUCell(2, 4, key=jax.random.split(KEY)[0])
    out = eqx.nn.Linear(4, "scalar", key=jax.random.split(KEY)[1])
    row, state = jnp.arange(6.0) / 5, jnp.zeros(4)
    for pair in row.reshape(3, 2):
        state = model(pair, state)
    close(network.apply(jnp.asarray(network.start), row), out(state))


def test_gaussian_nll_against_scipy():
    from scipy.stats import norm

    prediction, target = np.array([0.5, -1.0]), np.array([0.2, 3.0])
    ours = gaussian_nll(0.3)(jnp.asarray(prediction, jnp.float32), jnp.asarray(target, jnp.float32))
    np.testing.assert_allclose(ours, -norm.logpdf(target, prediction, 0.3).sum(), rtol=1e-5)


def test_names_are_built_once():
    """Networks are compared by identity: a second object would compile everything again."""
    settings = {"hidden": 4, "layers": 3, "channels": 1, "targets": 1, "noise": 0.3}
    assert named_network("mlp", 1, **settings) is named_network("mlp", 1, **settings)
    assert linear_network(8) is linear_network(8)
    assert linear_network(8).loss is cross_entropy


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (eqx.tree_at(lambda m: m.layers[0].bias, make_mlp(), jnp.zeros(4, jnp.int32)), "holds int32"),
        (eqx.tree_at(lambda m: m.layers[0].bias, make_mlp(), jnp.zeros(4, bool)), "holds bool"),
        (eqx.nn.Lambda(jnp.tanh), "no parameters"),
        (eqx.nn.Identity(), "no parameters"),
        (make_mlp(in_size=5), "does not take one input of shape (3)"),
        (jnp.ones(3), "callable"),
        (eqx.nn.Sequential([make_mlp(), eqx.nn.Dropout(0.5)]), "Dropout requires a key"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_are_refused(model, what):
    assert what in message(lambda: Network.of(model, SQUARED, (3,), (2,)))


@pytest.mark.parametrize(
    ("loss", "targets", "what"),
    [
        (lambda prediction, target: (prediction - target) ** 2, (2,), "one number for one example, not shape (2)"),
        (lambda prediction, target: None, (2,), "not NoneType"),
        (
            lambda prediction, target: jnp.dot(prediction, target),
            (3,),
            "prediction of shape (2) and a target of shape (3)",
        ),
        (SQUARED, None, "returns one number, not shape (2)"),
    ],
)
def test_losses_and_targets_that_are_refused(loss, targets, what):
    assert what in message(lambda: Network.of(make_mlp(), loss, (3,), targets))


def test_batches_that_are_refused():
    network = Network.of(make_mlp(in_size=1, out_size=1), SQUARED, (1,), (1,))
    network.check(points(jnp.ones(5), jnp.ones(5)))
    wrong = Batch(jnp.ones((5, 1)), jnp.ones((5, 2)), jnp.ones(5, bool))
    assert message(lambda: network.check(wrong)).startswith("targets of shape (2) per example")
    wrong = Batch(jnp.ones((5, 3)), jnp.ones((5, 1)), jnp.ones(5, bool))
    assert message(lambda: network.check(wrong)).startswith("inputs of shape (3) per example")


def test_unknown_names_and_rows_that_are_no_sequences():
    settings = {"hidden": 4, "layers": 3, "channels": 4, "targets": None, "noise": None}
    assert "linear, mlp, gru" in message(lambda: named_network("transformer", 8, **settings))
    assert "no sequences of 4" in message(lambda: named_network("gru", 9, **settings))
