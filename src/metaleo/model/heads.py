"""f_θ: what a learner hands back, a classifier for the task at hand."""

import equinox as eqx
from jaxtyping import Array, Float


class LinearHead(eqx.Module):
    """An N-way softmax classifier: one row of weights per class, no bias. Called on ONE input; returns logits."""

    weights: Float[Array, "way dim"]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.weights @ x
