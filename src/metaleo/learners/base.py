"""The interface that every learner implements, and functions that learners share."""

import abc
import dataclasses
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from metaleo._jax.random import apply_dropout, dropout_masks
from metaleo.inner_loop import descend
from metaleo.losses import accuracy, cross_entropy, query_loss
from metaleo.nn.heads import Head, Network
from metaleo.tasks.task import Batch, Task, normalise

Metrics = dict[str, Float[Array, ""]]
"""Diagnostics of one task: reported, never differentiated."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HyperParams:
    """Hyper-parameters of the paper's random search (Table 6). Inside a run they are arrays, so a search is a `vmap`.

    Examples:
        >>> from metaleo import HyperParams
        >>> HyperParams(learning_rate=1e-3).kl
        0.1
    """

    learning_rate: float | Float[Array, "*runs"] = 4e-4
    """η of Algorithm 1: Adam's step size in the outer loop."""
    kl: float | Float[Array, "*runs"] = 0.1
    """β of Eq. 6: weight of the KL term."""
    encoder_penalty: float | Float[Array, "*runs"] = 1e-9
    """γ of Eq. 6: weight of the penalty that pulls codes towards adapted codes."""
    l2: float | Float[Array, "*runs"] = 1e-8
    """λ₁ of Eq. 7: weight of the L2 term."""
    orthogonality: float | Float[Array, "*runs"] = 0.1
    """λ₂ of Eq. 7: weight of the decoder's orthogonality term."""
    keep_prob: float | Float[Array, "*runs"] = 0.7
    """p_keep: probability that dropout keeps a feature."""

    OLD_NAMES: ClassVar = {"keep": "keep_prob"}
    """Names of fields in files of version 0.1."""


class Adaptation(eqx.Module):
    """The result of adapting to one task.

    Attributes:
        head: The adapted f_θ′. Call it on one input; a classifier returns logits.
        trace: Intermediate results, for inspection; each learner has its own type.

    Examples:
        >>> import jax.numpy as jnp
        >>> from metaleo import Adaptation, LinearHead
        >>> Adaptation(LinearHead(jnp.eye(2))).head(jnp.array([0.0, 3.0])).tolist()
        [0.0, 3.0]
    """

    head: Head
    trace: PyTree = None


SUPPORT, QUERY, CODE, WEIGHTS, ANCHOR = range(5)
"""Random streams of a task's key: dropout on the support and the query set, noise on codes, weights and anchors."""


class Learner(eqx.Module):
    """A meta-learning algorithm, written for ONE task. Its array leaves are φ, which the outer loop learns.

    A subclass declares learned arrays as fields and its structure as static fields; it must define only `adapt`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from metaleo import Adaptation, Learner, LinearHead, labelled
        >>> class Sharp(Learner):
        ...     sharpness: jnp.ndarray  # learned
        ...
        ...     def adapt(self, support, hyper=None, key=None):
        ...         return Adaptation(LinearHead(self.sharpness * support.class_weights() @ support.inputs))
        >>> head = Sharp(jnp.array(2.0)).adapt(labelled(jnp.eye(2), jnp.arange(2), way=2)).head
        >>> head(jnp.array([1.0, 0.0])).tolist()
        [2.0, 0.0]
    """

    @abc.abstractmethod
    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        """Fit the head to a support set.

        Args:
            support: The labelled examples.
            hyper: Hyper-parameters of the regularisation in training.
            key: Random key for training. Without it the learner evaluates: it uses means and no dropout. With a key
                but without `hyper`, a stochastic learner samples a solution as in training, but without dropout; other
                learners ignore the key.

        Returns:
            The adapted head and a trace.
        """

    def meta_loss(self, task: Task, hyper: HyperParams, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
        """The loss of one task that the outer loop minimises: by default, the query loss (Eq. 2).

        Args:
            task: Support set to adapt to, query set to predict.
            hyper: Weights of the terms of the loss.
            key: Random key for noise and dropout.

        Returns:
            The loss, and metrics to report.
        """
        head = self.adapt(task.support, hyper, key).head
        return query_loss_and_metrics(head, task.query, hyper, key, getattr(self, "network", None))

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        """A term that the outer loop adds to the mean over tasks once per meta-step, usually a penalty on weights."""
        del hyper
        return jnp.zeros(())

    @property
    def preparation(self) -> Callable[[Float[Array, "*batch dim"]], Float[Array, "*batch dim"]]:
        """What is done to every row before the learner sees it: that of its anchor, or scaling to length one."""
        anchor = getattr(self, "anchor", None)
        return normalise if anchor is None else anchor.preparation

    def with_feature_mean(self, mean: Float[Array, " dim"]) -> "Learner":
        """This learner with the mean of the training features; most learners ignore it."""
        del mean
        return self


def dropout_inputs(
    batch: Batch, hyper: HyperParams | None, key: PRNGKeyArray | None, stream: int = SUPPORT
) -> Float[Array, "example *input"]:
    """The inputs of a batch with dropout applied, or unchanged without `key` or `hyper`."""
    if key is None or hyper is None:
        return batch.inputs
    return apply_dropout(batch.inputs, dropout_masks(key, hyper.keep_prob, batch.inputs.shape, stream), hyper.keep_prob)


def descend_weights(
    network: Network,
    start: Float[Array, "code size"],
    step_size: Float[Array, "*code size"] | float,
    num_steps: int,
    support: Batch,
    dropout_masks: Bool[Array, "step example *input"] | None,
    keep_prob: float | Float[Array, ""],
    first_order: bool = False,
    max_grad_norm: float | None = None,
) -> tuple[Float[Array, "code size"], Float[Array, " step"]]:
    """θ′ = θ - α ∘ ∇L(θ), `num_steps` times (Eq. 1), one dropout mask per step; also returns the loss before each."""

    def loss(weights, mask):
        return network.support_loss(
            jax.vmap(network.head(weights))(apply_dropout(support.inputs, mask, keep_prob)), support
        )

    return descend(loss, start, step_size, num_steps, dropout_masks, first_order, max_grad_norm)


def query_loss_and_metrics(
    head: Head, query: Batch, hyper: HyperParams, key: PRNGKeyArray | None, network: Network | None = None
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a head on the query set, with dropout if there is a `key`, and the metrics to report."""
    if network is not None:
        network.check(query)
        key = key if network.dropout else None
    predictions = jax.vmap(head)(dropout_inputs(query, hyper, key, QUERY))
    loss = query_loss(predictions, query, cross_entropy if network is None else network.loss)
    metrics = {"query_loss": loss}
    if network is None or network.classifies:
        metrics |= {"query_accuracy": accuracy(predictions, query)}
    return loss, metrics
