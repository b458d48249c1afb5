"""Learners that compare with examples instead of descending."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.learners.learner import Adaptation, Hyper, Info, Learner, judge
from metaleo.model.heads import LinearHead
from metaleo.tasks.task import Batch, Task


class NearestCentroid(Learner):
    """Cosine to each class's mean, times a fixed sharpness: nothing is learned. The floor for everything else."""

    sharpness: float = eqx.field(static=True, default=10.0)

    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        del hyper, key
        centroids = support.class_weights() @ support.inputs
        norms = jnp.linalg.norm(centroids, axis=1, keepdims=True)
        return Adaptation(LinearHead(self.sharpness * centroids / jnp.maximum(norms, 1e-12)))

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        return judge(self.adapt(task.support).head, task.query, hyper, None)
