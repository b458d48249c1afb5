"""The memory that a request will take, before it takes it: XLA's own count for its program."""

from typing import Any

import jax
import jax.numpy as jnp

from metaleo.checkpoints import TrainedModel
from metaleo.engines import choose_engine
from metaleo.estimators.classifier import AT_ONCE, AdaptedClassifier, adapt_heads, apply_head, padded_length

COMPILING = 256 * 2**20
"""Memory to compile a program, which is needed to know the memory of the program."""


def adapting_bytes(model: TrainedModel, way: int, examples: int) -> int:
    """Of `adapt`. The program is compiled on the way, and `adapt` finds it ready."""
    length, dim = padded_length(examples), model.structure.dim
    shapes = ((1, length, dim), jnp.float32), ((1, length, way), jnp.float32), ((1, length), jnp.bool_)
    support = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return program_bytes(adapt_heads, model.learner, support, model.structure.normalised, choose_engine(model.learner))


def predicting_bytes(adapted: AdaptedClassifier, examples: int) -> int:
    """Of `predict`, likewise."""
    length = padded_length(min(examples, AT_ONCE))
    return program_bytes(apply_head, adapted.head, jax.ShapeDtypeStruct((length, adapted.structure.dim), jnp.float32))


def program_bytes(function: Any, *arguments: Any) -> int:
    """Of a compiled function: what it is given, what it returns and what it needs meanwhile."""
    found = function.lower(*arguments).compile().memory_analysis()
    if found is None:  # a device that does not tell
        return COMPILING
    return found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes
