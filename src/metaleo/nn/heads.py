"""Heads and networks: f_θ, a classifier or another function of one input (Section 2.3.5).

A `Head` is the solution of a task and is called on one input. A `Network` defines which f_θ is generated or adapted,
and its loss.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from metaleo.errors import BadInput, unknown_name
from metaleo.losses import cross_entropy, query_loss
from metaleo.tasks.preparation import Preparation
from metaleo.tasks.task import Batch, normalise


class Embedding(eqx.Module):
    """E x = x + x D, linear and without bias. D is learned and starts at zero, so E starts as the identity."""

    departure: Float[Array, "dim dim"]

    @classmethod
    def init(cls, dim: int) -> "Embedding":
        return cls(jnp.zeros((dim, dim)))

    def __call__(self, inputs: Float[Array, "*example dim"]) -> Float[Array, "*example dim"]:
        return inputs + inputs @ self.departure

    def transpose(self, weights: Float[Array, "way dim"]) -> Float[Array, "way dim"]:
        """Eᵀ w, for which (Eᵀ w)·x = w·(E x): turns a head on embedded inputs into one on inputs."""
        return weights + weights @ self.departure.T


class Head(eqx.Module):
    """The solution of a task: a function of ONE input. A classifier returns logits."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*input"]) -> Float[Array, "*output"]: ...


class LinearHead(Head):
    """An N-way softmax classifier: one row of weights per class, no bias.

    Attributes:
        weights: One row per class.

    Examples:
        >>> import jax.numpy as jnp
        >>> from metaleo import LinearHead
        >>> LinearHead(jnp.eye(2))(jnp.array([0.0, 3.0])).tolist()
        [0.0, 3.0]
    """

    weights: Float[Array, "way dim"]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.weights @ x


class AffineHead(Head):
    """A linear head with a bias per class."""

    weights: Float[Array, "way dim"]
    bias: Float[Array, " way"]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.weights @ x + self.bias


class CentredHead(Head):
    """An affine head on u = (x - m) / |x - m|."""

    centre: Float[Array, " dim"]
    affine: AffineHead

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.affine(normalise(x - self.centre))


class PreparedHead(Head):
    """A head on prepared inputs."""

    preparation: Preparation
    head: Head

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        return self.head(self.preparation(x))


class AttentionHead(Head):
    """log Σ_i y_i exp(s cos(E x, E x_i)) over the support set: the log attention to each class, up to a constant."""

    embedding: Embedding
    examples: Float[Array, "example dim"]  # embedded and normalised
    members: Float[Array, "example way"]  # y_i, zero for padding
    sharpness: Float[Array, ""]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        scores = self.sharpness * (self.examples @ normalise(self.embedding(x)))
        return jax.nn.logsumexp(scores[:, None], axis=0, b=self.members)


class RelationHead(Head):
    """s g([c_n, E x]) for each class n, where g is an MLP with ReLU between its layers."""

    embedding: Embedding
    from_class: Float[Array, "way hidden"]  # contribution of each class to the first layer
    first: Float[Array, "dim hidden"]  # first-layer weights for the input
    middle: Float[Array, "hidden hidden"]
    last: Float[Array, " hidden"]
    sharpness: Float[Array, ""]

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        hidden = jax.nn.relu(self.from_class + (self.embedding(x) @ self.first)[None, :])
        return self.sharpness * (jax.nn.relu(hidden @ self.middle) @ self.last)


class QuadraticHead(Head):
    """b_n - f_n g(q_n) with q_n = δᵀ (I + V_nᵀ V_n)⁻¹ δ, where δ = E x - c_n is measured from the class's mean.

    By Woodbury's identity q_n = |δ|² - (V_n δ)ᵀ (I + V_n V_nᵀ)⁻¹ V_n δ. Each row of V belongs to one class, so the
    matrix is that of all rows, without the products of rows of two classes.
    """

    embedding: Embedding
    shift: Float[Array, " dim"]
    means: Float[Array, "way dim"]  # embedded and shifted
    rows: Float[Array, "example dim"]  # V; zero for padding
    members: Float[Array, "example way"]  # zero for padding
    inverse: Float[Array, "example example"]
    bias: Float[Array, " way"]
    factor: Float[Array, " way"]
    width: Float[Array, " way"] | None  # g(q) is log(1 + width q); q itself without a width

    def __call__(self, x: Float[Array, " dim"]) -> Float[Array, " way"]:
        u = self.embedding(x) - self.shift
        distances = jnp.sum(u**2) - 2 * self.means @ u + jnp.sum(self.means**2, axis=1)
        from_mean = self.rows @ u - jnp.sum(self.members * (self.rows @ self.means.T), axis=1)
        squares = distances - (from_mean * (self.inverse @ from_mean)) @ self.members
        return self.bias - self.factor * (squares if self.width is None else jnp.log1p(self.width * squares))


def nearest_centroid_head(centroids: Float[Array, "way dim"], sharpness: float | Float[Array, ""]) -> AffineHead:
    """-s|x - c|² for each centroid c, without the shared term -s|x|²: s(2c·x - |c|²)."""
    return AffineHead(2 * sharpness * centroids, -sharpness * jnp.sum(centroids**2, axis=1))


Loss = Callable[[Float[Array, "..."], Float[Array, "..."]], Float[Array, ""]]
"""The loss of one prediction and its target. With several samples per task it must be a negative log-likelihood."""
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """The f_θ to generate or adapt: `apply(θ, x)` predicts from one input. Networks are equal only if identical.

    Create one with `Network.of` (any Equinox module), `Network.over` (a function of a tree of arrays) or
    `linear_network`. If `targets` is None, each class has its own θ, and f_θ returns the logit of its class.

    Examples:
        >>> import equinox as eqx
        >>> import jax
        >>> from metaleo import Network, gaussian_nll
        >>> model = eqx.nn.MLP(in_size=1, out_size=1, width_size=8, depth=1, key=jax.random.key(0))
        >>> Network.of(model, gaussian_nll(0.3), inputs=(1,), targets=(1,)).size
        25
    """

    apply: Callable[[Float[Array, " size"], Float[Array, "..."]], Float[Array, "..."]]
    start: np.ndarray
    """The initial θ, from the given model; its length is dim(θ)."""
    inputs: Shape
    targets: Shape | None = None
    loss: Loss = cross_entropy
    dropout: bool = False
    """Whether inputs are features to which dropout may be applied."""
    made: tuple[Callable[..., "Network"], tuple[Any, ...]] | None = None
    """A function and arguments that recreate the network; None for a user-defined network."""

    @classmethod
    def of(cls, model: Any, loss: Loss, inputs: Shape, targets: Shape | None, dropout: bool = False) -> "Network":
        """A network from an Equinox module that maps one input to a prediction; all its arrays are generated."""
        if not callable(model):
            raise BadInput(f"the model has to be callable on one input, which {type(model).__name__} is not")
        arrays, rest = eqx.partition(model, eqx.is_array)
        return cls.over(arrays, lambda tree, x: eqx.combine(tree, rest)(x), loss, inputs, targets, dropout)

    @classmethod
    def over(
        cls,
        parameters: PyTree,
        apply: Callable[[PyTree, Float[Array, "..."]], Float[Array, "..."]],
        loss: Loss,
        inputs: Shape,
        targets: Shape | None,
        dropout: bool = False,
    ) -> "Network":
        """A network from a function `apply(parameters, x)` over a tree of arrays."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                name = jax.tree_util.keystr(path, simple=True, separator=".") or "the model"
                raise BadInput(f"{name} holds {jnp.result_type(leaf)} numbers; only floats can be generated")
        leaves, structure = jax.tree.flatten(parameters)
        shapes, ends = [jnp.shape(leaf) for leaf in leaves], np.cumsum([jnp.size(leaf) for leaf in leaves])
        if not leaves or not ends[-1]:
            raise BadInput("the model has no parameters to generate")

        def apply_vector(vector: Float[Array, " size"], x: Float[Array, "..."]) -> Float[Array, "..."]:
            parts = jnp.split(vector, ends[:-1])
            tree = jax.tree.unflatten(
                structure, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
            )
            return apply(tree, x)

        start = np.concatenate([np.ravel(leaf).astype(np.float32) for leaf in leaves])
        network = cls(apply_vector, start, inputs, targets, loss, dropout)
        network.check_shapes()
        return network

    def __deepcopy__(self, _memo: dict[int, Any]) -> "Network":
        return self  # networks compare by identity, so clones of an estimator share one

    def __reduce__(self) -> tuple[Callable[..., "Network"], tuple[Any, ...]]:
        """Pickle by name, so that unpickling in the same process returns the same object."""
        if self.made is None:
            raise BadInput("a network of one's own cannot be pickled; one that has a name can")
        return self.made

    @property
    def size(self) -> int:
        """dim(θ)."""
        return len(self.start)

    @property
    def per_class(self) -> bool:
        return self.targets is None

    @property
    def classifies(self) -> bool:
        return self.loss is cross_entropy

    @property
    def linear(self) -> bool:
        """Whether it is the softmax classifier of the paper's Section 2.3.3, which engines compute in faster ways."""
        return self.apply is dot and self.classifies

    @property
    def evidence(self) -> int:
        """Numbers per example that the encoder takes: the input, and also the target if there is one θ per task."""
        return math.prod(self.inputs) + (0 if self.targets is None else math.prod(self.targets))

    def evidence_of(
        self, inputs: Float[Array, "example *input"], targets: Float[Array, "example *target"]
    ) -> Float[Array, "example evidence"]:
        """The encoder's input for a support set, one row per example."""
        shown = (inputs,) if self.per_class else (inputs, targets)
        return jnp.concatenate([part.reshape(len(part), -1) for part in shown], axis=1)

    def codes(self, support: Batch) -> int:
        """Number of codes of a task: one per class, or one."""
        return support.way if self.per_class else 1

    def head(self, parameters: Float[Array, "code size"]) -> Head:
        if self.apply is affine:
            return AffineHead(parameters[:, :-1], parameters[:, -1])
        return LinearHead(parameters) if self.linear else GeneratedHead(parameters, self)

    def support_loss(self, predictions: Float[Array, "example ..."], support: Batch) -> Float[Array, ""]:
        """The inner loss (Eq. 5): the sum over the support set, divided by the number of examples per code."""
        codes = jnp.sum(support.class_counts() > 0).astype(support.targets.dtype) if self.per_class else 1
        return codes * query_loss(predictions, support, self.loss)

    def check(self, batch: Batch) -> None:
        """Raise `BadInput` for examples whose shape does not match the network."""
        shapes = {"inputs": (batch.inputs.shape[1:], self.inputs)}
        if self.targets is not None:
            shapes["targets"] = (batch.targets.shape[1:], self.targets)
        for name, (found, wanted) in shapes.items():
            if found != wanted:
                raise BadInput(f"{name} of shape {show(found)} per example; the network was made for {show(wanted)}")

    def check_shapes(self) -> None:
        """Check the shapes of prediction and loss for one example, by abstract evaluation."""
        x = jax.ShapeDtypeStruct(self.inputs, jnp.float32)
        theta = jax.ShapeDtypeStruct((self.size,), jnp.float32)
        try:
            prediction = jax.eval_shape(self.apply, theta, x)
        except Exception as error:  # a user-defined model may raise anything
            raise BadInput(
                f"the model does not take one input of shape {show(self.inputs)}: {first_line(error)}"
            ) from error
        if not isinstance(prediction, jax.ShapeDtypeStruct):
            raise BadInput(f"the model has to return one array, not {type(prediction).__name__}")
        if self.targets is None:
            if prediction.shape != ():
                raise BadInput(f"a network per class returns one number, not shape {show(prediction.shape)}")
            return
        try:
            loss = jax.eval_shape(self.loss, prediction, jax.ShapeDtypeStruct(self.targets, jnp.float32))
        except Exception as error:
            shapes = f"a prediction of shape {show(prediction.shape)} and a target of shape {show(self.targets)}"
            raise BadInput(f"the loss does not take {shapes}: {first_line(error)}") from error
        if getattr(loss, "shape", None) != ():
            found = f"shape {show(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
            raise BadInput(f"the loss has to return one number for one example, not {found}")


class GeneratedHead(Head):
    """The networks of a task: one per class, whose outputs are the logits, or a single one."""

    parameters: Float[Array, "code size"]
    network: Network = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        predictions = jax.vmap(self.network.apply, (0, None))(self.parameters, x)
        return predictions if self.network.per_class else predictions[0]


def show(shape: Shape) -> str:
    return f"({', '.join(map(str, shape))})"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


# Named networks


def dot(weights: Float[Array, " dim"], x: Float[Array, " dim"]) -> Float[Array, ""]:
    return weights @ x


@functools.cache
def linear_network(dim: int) -> Network:
    """The paper's classifier: one row of weights per class, trained with cross-entropy.

    Args:
        dim: Numbers per example.

    Returns:
        The network; the same object for the same `dim`.

    Examples:
        >>> from metaleo import linear_network
        >>> linear_network(640).size
        640
    """
    return Network(dot, np.zeros(dim, np.float32), (dim,), dropout=True, made=(linear_network, (dim,)))


def affine(weights: Float[Array, " size"], x: Float[Array, " dim"]) -> Float[Array, ""]:
    return weights[:-1] @ x + weights[-1]


@functools.cache
def affine_network(dim: int) -> Network:
    """The paper's classifier with a bias for each class, the last of its parameters: what an anchored LEO generates."""
    return Network(affine, np.zeros(dim + 1, np.float32), (dim,), dropout=True, made=(affine_network, (dim,)))


@functools.cache
def gaussian_nll(noise: float) -> Loss:
    """-log N(y; f(x), noise²), summed over the numbers of a target: a loss for regression.

    Args:
        noise: Standard deviation of the targets around f(x).

    Returns:
        A loss of one prediction and one target.

    Examples:
        >>> import jax.numpy as jnp
        >>> from metaleo import gaussian_nll
        >>> round(float(gaussian_nll(1.0)(jnp.zeros(1), jnp.zeros(1))), 3)
        0.919
    """

    def loss(prediction: Float[Array, " target"], target: Float[Array, " target"]) -> Float[Array, ""]:
        errors = (prediction - target) / noise
        return jnp.sum(errors**2 / 2 + math.log(noise * math.sqrt(2 * math.pi)))

    return loss


class Recurrent(eqx.Module):
    """A GRU that reads a row as a sequence, `channels` numbers per time step, and a linear layer on its last state."""

    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear
    channels: int = eqx.field(static=True)

    def __call__(self, row: Float[Array, " dim"]) -> Float[Array, "..."]:
        def read(state, values):
            return self.cell(values, state), None

        state, _ = jax.lax.scan(read, jnp.zeros(self.cell.hidden_size, row.dtype), row.reshape(-1, self.channels))
        return self.out(state)


@functools.cache
def named_network(
    name: str, dim: int, *, hidden: int, layers: int, channels: int, targets: int | None, noise: float | None
) -> Network:
    """A network that a run selects by name. `noise` is the standard deviation of real targets, None for classes."""
    if name == "linear" and targets is None:
        return linear_network(dim)
    with jax.ensure_compile_time_eval():  # may be called while a function is traced
        network = make_network(name, dim, hidden, layers, channels, targets, noise)
    settings = {"hidden": hidden, "layers": layers, "channels": channels, "targets": targets, "noise": noise}
    return dataclasses.replace(network, made=(functools.partial(named_network, **settings), (name, dim)))


MOST_PARAMETERS = 2 * 10**7
"""Maximum parameters of a generated network: a code's decoder has as many outputs."""


def make_network(
    name: str, dim: int, hidden: int, layers: int, channels: int, targets: int | None, noise: float | None
) -> Network:
    loss = cross_entropy if noise is None else gaussian_nll(noise)
    shape, outputs = (None, "scalar") if targets is None else ((targets,), targets)
    key, rows = jax.random.key(0), targets or 1
    sizes = {"linear": dim * rows, "mlp": dim * hidden + (layers - 2) * hidden**2 + hidden * rows,
             "gru": 3 * hidden * (channels + hidden) + hidden * rows}  # fmt: skip
    if sizes.get(name, 0) > MOST_PARAMETERS:
        raise BadInput(f"a network of {sizes[name]:,} parameters is too large to generate; {MOST_PARAMETERS:,} may be")
    match name:
        case "linear":
            return Network.of(eqx.nn.Linear(dim, outputs, use_bias=False, key=key), loss, (dim,), shape, noise is None)
        case "mlp":
            return Network.of(eqx.nn.MLP(dim, outputs, hidden, layers - 1, key=key), loss, (dim,), shape, noise is None)
        case "gru":
            if dim % channels:
                raise BadInput(f"rows of {dim} numbers are no sequences of {channels} numbers at a time")
            cell_key, out_key = jax.random.split(key)
            cell = eqx.nn.GRUCell(channels, hidden, key=cell_key)
            return Network.of(
                Recurrent(cell, eqx.nn.Linear(hidden, outputs, key=out_key), channels), loss, (dim,), shape
            )
    raise unknown_name("network", name, ("linear", "mlp", "gru"))
