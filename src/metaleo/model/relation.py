"""g_φr: every ordered pair of examples, to the statistics of one code per class."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.nn.initializers import glorot_uniform
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.tasks.task import Batch
from metaleo.together import together

MANY = 256
"""Examples whose pairs are held in memory together."""


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
        first = self.first.reshape(2, hidden_codes.shape[1], -1)
        if len(hidden_codes) > MANY:
            left, right = hidden_codes @ first
            return self.in_parts(left, right, support, per_class)
        everyone = support.weights()
        firsts = support.class_weights() if per_class else everyone[None, :]
        return MEANS(hidden_codes, first, self.middle, firsts, everyone)[0] @ self.last

    def in_parts(
        self,
        left: Float[Array, "example hidden"],
        right: Float[Array, "example hidden"],
        support: Batch,
        per_class: bool,
    ) -> Float[Array, "codes out"]:
        """The same for many examples, a bounded number of pairs at a time: all at once they would fill the memory."""
        everyone = support.weights()

        def mean_over_partners(own: Float[Array, " hidden"]) -> Float[Array, " hidden"]:
            return everyone @ jax.nn.relu(jax.nn.relu(own[None, :] + right) @ self.middle)

        means = jax.lax.map(mean_over_partners, left, batch_size=max(1, MANY**2 // len(left)))
        firsts = support.class_weights() if per_class else everyone[None, :]
        return firsts @ means @ self.last


def means_over_pairs(
    codes: Float[Array, "example code"],
    first: Float[Array, "2 code hidden"],
    middle: Float[Array, "hidden hidden"],
    firsts: Float[Array, "codes example"],
    partners: Float[Array, " example"],
) -> tuple[Float[Array, "codes hidden"]]:
    """Σ_a Σ_b v_na w_b relu(relu([h_a, h_b] first) middle), v being the weights of `firsts` and w of `partners`."""
    left, right = codes @ first
    pairs = jax.nn.relu(jax.nn.relu(left[:, None] + right[None, :]) @ middle)  # (example, example, hidden)
    return (jnp.einsum("na,b,abh->nh", firsts, partners, pairs),)


@jax.custom_vjp
def means_of_tasks(*arguments: Array) -> tuple[Array, ...]:
    return means_forward(*arguments)[0]


def means_forward(
    codes: Float[Array, "task example code"],
    first: Float[Array, "2 code hidden"],
    middle: Float[Array, "hidden hidden"],
    firsts: Float[Array, "task codes example"],
    partners: Float[Array, "task example"],
) -> tuple[tuple[Array, ...], Any]:
    left, right = (codes @ half for half in first)
    pairs = jax.nn.relu(left[:, :, None] + right[:, None, :])
    related = jax.nn.relu(pairs @ middle)
    weights = firsts[:, :, :, None] * partners[:, None, None, :]
    means = jnp.einsum("tnab,tabh->tnh", weights, related)
    return (means,), (codes, first, middle, firsts, partners, pairs, related)


def means_backward(kept: Any, gradients: tuple[Array, ...]) -> tuple[Array | None, ...]:
    codes, first, middle, firsts, partners, pairs, related = kept
    of_example = jnp.einsum("tna,tnh->tah", firsts, gradients[0])
    of_related = jnp.where(related > 0, of_example[:, :, None] * partners[:, None, :, None], 0)
    of_pairs = jnp.where(pairs > 0, of_related @ middle.T, 0)
    of_middle = jnp.einsum("tabh,tabk->hk", pairs, of_related)  # the other way about XLA makes a factor again
    of_left, of_right = jnp.sum(of_pairs, axis=2), jnp.sum(of_pairs, axis=1)
    of_codes = of_left @ first[0].T + of_right @ first[1].T
    of_first = jnp.stack([jnp.einsum("tec,teh->ch", codes, half) for half in (of_left, of_right)])
    return of_codes, of_first, of_middle, None, None


means_of_tasks.defvjp(means_forward, means_backward)
MEANS = together(means_over_pairs, means_of_tasks, shared=(1, 2))
