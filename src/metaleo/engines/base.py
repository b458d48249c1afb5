"""The interface of an engine."""

import abc
from typing import ClassVar

from jaxtyping import Array, Float, Key, PyTree

from metaleo.learners.base import HyperParams, Learner
from metaleo.nn.heads import Head
from metaleo.tasks.task import Batch, Tasks


class Engine(abc.ABC):
    """Computes many tasks at once. Arrays of tasks have a leading task axis; all tasks share one learner.

    Every method may be called under `jax.jit`, and under a `jax.vmap` over runs, each with its own learner.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def supports(self, learner: Learner, runs: int) -> bool:
        """Whether the engine supports this learner, whose arrays may be abstract, in `runs` parallel runs."""

    @abc.abstractmethod
    def adapt(self, learner: Learner, supports: Batch) -> Head:
        """`Learner.adapt` for each support set, as in evaluation: with means and without dropout."""

    @abc.abstractmethod
    def meta_losses(
        self, learner: Learner, tasks: Tasks, indices: PyTree, hyper: HyperParams, keys: Key[Array, " task"]
    ) -> tuple[Float[Array, " task"], dict[str, Float[Array, " task"]]]:
        """`Learner.meta_loss` of each task; `indices` come from `tasks.sample_indices`, and `keys` are for the noise.

        Differentiable with respect to the learner.
        """

    def regulariser(self, learner: Learner, hyper: HyperParams) -> Float[Array, ""]:
        """`Learner.regulariser`; also differentiable."""
        return learner.regulariser(hyper)
