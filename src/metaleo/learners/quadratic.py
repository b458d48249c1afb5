"""MetaQDA: a Gaussian per class, of which other tasks teach the prior; quadratic discriminant analysis that shrinks."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from metaleo.learners.base import Adaptation, HyperParams, Learner, dropout_inputs
from metaleo.learners.linear import present, solve
from metaleo.losses import l2
from metaleo.nn.heads import Embedding, QuadraticHead
from metaleo.tasks.task import Batch


class MetaQDA(Learner):
    """log N(x; μ_n, Σ_n) with a learned prior N(μ; m, Σ/κ) IW(Σ; S, ν) of each class's μ and Σ (Zhang et al. 2021).

    From N examples of a class, of mean x̄, the posterior is of the same form, with m_n = (κ m + N x̄)/(κ + N),
    κ_n = κ + N, ν_n = ν + N and S_n = S + Σ x xᵀ + κ m mᵀ - κ_n m_n m_nᵀ. The head has its mode, μ_n = m_n and
    Σ_n = S_n/(ν_n + d + 2). Or, if it is `bayesian`, it averages over the posterior, which makes Student's t with
    ν_n - d + 1 degrees of freedom around m_n, and scale S_n (κ_n + 1)/(κ_n (ν_n - d + 1)).

    S = L Lᵀ with a lower triangular L. What is learned is L⁻¹, which is one too: then no system is as large as d. What
    depends on N alone is left out of the logits. It is the same for all classes of balanced tasks, on which S is
    trained for its answers and not as a covariance; among others it gives every query to one class.

    Args (of `MetaQDA.init`):
        key: Not used; accepted for consistency with other learners.
        dim: Numbers per example, d.
        bayesian: Average over the posterior instead of taking its mode. On validation tasks of the packaged sample
            that is no better at one example of each class, and a point worse at five and ten.
        sharpness: Initial factor on the squared distances of an input to class means, of which S is made.

    Examples:
        >>> import jax
        >>> from metaleo import MetaQDA, labelled
        >>> learner = MetaQDA.init(jax.random.key(0), dim=2)
        >>> learner.adapt(labelled(jax.numpy.eye(2), jax.numpy.arange(2), way=2)).head(jax.numpy.ones(2)).shape
        (2,)
    """

    mean: Float[Array, " dim"]
    whitening: Embedding
    log_scale: Float[Array, ""]
    log_kappa: Float[Array, ""]
    log_freedom: Float[Array, ""]
    bayesian: bool = eqx.field(static=True)

    @classmethod
    def init(cls, key: PRNGKeyArray, dim: int, *, bayesian: bool = False, sharpness: float = 10.0) -> "MetaQDA":
        del key
        factor = (dim if bayesian else 2 * dim) / 2 + 1  # about that of `adapt` with one example
        log_scale = math.log(sharpness / factor) / 2  # of L⁻¹, of which a squared distance has the square
        log_scale, log_kappa, log_freedom = (jnp.full((), number) for number in (log_scale, math.log(0.1), 0.0))
        return cls(jnp.zeros(dim), Embedding.init(dim), log_scale, log_kappa, log_freedom, bayesian)

    def adapt(self, support: Batch, hyper: HyperParams | None = None, key: PRNGKeyArray | None = None) -> Adaptation:
        """The posterior in coordinates u = L⁻¹(x - m), where S is the identity and m is zero.

        There S_n = I + Uᵀ(I - 11ᵀ/κ_n) U = I + V_nᵀ V_n, and the rows of V_n are u_i - a ū for the examples of the
        class, because (I - a 11ᵀ/N)² = I - 11ᵀ/κ_n with a = 1 - √(κ/κ_n). One system with a row per example serves all
        classes: I + V Vᵀ, without the products of rows of two classes.
        """
        to_white = self.to_white()
        shift = to_white(self.mean)
        white = present(to_white(dropout_inputs(support, hyper, key)) - shift[None, :], support)
        members = present(support.targets, support)
        counts, kappa = members.sum(0), jnp.exp(self.log_kappa)
        averages = support.class_weights() @ white
        means = (counts / (kappa + counts))[:, None] * averages
        rows = white - members @ ((1 - jnp.sqrt(kappa / (kappa + counts)))[:, None] * averages)
        with jax.default_matmul_precision("highest"):
            system = jnp.eye(len(rows), dtype=rows.dtype) + (members @ members.T) * (rows @ rows.T)
        log_determinants = log_pivots(system) @ members
        inverse = solve(system, jnp.eye(len(rows), dtype=rows.dtype))
        dim, freedom = len(shift), counts + jnp.exp(self.log_freedom)  # ν_n - d + 1
        if self.bayesian:
            factor, width = (freedom + dim) / 2, (kappa + counts) / (kappa + counts + 1)
        else:
            factor, width = (freedom + 2 * dim + 1) / 2, None
        head = QuadraticHead(to_white, shift, means, rows, members, inverse, -log_determinants / 2, factor, width)
        return Adaptation(head)

    def to_white(self) -> Embedding:
        """x ↦ L⁻¹ x. For rows its matrix is the transpose, which is upper triangular."""
        identity = jnp.eye(len(self.mean), dtype=self.mean.dtype)
        return Embedding(jnp.exp(self.log_scale) * (identity + jnp.triu(self.whitening.departure)) - identity)

    def regulariser(self, hyper: HyperParams) -> Float[Array, ""]:
        return hyper.l2 * l2(self.whitening.departure)


def log_pivots(matrix: Float[Array, "size size"]) -> Float[Array, " size"]:
    """Logarithms of the pivots of a positive definite matrix: their sum over a block is its log-determinant, if the
    rows of different blocks have no products. Without LAPACK, for the reason given in `learners.linear.solve`."""

    def eliminate(rest: Float[Array, "size size"], index: Int[Array, ""]) -> tuple[Array, Float[Array, ""]]:
        row = rest[index]
        return rest - row[:, None] * (row / row[index])[None, :], jnp.log(row[index])

    return jax.lax.scan(eliminate, matrix, jnp.arange(len(matrix)))[1]
