"""The reference engine, which all others must reproduce: the learner as it is written, under `jax.vmap`."""

from typing import ClassVar

import jax
from jaxtyping import Array, Float, Key, PyTree

from metaleo.engines.base import Engine
from metaleo.learners.base import HyperParams, Learner
from metaleo.nn.heads import Head
from metaleo.tasks.task import Batch, Tasks


class Reference(Engine):
    name: ClassVar[str] = "reference"

    def supports(self, learner: Learner, runs: int) -> bool:
        del learner, runs
        return True

    def adapt(self, learner: Learner, supports: Batch) -> Head:
        return jax.vmap(lambda support: learner.adapt(support).head)(supports)

    def meta_losses(
        self, learner: Learner, tasks: Tasks, indices: PyTree, hyper: HyperParams, keys: Key[Array, " task"]
    ) -> tuple[Float[Array, " task"], dict[str, Float[Array, " task"]]]:
        return jax.vmap(lambda sample_indices, key: learner.meta_loss(tasks.gather(sample_indices), hyper, key))(
            indices, keys
        )
