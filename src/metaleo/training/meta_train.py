"""The outer loop: meta-training as a pure function of hyper-parameters and a key.

A run is `start_run`, then `advance` (some meta-steps) and `validate` (keep the best learner, stop early) in turn. Each
is a pure function of one run; five seeds, or the trials of a search, are a `vmap` of the same functions.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from metaleo.engines import Engine, choose_engine
from metaleo.evaluation.evaluate import mean_validation_score
from metaleo.learners.base import HyperParams, Learner, Metrics
from metaleo.tasks.task import Tasks

CLIP = 0.1
"""The paper clips each entry of the meta-gradient to this absolute value, and then its norm to the same value."""


class RunState(eqx.Module):
    """The complete state of a run, enough to continue it; `meta_train` returns the last one.

    Attributes:
        learner: The current learner.
        optimiser: The state of the optimiser (Adam).
        step: Meta-steps taken.
        best: The learner at its best validation.
        best_score: Its validation score: accuracy, or without classes minus the query loss.
        best_step: The meta-step of that validation.
        stopped: Set by early stopping; from then on the state does not change.

    Examples:
        >>> from metaleo import RunState
        >>> [field for field in RunState.__annotations__ if field.startswith("best")]
        ['best', 'best_score', 'best_step']
    """

    learner: Learner
    optimiser: PyTree
    step: Int[Array, ""]
    best: Learner
    best_score: Float[Array, ""]
    best_step: Int[Array, ""]
    stopped: Bool[Array, ""]

    @property
    def skipped(self) -> Int[Array | np.ndarray, "*runs"]:
        """Meta-steps skipped because their gradient was not finite."""
        return self.optimiser.total_notfinite

    @property
    def skipped_in_a_row(self) -> Int[Array | np.ndarray, "*runs"]:
        return self.optimiser.notfinite_count


def clip_each_norm(limit: float) -> optax.GradientTransformation:
    """Clip the norm of each tensor separately, as the authors' code does."""

    def clip(gradients, _):
        return jax.tree.map(lambda g: g * (limit / jnp.maximum(jnp.linalg.norm(g), limit)), gradients)

    return optax.stateless(clip)


def make_optimiser(clip: str = "global") -> optax.GradientTransformation:
    """Adam after the paper's two clips; a step with NaN or Inf in its gradient is skipped and counted.

    The learning rate is a hyper-parameter, so `advance` applies it. `clip` selects the norm that is clipped: that of
    the whole meta-gradient (`global`, the paper) or of each tensor (`per-tensor`, the authors' code).
    """
    norm = {"global": optax.clip_by_global_norm, "per-tensor": clip_each_norm}[clip](CLIP)
    steps = optax.chain(optax.clip(CLIP), norm, optax.scale_by_adam())
    return optax.apply_if_finite(steps, max_consecutive_errors=2**31 - 1)


def as_tree(learner: Learner) -> Any:
    """Cast for Optax's type hints, which do not know that a learner is a tree of arrays."""
    return learner


def start_run(learner: Learner, optimiser: optax.GradientTransformation) -> RunState:
    """The state before the first step."""
    learner = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), learner)  # weak types would compile twice
    zero = jnp.zeros((), jnp.int32)
    return RunState(
        learner,
        optimiser.init(as_tree(learner)),
        zero,
        learner,
        jnp.asarray(-jnp.inf, jnp.float32),
        zero,
        jnp.zeros((), bool),
    )


def meta_gradient(
    learner: Learner,
    tasks: Tasks,
    indices: PyTree,
    hyper: HyperParams,
    keys: Key[Array, " task"],
    engine: Engine,
) -> tuple[Learner, dict[str, Float[Array, " task"]]]:
    """∇φ of the mean loss over a meta-batch of tasks plus the regulariser, and the diagnostics of each task."""

    def objective(learner):
        losses, infos = engine.meta_losses(learner, tasks, indices, hyper, keys)
        return losses.mean() + engine.regulariser(learner, hyper), infos

    return jax.grad(objective, has_aux=True)(learner)


MetaGradient = Callable[
    [Learner, Tasks, PyTree, HyperParams, Key[Array, " task"]], tuple[Learner, dict[str, Float[Array, " task"]]]
]
"""`meta_gradient` with a given engine."""


def advance(
    state: RunState,
    hyper: HyperParams,
    key: PRNGKeyArray,
    tasks: Tasks,
    optimiser: optax.GradientTransformation,
    meta_batch: int,
    num_steps: int,
    decay_over: int | None = None,
    unroll: int = 1,
    gradient: MetaGradient | None = None,
) -> tuple[RunState, Metrics]:
    """Take `num_steps` meta-steps (Algorithm 1, lines 3-17); also returns the means of their diagnostics.

    Step t uses only `fold_in(key, t)`, so an interrupted run continues as if it had never stopped. The learning rate is
    constant, or falls to zero over `decay_over` steps along half a cosine. Each iteration of the loop takes `unroll`
    steps.
    """
    gradient = gradient or functools.partial(meta_gradient, engine=choose_engine(state.learner))
    numbers = state.step + jnp.arange(num_steps)
    keys = jax.vmap(lambda t: jax.random.fold_in(key, t))(numbers)
    done = jnp.zeros(num_steps) if decay_over is None else numbers.astype(jnp.float32) / decay_over
    rates = hyper.learning_rate * (1 + jnp.cos(jnp.pi * done)) / 2
    keys = jax.vmap(lambda k: jax.random.split(k, (2, meta_batch)))(keys)  # (step, task or noise, meta_batch)
    indices = jax.vmap(jax.vmap(tasks.sample_indices))(keys[:, 0])  # for all steps at once: these kernels are tiny

    def meta_step(carry, now):
        learner, optimiser_state = carry
        picks_now, noise_keys, rate = now
        direction, info = gradient(learner, tasks, picks_now, hyper, noise_keys)
        direction, optimiser_state = optimiser.update(as_tree(direction), optimiser_state)
        updates = jax.tree.map(lambda d: -rate * d, direction)
        return (optax.apply_updates(learner, updates), optimiser_state), info

    before = state.learner, state.optimiser
    (learner, optimiser_state), infos = jax.lax.scan(meta_step, before, (indices, keys[:, 1], rates), unroll=unroll)
    info = jax.tree.map(lambda values: jnp.mean(values, where=jnp.isfinite(values)), infos)
    ahead = eqx.tree_at(
        lambda s: (s.learner, s.optimiser, s.step), state, (learner, optimiser_state, state.step + num_steps)
    )
    return unless_stopped(state, ahead), info


ValidationScore = Callable[[Learner, Tasks, PRNGKeyArray, Int[Array, " task"]], Float[Array, ""]]
"""`mean_validation_score` with a given engine."""


def validate(
    state: RunState,
    key: PRNGKeyArray,
    tasks: Tasks,
    patience: int | Int[Array, ""],
    num_tasks: int,
    score: ValidationScore = mean_validation_score,
) -> tuple[RunState, Float[Array, ""]]:
    """Score the learner on the validation tasks of `key`, and keep it if it is the best so far.

    The run stops after `patience` meta-steps without a better score.
    """
    found = score(state.learner, tasks, key, jnp.arange(num_tasks))
    better = found > state.best_score
    validated = eqx.tree_at(
        lambda s: (s.best, s.best_score, s.best_step),
        state,
        select(better, (state.learner, found, state.step), (state.best, state.best_score, state.best_step)),
    )
    validated = eqx.tree_at(lambda s: s.stopped, validated, state.step - validated.best_step >= patience)
    return unless_stopped(state, validated), found


def unless_stopped(state: RunState, ahead: RunState) -> RunState:
    return select(state.stopped, state, ahead)


def select(condition: Bool[Array, ""], if_true: PyTree, if_false: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), if_true, if_false)


def meta_train(
    make_learner: Callable[[PRNGKeyArray], Learner],
    hyper: HyperParams,
    key: PRNGKeyArray,
    training: Tasks,
    validation: Tasks | None = None,
    optimiser: optax.GradientTransformation | None = None,
    *,
    steps: int,
    meta_batch: int = 12,
    validate_every: int = 1000,
    validation_tasks: int = 1000,
    patience: int = 2**31 - 1,
    decay: bool = False,
) -> tuple[RunState, Float[Array, " validations"]]:
    """A whole run as a pure function of (hyper, key): five seeds, or the trials of a search, are a `vmap` of it.

    Args:
        make_learner: Creates a new learner from a key.
        hyper: Learning rate and weights of the loss terms.
        key: Key for all randomness.
        training: Tasks to learn from.
        validation: Tasks that select the best learner; by default other draws of `training`, enough if it is endless.
        optimiser: By default Adam after the paper's two clips of the meta-gradient.
        steps: Meta-steps.
        meta_batch: Tasks per meta-step.
        validate_every: Meta-steps between validations.
        validation_tasks: Tasks per validation.
        patience: Meta-steps without a better validation score after which the run stops early.
        decay: Whether the learning rate falls to zero along half a cosine.

    Returns:
        The final state, whose `best` is the learner at its best validation; and the score at each validation.

    Examples:
        >>> import jax
        >>> from metaleo import LEO, Episodes, HyperParams, linear_network, load_data, meta_train
        >>> data = load_data("sample")
        >>> train, val = (Episodes.over(data.subset(split), way=5, shot=1, query=5) for split in ("train", "val"))
        >>> state, scores = jax.jit(lambda key: meta_train(
        ...     lambda key: LEO.init(key, linear_network(640)), HyperParams(), key, train, val,
        ...     steps=4, validate_every=2, validation_tasks=10,
        ... ))(jax.random.key(0))
        >>> int(state.step), scores.shape
        (4, (2,))
    """
    validation = training if validation is None else validation
    optimiser = make_optimiser() if optimiser is None else optimiser
    init_key, step_key, validation_key = split_run_key(key)

    def leg(state, _):
        decay_over = steps if decay else None
        state, _ = advance(state, hyper, step_key, training, optimiser, meta_batch, validate_every, decay_over)
        return validate(state, validation_key, validation, patience, validation_tasks)

    return jax.lax.scan(leg, start_run(make_learner(init_key), optimiser), length=steps // validate_every)


def split_run_key(key: PRNGKeyArray) -> tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray]:
    """Keys for the initial weights, the meta-steps and the validation tasks; the last is the same for every run."""
    return jax.random.fold_in(key, 0), jax.random.fold_in(key, 1), jax.random.key(2019)
