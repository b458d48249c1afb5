"""Gradient descent from a learned start: MAML, first-order MAML, Meta-SGD and Reptile, on the same networks as LEO.

That of Proto-MAML is made of prototypes, on a learned embedding.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo._jax.random import dropout_masks
from metaleo.inner_loop import descend
from metaleo.learners.base import SUPPORT, Adaptation, HyperParams, Learner, Metrics, descend_weights, dropout_inputs
from metaleo.losses import l2, support_loss
from metaleo.nn.heads import AffineHead, Embedding, Network, nearest_centroid_head
from metaleo.tasks.task import Batch, Task


def rows_of(network: Network, way: int) -> Float[Array, "row size"]:
    """The network's initial parameters: one row per class, or a single row if there is one θ per task.

    For the linear head they are zero: softmax regression is convex, so zero is as good a start as any.
    """
    return jnp.tile(jnp.asarray(network.start, float), (way if network.per_class else 1, 1))


def rows_for(rows: Float[Array, "trained size"], codes: int) -> Float[Array, "code size"]:
    """The learned row of each class; if the number of classes differs from training, the mean row for each."""
    return rows if len(rows) == codes else jnp.broadcast_to(rows.mean(0), (codes, rows.shape[1]))


def descend_from(
    network: Network,
    rows: Float[Array, "trained size"],
    step_size: Float[Array, "code size"] | float,
    num_steps: int,
    support: Batch,
    hyper: HyperParams | None,
    key: PRNGKeyArray | None,
    first_order: bool = False,
    max_grad_norm: float | None = None,
) -> Adaptation:
    """Gradient descent from learned rows, with fresh dropout at every step in training."""
    network.check(support)
    keep_prob, dropout = 1.0, None
    if key is not None and hyper is not None and network.dropout:
        keep_prob, dropout = (
            hyper.keep_prob,
            dropout_masks(key, hyper.keep_prob, (num_steps, *support.inputs.shape), SUPPORT),
        )
    start = rows_for(rows, network.codes(support))
    weights, losses = descend_weights(
        network, start, step_size, num_steps, support, dropout, keep_prob, first_order, max_grad_norm
    )
    return Adaptation(network.head(weights), Descent(start, weights, losses))


class Descent(eqx.Module):
    """The path of one adaptation: where it starts and ends, and the support loss before each step."""

    start: Float[Array, "code size"]
    end: Float[Array, "code size"]
    support_losses: Float[Array, " step"]


class MAML(Learner):
    """A learned start and one fixed step size (Finn et al. 2017).

    Args (of `MAML.init`):
        network: The network to adapt.
        way: Classes per training task; a row of weights is learned for each.
        step_size: Step size of every gradient step.
        num_steps: Gradient steps.
        first_order: Ignore second derivatives (FOMAML).
        max_grad_norm: Maximum norm of an inner gradient.

    Examples:
        >>> import jax
        >>> from metaleo import MAML, labelled, linear_network
        >>> learner = MAML.init(linear_network(2), way=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    start: Float[Array, "row size"]
    network: Network = eqx.field(static=True)
    step_size: float = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)
    first_order: bool = eqx.field(static=True)
    max_grad_norm: float | None = eqx.field(static=True, default=None)

    @classmethod
    def init(
        cls,
        network: Network,
        *,
        way: int = 5,
        step_size: float = 10.0,
        num_steps: int = 5,
        first_order: bool = False,
        max_grad_norm: float | None = None,
    ) -> "MAML":
        return cls(rows_of(network, way), network, step_size, num_steps, first_order, max_grad_norm)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        steps = (self.step_size, self.num_steps)
        return descend_from(self.network, self.start, *steps, support, hyper, key, self.first_order, self.max_grad_norm)

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.start)


class MetaSGD(Learner):
    """A learned start and a learned step size for every weight (Li et al. 2017).

    Args (of `MetaSGD.init`):
        network: The network to adapt.
        way: Classes per training task; a row of weights is learned for each.
        step_size: Initial value of the learned step sizes.
        num_steps: Gradient steps.
        max_grad_norm: Maximum norm of an inner gradient.

    Examples:
        >>> import jax
        >>> from metaleo import MetaSGD, labelled, linear_network
        >>> learner = MetaSGD.init(linear_network(2), way=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    start: Float[Array, "row size"]
    step_size: Float[Array, "row size"]
    network: Network = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)
    max_grad_norm: float | None = eqx.field(static=True, default=None)

    @classmethod
    def init(
        cls,
        network: Network,
        *,
        way: int = 5,
        step_size: float | Float[Array, ""] = 10.0,
        num_steps: int = 5,
        max_grad_norm: float | None = None,
    ) -> "MetaSGD":
        start = rows_of(network, way)
        return cls(start, jnp.full(start.shape, step_size), network, num_steps, max_grad_norm)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        step_size = rows_for(self.step_size, self.network.codes(support))
        return descend_from(
            self.network, self.start, step_size, self.num_steps, support, hyper, key, max_grad_norm=self.max_grad_norm
        )

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.start)


class Reptile(Learner):
    """A learned start that moves towards the adapted weights, and one fixed step size (Nichol et al. 2018).

    Args (of `Reptile.init`):
        network: The network to adapt.
        way: Classes per training task; a row of weights is learned for each.
        step_size: Step size of every gradient step.
        num_steps: Gradient steps.
        max_grad_norm: Maximum norm of an inner gradient.

    Examples:
        >>> import jax
        >>> from metaleo import Reptile, labelled, linear_network
        >>> learner = Reptile.init(linear_network(2), way=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    start: Float[Array, "row size"]
    network: Network = eqx.field(static=True)
    step_size: float = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)
    max_grad_norm: float | None = eqx.field(static=True, default=None)

    @classmethod
    def init(
        cls,
        network: Network,
        *,
        way: int = 5,
        step_size: float = 10.0,
        num_steps: int = 5,
        max_grad_norm: float | None = None,
    ) -> "Reptile":
        return cls(rows_of(network, way), network, step_size, num_steps, max_grad_norm)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        steps = self.step_size, self.num_steps
        return descend_from(self.network, self.start, *steps, support, hyper, key, max_grad_norm=self.max_grad_norm)

    def meta_loss(self, task: Task, hyper: HyperParams, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
        """½|θ - stopgrad(θ′)|², whose gradient θ - θ′ is Reptile's direction; θ′ is adapted to support and query set.

        The metrics come from adapting to the support set alone, as for every learner.
        """
        pull_key, report_key = (None, None) if key is None else jax.random.split(key)
        _, info = super().meta_loss(task, hyper, report_key)
        examples = jax.tree.map(lambda *both: jnp.concatenate(both), task.support, task.query)
        descent: Descent = self.adapt(examples, hyper, pull_key).trace
        return l2(descent.start - jax.lax.stop_gradient(descent.end)), info

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.start)


class ProtoMAML(Learner):
    """Gradient steps on W and b from W = 2s c_n, b = -s|c_n|²: a prototypical net's (Triantafillou et al. 2020).

    The logits are W E x + b, and c_n is the mean of a class's embedded examples. E, s and one step size are learned,
    through all steps and through the start.

    Args (of `ProtoMAML.init`):
        key: Not used; accepted for consistency with other learners.
        dim: Numbers per example.
        step_size: Initial value of the learned step size.
        num_steps: Gradient steps.
        max_grad_norm: Maximum norm of an inner gradient.
        sharpness: Initial value of the learned s.

    Examples:
        >>> import jax
        >>> from metaleo import ProtoMAML, labelled
        >>> learner = ProtoMAML.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    embedding: Embedding
    log_sharpness: Float[Array, ""]
    step_size: Float[Array, ""]
    num_steps: int = eqx.field(static=True)
    max_grad_norm: float | None = eqx.field(static=True, default=None)

    @classmethod
    def init(
        cls, key: PRNGKeyArray, dim: int, *, step_size: float | Float[Array, ""] = 1.0, num_steps: int = 5,
        max_grad_norm: float | None = None, sharpness: float = 10.0,
    ) -> "ProtoMAML":  # fmt: skip
        del key
        learned = jnp.full((), math.log(sharpness)), jnp.full((), step_size)
        return cls(Embedding.init(dim), *learned, num_steps, max_grad_norm)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        embedded = self.embedding(dropout_inputs(support, hyper, key))
        start = nearest_centroid_head(support.class_weights() @ embedded, jnp.exp(self.log_sharpness))

        def loss(affine: Float[Array, "way size"], _: None) -> Float[Array, ""]:
            return support_loss(embedded @ affine[:, :-1].T + affine[None, :, -1], support)

        affine = jnp.concatenate([start.weights, start.bias[:, None]], axis=1)
        end, losses = descend(loss, affine, self.step_size, self.num_steps, max_grad_norm=self.max_grad_norm)
        head = AffineHead(self.embedding.transpose(end[:, :-1]), end[:, -1])
        return Adaptation(head, Descent(affine, end, losses))

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.embedding.departure)
