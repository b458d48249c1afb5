"""Learners that solve for the weights of a linear head, which is a small problem with few examples."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from metaleo.learners.base import Adaptation, HyperParams, Learner, Metrics, dropout_inputs, query_loss_and_metrics
from metaleo.losses import l2
from metaleo.nn.heads import AffineHead, Embedding, LinearHead
from metaleo.tasks.task import Batch, Task

BLOCK = 16
"""Rows eliminated together in a larger system."""


def solve(matrix: Float[Array, "size size"], right: Float[Array, "size column"]) -> Float[Array, "size column"]:
    """Solve with a positive definite matrix, about as accurately as Cholesky's method.

    It uses XLA's own operations only. On a CPU, `jax.scipy` calls LAPACK, which splits a batch among XLA's threads and
    waits for them: if as many devices or Python threads as there are cores call it at once, they deadlock.
    """

    def refined(_, b: Float[Array, "size column"]) -> Float[Array, "size column"]:
        inverse = invert(matrix)
        x = inverse @ b
        return x + inverse @ (b - matrix @ x)

    with jax.default_matmul_precision("highest"):  # by default, GPUs round to 10 bits
        return jax.lax.custom_linear_solve(lambda x: matrix @ x, right, refined, symmetric=True)


def invert(matrix: Float[Array, "size size"]) -> Float[Array, "size size"]:
    """The inverse of a positive definite matrix, by Gauss-Jordan elimination of rows, or of blocks of rows."""
    size = len(matrix)
    if size <= BLOCK:
        return eliminate(matrix, 1, jnp.reciprocal)
    whole = jnp.eye(size + -size % BLOCK, dtype=matrix.dtype).at[:size, :size].set(matrix)
    return eliminate(whole, BLOCK, invert)[:size, :size]


def eliminate(
    matrix: Float[Array, "size size"], width: int, invert_pivot: Callable[[Array], Array]
) -> Float[Array, "size size"]:
    """The inverse, by eliminating `width` rows at a time; positive definite pivots need no exchange of rows."""
    cut, paste = jax.lax.dynamic_slice_in_dim, jax.lax.dynamic_update_slice_in_dim

    def turn(number: Int[Array, ""], matrix: Array) -> Array:
        at = number * width
        rows, columns = cut(matrix, at, width, 0), cut(matrix, at, width, 1)
        pivot = invert_pivot(cut(rows, at, width, 1))
        rows = paste(pivot @ rows, pivot, at, 1)
        rest = paste(matrix, jnp.zeros_like(columns), at, 1)
        return paste(rest - paste(columns, jnp.zeros_like(pivot), at, 0) @ rows, rows, at, 0)

    return jax.lax.fori_loop(0, len(matrix) // width, turn, matrix)


def present(rows: Float[Array, "example dim"], support: Batch) -> Float[Array, "example dim"]:
    """Set padding rows to zero, so that they contribute nothing to a linear head computed from the rows."""
    return rows * support.mask[:, None].astype(rows.dtype)


class LogisticRegression(Learner):
    """min_{W, b} Σ_i cross-entropy(W x_i + b, y_i) + |W|²/2C. It learns nothing from other tasks.

    The logits are W x + b_n - log N_n, where N_n counts the examples of a class: b fits how frequent the classes are in
    the support set (King and Zeng 2001), which says nothing about queries; all learners take classes as equally likely.

    With few rows of length one, the penalty keeps logits far too small for the errors made: the temperatures of
    `learners.registry.UNTRAINED_TEMPERATURES` belong to the default C. Both were chosen on validation tasks of the
    packaged `sample` and `intents`, by the query loss: `python tools/choose_untrained.py`.

    Attributes:
        C: Inverse regularisation strength, as in scikit-learn.
        num_steps: Newton steps. Fifty feature vectors of length one need 8 for C = 1, and up to 18 for C = 100.
        intercept: Whether there is a b, which is not penalised, as in scikit-learn. Without it, no N_n either.

    Examples:
        >>> import jax
        >>> from metaleo import LogisticRegression, labelled
        >>> learner = LogisticRegression(C=1.0)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    C: float = eqx.field(static=True, default=3.0)
    num_steps: int = eqx.field(static=True, default=20)
    intercept: bool = eqx.field(static=True, default=True)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        """W = C AᵀX, where A = Y - softmax(X Wᵀ + b). Solves for A, which has one row per example, and for b."""
        del hyper, key
        inputs, targets = present(support.inputs, support), present(support.targets, support)
        products = self.C * inputs @ inputs.T

        def step(now, _):
            dual, bias = now
            return newton_step(dual, bias, products, targets, support.mask, self.intercept), None

        start = jnp.zeros_like(targets), jnp.zeros_like(targets[0])
        (dual, bias), _ = jax.lax.scan(step, start, length=self.num_steps)
        weights = self.C * dual.T @ inputs
        if not self.intercept:
            return Adaptation(LinearHead(weights))
        return Adaptation(AffineHead(weights, bias - jnp.log(targets.sum(0))))

    def meta_loss(self, task: Task, hyper: HyperParams, key: PRNGKeyArray | None) -> tuple[Float[Array, ""], Metrics]:
        return query_loss_and_metrics(self.adapt(task.support).head, task.query, hyper, None)


def newton_step(
    dual: Float[Array, "example way"],
    bias: Float[Array, " way"],
    products: Float[Array, "example example"],
    targets: Float[Array, "example way"],
    mask: Bool[Array, " example"],
    intercept: bool,
) -> tuple[Float[Array, "example way"], Float[Array, " way"]]:
    """A damped Newton step towards A = Y - P and 1ᵀA = 0, where P = softmax(F) and F = K A + 1 bᵀ.

    The full step solves A′ = H (F - K A′ - 1 b′ᵀ) + Y - P, where H = diag(p) - p pᵀ for each example. Without p pᵀ the
    classes would decouple. It has rank one, so one more system with a row per example couples them (Rasmussen and
    Williams 2006, Algorithm 3.3), and no system is as large as examples × classes. That 1ᵀA′ = 0, because b has no
    penalty, is a system for b′ with a row per class.
    """
    present = mask[:, None].astype(products.dtype)
    logits = products @ dual + bias[None, :]
    p = present * jax.nn.softmax(logits)
    right = p * (logits - jnp.sum(p * logits, axis=1, keepdims=True)) + targets - p

    def one_class(root: Float[Array, " example"]) -> Float[Array, "example example"]:
        """(K + diag(p)⁻¹)⁻¹, written with √p so that p may be zero."""
        scaled = jnp.eye(len(root), dtype=root.dtype) + root[:, None] * products * root[None, :]
        return root[:, None] * solve(scaled, jnp.diag(root))

    each = jax.vmap(one_class)(jnp.sqrt(p).T)  # (way, example, example)
    moved = jnp.einsum("nij,jn->in", each, products @ right)
    of_bias = each.sum(2).T
    columns = jnp.concatenate([moved.sum(1, keepdims=True), of_bias], axis=1)
    shared = solve(each.sum(0) + jnp.diag(1 - present[:, 0]), columns)
    new_dual = right - moved + jnp.einsum("nij,j->in", each, shared[:, 0])
    new_bias = jnp.zeros_like(bias)
    if intercept:
        coupling = of_bias.T @ shared[:, 1:]
        laplacian = jnp.diag(coupling.sum(1)) - coupling
        # A constant in b changes no probability, so it has no inverse until that constant is fixed: here, to zero.
        fixed = laplacian + jnp.trace(laplacian) / len(bias) ** 2
        new_bias = solve(fixed, new_dual.sum(0)[:, None])[:, 0]
        new_dual -= of_bias * new_bias[None, :] - jnp.einsum("nij,j->in", each, shared[:, 1:] @ new_bias)
    change, change_of_bias = new_dual - dual, new_bias - bias
    # A full step may overshoot. The fraction log(1 + d)/d of it never does, where d is the largest change in the
    # difference of two logits of an example (Bach 2010, self-concordance). Near the solution the fraction tends to 1.
    differences = jnp.ptp(present * (products @ change + change_of_bias[None, :]), axis=1)
    apart_by = jnp.maximum(differences.max(), 1e-12)
    fraction = jnp.log1p(apart_by) / apart_by
    return dual + fraction * change, bias + fraction * change_of_bias


class RidgeRegression(Learner):
    """min_W |Z W - Y|² + λ|W|² on embedded examples Z, then logits s x W (R2-D2, Bertinetto et al. 2019).

    The constant that they add to all logits is omitted: softmax does not depend on it.

    Args (of `RidgeRegression.init`):
        key: Not used; accepted for consistency with other learners.
        dim: Numbers per example.
        regulariser: Initial value of the learned λ.
        sharpness: Initial value of the learned s.

    Examples:
        >>> import jax
        >>> from metaleo import RidgeRegression, labelled
        >>> learner = RidgeRegression.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    embedding: Embedding
    log_regulariser: Float[Array, ""]
    log_sharpness: Float[Array, ""]

    @classmethod
    def init(
        cls, key: PRNGKeyArray, dim: int, *, regulariser: float = 1.0, sharpness: float = 10.0
    ) -> "RidgeRegression":
        del key
        return cls(Embedding.init(dim), jnp.full((), math.log(regulariser)), jnp.full((), math.log(sharpness)))

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        """W = Zᵀ(Z Zᵀ + λ)⁻¹ Y: a system with a row per example, not per feature."""
        embedded = present(self.embedding(dropout_inputs(support, hyper, key)), support)
        regulariser = jnp.exp(self.log_regulariser) * jnp.eye(len(embedded), dtype=embedded.dtype)
        dual = solve(embedded @ embedded.T + regulariser, support.targets)
        weights = jnp.exp(self.log_sharpness) * (dual.T @ embedded)
        return Adaptation(LinearHead(self.embedding.transpose(weights)))

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.embedding.departure)
