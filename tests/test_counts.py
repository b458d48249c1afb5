"""Speed as counts, which unlike times are the same every day: operations, products, instructions and bytes.

Of a meta-step with the paper's shapes. A bound is what was counted when it was set and 5 % (JAX 0.10.2, on a CPU).
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import HYPER, make_learner, make_metaset
from metaleo.data.metaset import MetaSet
from metaleo.engines import choose_engine
from metaleo.evaluation import evaluate as evaluation
from metaleo.evaluation.evaluate import score
from metaleo.learners import HyperParams
from metaleo.learners.registry import Structure
from metaleo.tasks import Episodes
from metaleo.training.meta_train import advance, make_optimiser, start_run
from metaleo.training.population import compile_advance, compile_validate, map_replicas, shard_replicas

pytestmark = pytest.mark.usefixtures("loose_dtypes")
META_BATCH = 12


@dataclasses.dataclass(frozen=True)
class Counts:
    flops: float
    """Of the program as written."""
    compiled_flops: float
    """Of the program as compiled: where fusing computes a number twice, it counts twice."""
    compiled_instructions: int
    temporary_bytes: float
    population_bytes: float
    """The same of 256 runs side by side, for each of them."""
    evaluation_flops: float
    """Of an evaluation task with 15 queries per class."""


COUNTED = {
    1: Counts(359.9e6, 426.4e6, 8165, 8.98e6, 9.10e6, 3.05e6),
    5: Counts(1433.2e6, 1727.3e6, 8383, 27.97e6, 28.00e6, 28.91e6),
}
OPERATIONS, PRODUCTS = 3825, 113
"""Of the program as written, for either."""
SHOTS = pytest.mark.parametrize("shot", COUNTED)


def run_of(shot, **changes):
    """What `advance` takes: state, hyper-parameters, key and tasks."""
    features = np.random.default_rng(0).normal(size=(5, 20, 640)).astype(np.float32)
    metaset = MetaSet.from_classes(features, tuple("abcde"), ("train",) * 5)
    state = start_run(Structure(**changes).init(jax.random.key(0)), make_optimiser())
    hyper = jax.tree.map(jnp.float32, HyperParams())
    return state, hyper, jax.random.key(0), Episodes.over(metaset, 5, shot, 15)


def meta_step(state, hyper, key, episodes):
    return advance(state, hyper, key, episodes, make_optimiser(), META_BATCH, num_steps=1)


def lower(function, *arguments):
    """As `jax.jit(function).lower`, which would show the checks of shapes what is no array."""
    leaves, structure = jax.tree.flatten(arguments)
    return jax.jit(lambda leaves: function(*structure.unflatten(leaves))).lower(leaves)


def products(lowered, *sizes):
    """Shapes of all matrix products, or of those with a matrix of these sizes on one side or as the result."""
    found = re.findall(r"stablehlo\.dot_general.*: \((.*)\) -> (.*?)(?: loc|$)", lowered.as_text(), re.MULTILINE)
    shapes = [" ".join(types) for types in found]
    return [types for types in shapes if not sizes or any(f"<{size}x" in types for size in sizes)]


def decoder_products(lowered):
    """Encoder and decoder have one size: 640 features, 64 numbers in a code."""
    return products(lowered, "64x640", "640x64")


@pytest.fixture(scope="module", params=COUNTED)
def step(request):
    with jax.numpy_dtype_promotion("standard"):
        lowered = lower(meta_step, *run_of(request.param))
        return COUNTED[request.param], lowered, lowered.compile()


@pytest.mark.slow
def test_operations_of_a_meta_step(step):
    counted, lowered, compiled = step
    assert lowered.cost_analysis()["flops"] < 1.05 * counted.flops
    assert compiled.cost_analysis()["flops"] < 1.05 * counted.compiled_flops


@pytest.mark.slow
def test_instructions_of_a_meta_step(step):
    """A GPU spends its time on starting kernels, and a CPU a good part."""
    counted, lowered, compiled = step
    assert len(products(lowered)) <= PRODUCTS
    assert len(re.findall(r" = (?:stablehlo\.|func\.|call )", lowered.as_text())) < 1.05 * OPERATIONS
    instructions = re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", compiled.as_text(), re.MULTILINE)
    assert len(instructions) < 1.05 * counted.compiled_instructions


@pytest.mark.slow
def test_memory_of_a_meta_step(step):
    counted, _, compiled = step
    assert compiled.memory_analysis().temp_size_in_bytes < 1.05 * counted.temporary_bytes


@pytest.mark.slow
@SHOTS
@pytest.mark.parametrize("steps", [1, 5])
def test_products_with_the_decoder(shot, steps):
    """Of a latent step four, all with the half of the scale: there and back, and the same for its derivative.

    Once in a meta-step: encoding, inputs through Mᵀ, mean and scale of the weights in the end; the last two on the
    way back to the code; the gradients of encoder, M (of inputs, of the weights) and S (of all steps, of the
    weights); and of orthogonality two with each half, value and gradient.
    """
    lowered = lower(meta_step, *run_of(shot, latent_steps=steps))
    assert len(decoder_products(lowered)) == 4 * steps + 4 + 2 + 5 + 4


@pytest.mark.slow
@SHOTS
def test_memory_of_a_population(shot):
    """Nothing grows faster than the number of runs."""
    runs = 256
    *own, episodes = run_of(shot)
    leaves, structure = jax.tree.flatten(own)

    def meta_steps(leaves):
        return map_replicas(meta_step, runs, (0, 0, 0, None))(*structure.unflatten(leaves), episodes)

    replicas = [jax.ShapeDtypeStruct((runs, *leaf.shape), leaf.dtype) for leaf in leaves]
    memory = jax.jit(meta_steps).lower(replicas).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1.05 * runs * COUNTED[shot].population_bytes


def score_tasks(learner, episodes, keys):
    tasks = jax.vmap(episodes.sample)(keys)
    return jax.vmap(score)(choose_engine(learner).adapt(learner, tasks.support), tasks.query)


@pytest.mark.slow
@SHOTS
def test_operations_of_evaluation(shot):
    """Encoding, inputs through Mᵀ, and the weights in the end; not one product more for ten steps."""
    state, _, key, episodes = run_of(shot)
    lowered = lower(score_tasks, state.learner, episodes, jax.random.split(key, 8))
    assert lowered.cost_analysis()["flops"] < 1.05 * 8 * COUNTED[shot].evaluation_flops
    assert len(decoder_products(lowered)) == 3


def test_evaluation_never_looks_at_the_scale_of_weights():
    learner = make_learner()
    blind = dataclasses.replace(
        learner,
        decoder=dataclasses.replace(learner.decoder, to_raw_scale=jnp.full_like(learner.decoder.to_mean, jnp.nan)),
    )
    episodes = Episodes.over(make_metaset().subset("val"), 3, 1, 4)
    scores, others = (
        jax.jit(evaluation.score_tasks)(one, episodes, jax.random.key(0), jnp.arange(5)) for one in (learner, blind)
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(others))
    np.testing.assert_array_equal(scores.nll, others.nll)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_more_steps_and_other_runs_compile_nothing(replicas, count_compilations):
    training = Episodes.over(make_metaset().subset("train"), 3, 1, 4)
    validation = Episodes.over(make_metaset().subset("val"), 3, 1, None)

    def run(seed):
        keys = jax.random.split(jax.random.key(seed), replicas)
        learners = [make_learner("leo", seed=seed + lane) for lane in range(replicas)]
        states = [start_run(learner, make_optimiser()) for learner in learners]
        state = shard_replicas(jax.tree.map(lambda *leaves: jnp.stack(leaves), *states), replicas)
        hyper = shard_replicas(jax.tree.map(lambda value: jnp.full(replicas, value), HYPER), replicas)
        keys = shard_replicas(keys, replicas)
        return state, hyper, keys

    engine = choose_engine(make_learner("leo"), runs=replicas)

    def go_on(state, hyper, keys):
        state, _ = compile_advance(engine, replicas, 2, 4, "global")(state, hyper, keys, training)
        return compile_validate(engine, replicas, 6)(state, jax.random.key(9), validation, 100)[0]

    first, second = run(0), run(5)
    with count_compilations() as compilations:
        state = go_on(*first)
    programs = len(compilations)
    assert first[0].learner.decoder.to_mean.is_deleted()  # states are updated in place
    with count_compilations() as compilations:
        go_on(state, *first[1:])
        go_on(*second)
    assert not compilations
    assert programs == 2, programs
