"""What an engine does."""

import abc
from typing import ClassVar

from jaxtyping import Array, Float, Key, PyTree

from metaleo.learners.base import HyperParams, Learner
from metaleo.nn.heads import Head
from metaleo.tasks.task import Batch, Tasks


class Engine(abc.ABC):
    """Many tasks at once. Arrays of tasks have an axis of them in front; the learner is the same for all.

    Every function may be called under `jax.jit`, and under a `jax.vmap` over runs with a learner each.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def supports(self, learner: Learner, runs: int) -> bool:
        """Whether it computes with such a learner, whose arrays may be abstract, in so many runs side by side."""

    @abc.abstractmethod
    def adapt(self, learner: Learner, supports: Batch) -> Head:
        """`Learner.adapt` to each support set, as in evaluation: with means and without dropout."""

    @abc.abstractmethod
    def meta_losses(
        self, learner: Learner, tasks: Tasks, indices: PyTree, hyper: HyperParams, keys: Key[Array, " task"]
    ) -> tuple[Float[Array, " task"], dict[str, Float[Array, " task"]]]:
        """`Learner.meta_loss` of each task, given as what `tasks.pick` made of its key, and under a key for its noise.

        Differentiable with respect to the learner.
        """

    def regulariser(self, learner: Learner, hyper: HyperParams) -> Float[Array, ""]:
        """`Learner.regulariser`, differentiable as well."""
        return learner.regulariser(hyper)
