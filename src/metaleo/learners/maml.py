"""MAML, first-order MAML, Meta-SGD and Reptile, on the same linear head as LEO: descent from a learned start."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from metaleo.inner_loop import descend
from metaleo.learners.learner import Adaptation, Hyper, Info, Learner, draw_masks, drop, pay
from metaleo.model.heads import LinearHead
from metaleo.objective import l2, support_loss
from metaleo.tasks.task import Batch, Task


def rows_for(rows: Float[Array, "trained_way dim"], way: int) -> Float[Array, "way dim"]:
    """A learned row per class; for another number of classes than in training, the mean row for each."""
    return rows if len(rows) == way else jnp.broadcast_to(rows.mean(0), (way, rows.shape[1]))


def descend_weights(
    start: Float[Array, "way dim"],
    step_size: Float[Array, "way dim"] | float,
    num_steps: int,
    support: Batch,
    hyper: Hyper | None,
    key: PRNGKeyArray | None,
    first_order: bool = False,
) -> tuple[Float[Array, "way dim"], Float[Array, " step"]]:
    """θ′ = θ - α ∘ ∇L(θ), `num_steps` times (Eq. 1), with fresh dropout at every step."""
    keep, masks = 1.0, None
    if key is not None:
        assert hyper is not None, "dropout needs hyper.keep"
        keep, masks = hyper.keep, draw_masks(key, hyper.keep, (num_steps, *support.inputs.shape))

    def loss(weights, mask):
        return support_loss(jax.vmap(LinearHead(weights))(drop(support.inputs, mask, keep)), support)

    return descend(loss, start, step_size, num_steps, masks, first_order)


class MAML(Learner):
    """A learned start, one fixed step size (Finn et al. 2017). `first_order` ignores second derivatives."""

    start: Float[Array, "way dim"]
    step_size: float = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)
    first_order: bool = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        key: PRNGKeyArray,
        dim: int,
        *,
        way: int = 5,
        step_size: float = 10.0,
        num_steps: int = 5,
        first_order: bool = False,
    ) -> "MAML":
        del key  # softmax regression is convex: zero is as good a start as any, and treats classes alike
        return cls(jnp.zeros((way, dim)), step_size, num_steps, first_order)

    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        start = rows_for(self.start, support.way)
        weights, losses = descend_weights(start, self.step_size, self.num_steps, support, hyper, key, self.first_order)
        return Adaptation(LinearHead(weights), losses)

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        return pay(self, [self.start], task, hyper, key)


class MetaSGD(Learner):
    """A learned start and a learned step size for every weight (Li et al. 2017)."""

    start: Float[Array, "way dim"]
    step_size: Float[Array, "way dim"]
    num_steps: int = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        key: PRNGKeyArray,
        dim: int,
        *,
        way: int = 5,
        step_size: float | Float[Array, ""] = 10.0,
        num_steps: int = 5,
    ) -> "MetaSGD":
        del key
        return cls(jnp.zeros((way, dim)), jnp.full((way, dim), step_size), num_steps)

    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        start, step_size = rows_for(self.start, support.way), rows_for(self.step_size, support.way)
        weights, losses = descend_weights(start, step_size, self.num_steps, support, hyper, key)
        return Adaptation(LinearHead(weights), losses)

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        return pay(self, [self.start], task, hyper, key)


class Reptile(Learner):
    """A learned start that follows where descent leads, one fixed step size (Nichol et al. 2018)."""

    start: Float[Array, "way dim"]
    step_size: float = eqx.field(static=True)
    num_steps: int = eqx.field(static=True)

    @classmethod
    def init(
        cls, key: PRNGKeyArray, dim: int, *, way: int = 5, step_size: float = 10.0, num_steps: int = 5
    ) -> "Reptile":
        del key
        return cls(jnp.zeros((way, dim)), step_size, num_steps)

    def adapt(self, support: Batch, hyper: Hyper | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        start = rows_for(self.start, support.way)
        weights, losses = descend_weights(start, self.step_size, self.num_steps, support, hyper, key)
        return Adaptation(LinearHead(weights), losses)

    def meta_loss(self, task: Task, hyper: Hyper, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Info]:
        """½|θ - stopgrad(θ′)|², whose gradient θ - θ′ is Reptile's direction; θ′ fits support and query alike.

        The diagnostics are those of adapting to the support set alone, as for every learner.
        """
        pull_key, report_key = (None, None) if key is None else jax.random.split(key)
        _, info = pay(self, [self.start], task, hyper, report_key)
        start = rows_for(self.start, task.support.way)
        examples = jax.tree.map(lambda *both: jnp.concatenate(both), task.support, task.query)
        end, _ = descend_weights(start, self.step_size, self.num_steps, examples, hyper, pull_key)
        return l2(start - jax.lax.stop_gradient(end)) + hyper.l2 * l2(self.start), info
