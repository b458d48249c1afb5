"""g_φr: every ordered pair of examples, to the statistics of one code per class."""

import equinox as eqx
import jax
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.tasks.task import Batch

PAIRS_AT_ONCE = 2**16
"""All pairs of many examples would fill the memory."""


class RelationNet(eqx.Module):
    """An MLP without biases over all (NK)² pairs, ReLU between its layers and none after the last (Eq. 3)."""

    first: Float[Array, "pair hidden"]
    middle: Float[Array, "hidden hidden"]
    last: Float[Array, "hidden out"]

    @classmethod
    def init(cls, key: PRNGKeyArray, code: int) -> "RelationNet":
        pair = 2 * code  # also the width of the hidden layers, and of the output: mean and scale of a code
        return cls(*(glorot_uniform()(layer_key, (pair, pair)) for layer_key in jax.random.split(key, 3)))

    def __call__(
        self, hidden_codes: Float[Array, "example code"], support: Batch, per_class: bool = True
    ) -> Float[Array, "codes out"]:
        """(1/NK²) Σ_k Σ_m Σ_k′ g([h_nk, h_mk′]) for each class n: the mean over pairs whose first element is in n.

        Not `per_class`, there is one code for the task, from the mean over all pairs.

        Two rearrangements save most of the work and change no number: the first layer acts on the two halves of
        a pair separately, and the mean over pairs is taken before the last layer, which is linear.
        """
        left, right = hidden_codes @ self.first.reshape(2, hidden_codes.shape[1], -1)
        partners = support.weights()

        def mean_over_partners(own: Float[Array, " hidden"]) -> Float[Array, " hidden"]:
            return partners @ jax.nn.relu(jax.nn.relu(own[None, :] + right) @ self.middle)

        at_once = max(1, PAIRS_AT_ONCE // len(left))
        if len(left) <= at_once:
            means = jax.vmap(mean_over_partners)(left)
        else:
            means = jax.lax.map(mean_over_partners, left, batch_size=at_once)
        return self.first_elements(support, per_class) @ means @ self.last

    def first_elements(self, support: Batch, per_class: bool) -> Float[Array, "codes example"]:
        """What each example counts, as the first of a pair, in the mean of each code."""
        return support.class_weights() if per_class else support.weights()[None, :]
