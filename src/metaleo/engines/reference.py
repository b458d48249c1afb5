"""What every engine is held to: the learner as it is written, under `jax.vmap`."""

from typing import ClassVar

import jax
from jaxtyping import Array, Float, Key, PyTree

from metaleo.engines.engine import Engine
from metaleo.learners.learner import Hyper, Learner
from metaleo.model.heads import Head
from metaleo.tasks.task import Batch, Tasks


class Reference(Engine):
    name: ClassVar[str] = "reference"

    def supports(self, learner: Learner, runs: int) -> bool:
        del learner, runs
        return True

    def adapt(self, learner: Learner, supports: Batch) -> Head:
        return jax.vmap(lambda support: learner.adapt(support).head)(supports)

    def meta_losses(
        self, learner: Learner, tasks: Tasks, picks: PyTree, hyper: Hyper, keys: Key[Array, " task"]
    ) -> tuple[Float[Array, " task"], dict[str, Float[Array, " task"]]]:
        return jax.vmap(lambda pick, key: learner.meta_loss(tasks.fetch(pick), hyper, key))(picks, keys)
