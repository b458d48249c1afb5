"""The contract that every algorithm keeps, and what they share."""

import abc
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from metaleo.inner_loop import descend
from metaleo.losses import accuracy, cross_entropy, query_loss
from metaleo.model.heads import Head
from metaleo.model.network import Network
from metaleo.randomness import masks
from metaleo.tasks.task import Batch, Task

Info = dict[str, Float[Array, ""]]
"""Diagnostics of one task: numbers to report, never to differentiate."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Hyper:
    """The numbers of the paper's random search (Table 6). Arrays inside a run, so that a search is a `vmap`."""

    learning_rate: float | Float[Array, "*runs"] = 4e-4
    """η of Algorithm 1: Adam's step in the outer loop."""
    kl: float | Float[Array, "*runs"] = 0.1
    """β of Eq. 6: weight of the KL term."""
    encoder_penalty: float | Float[Array, "*runs"] = 1e-9
    """γ of Eq. 6: weight of the pull of codes to adapted codes."""
    l2: float | Float[Array, "*runs"] = 1e-8
    """λ₁ of Eq. 7: weight of the L2 term."""
    orthogonality: float | Float[Array, "*runs"] = 0.1
    """λ₂ of Eq. 7: weight of the decoder's orthogonality term."""
    keep: float | Float[Array, "*runs"] = 0.7
    """p_keep: probability that dropout keeps a feature."""


class Adaptation(eqx.Module):
    """A task solved: `head` classifies one input; `trace` is how it came about, for those who want to look."""

    head: Head
    trace: PyTree = None


SUPPORT, QUERY, CODE, WEIGHTS = range(4)
"""What is drawn from the key of a task, each in a stream of its own: dropout on the two sets, noise."""


class Learner(eqx.Module):
    """A way of learning to learn, written for ONE task. Its array leaves are φ: what the outer loop learns."""

    @abc.abstractmethod
    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        """Fit the head to a support set. Without a key: evaluation, that is means and no dropout.

        A key without hyper-parameters samples a solution as in training, from those a stochastic learner holds
        possible, but drops nothing; for other learners it changes nothing.
        """

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        """What the outer loop minimises, for one task: the query loss of the head adapted to the support set (Eq. 2).

        Unless a learner says otherwise.
        """
        head = self.adapt(task.support, hyper, key).head
        return query_loss_and_metrics(head, task.query, hyper, key, getattr(self, "network", None))

    def regulariser(self, hyper: Hyper) -> Float[Array, ""]:
        """What the outer loop adds to the mean over tasks, once in a meta-step; for most, a penalty on weights."""
        del hyper
        return jnp.zeros(())

    def informed(self, mean: Float[Array, " dim"]) -> "Learner":
        """This learner, knowing the mean of the training features; most have no use for it."""
        del mean
        return self


def drop(
    inputs: Float[Array, "example *input"],
    mask: Bool[Array, "example *input"] | None,
    keep: float | Float[Array, ""],
) -> Float[Array, "example *input"]:
    """Inputs where the mask is true, scaled by 1/keep so that their expectation stays."""
    if mask is None:
        return inputs
    scale = (1 / jnp.asarray(keep)).astype(inputs.dtype)
    return jnp.where(mask, inputs * scale, jnp.zeros((), inputs.dtype))


def dropped(
    batch: Batch, hyper: Hyper | None, key: PRNGKeyArray | None, stream: int = SUPPORT
) -> Float[Array, "example *input"]:
    """The inputs of a batch under one draw of dropout, or without a key as they are."""
    if key is None or hyper is None:
        return batch.inputs
    return drop(batch.inputs, masks(key, hyper.keep, batch.inputs.shape, stream), hyper.keep)


def descend_weights(
    network: Network,
    start: Float[Array, "code size"],
    step_size: Float[Array, "*code size"] | float,
    num_steps: int,
    support: Batch,
    masks: Bool[Array, "step example *input"] | None,
    keep: float | Float[Array, ""],
    first_order: bool = False,
    limit: float | None = None,
) -> tuple[Float[Array, "code size"], Float[Array, " step"]]:
    """θ′ = θ - α ∘ ∇L(θ), `num_steps` times (Eq. 1), each with its own dropout mask; also the loss before each."""

    def loss(weights, mask):
        return network.support_loss(jax.vmap(network.head(weights))(drop(support.inputs, mask, keep)), support)

    return descend(loss, start, step_size, num_steps, masks, first_order, limit)


def query_loss_and_metrics(
    head: Head, query: Batch, hyper: Hyper, key: PRNGKeyArray | None, network: Network | None = None
) -> tuple[Float[Array, ""], Info]:
    """The loss of a head on the query set, under dropout like every other prediction; and what is reported of it."""
    if network is not None:
        network.check(query)
        key = key if network.dropout else None
    predictions = jax.vmap(head)(dropped(query, hyper, key, QUERY))
    loss = query_loss(predictions, query, cross_entropy if network is None else network.loss)
    metrics = {"query_loss": loss}
    if network is None or network.classifies:
        metrics |= {"query_accuracy": accuracy(predictions, query)}
    return loss, metrics
