"""One function for a task and another for many: what `vmap` over tasks turns into is ours to say."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Arrays = tuple[Array, ...]


def together(one: Callable[..., Arrays], many: Callable[..., Arrays], shared: tuple[int, ...]) -> Callable[..., Arrays]:
    """`one` for a task; under `vmap`, where the arguments numbered in `shared` are the same for all tasks, `many`.

    A primitive of its own: what `jax.custom_batching` makes cannot be differentiated in reverse.
    """
    primitive = Primitive("one_task_or_many")
    primitive.multiple_results = True

    def plain(*arguments: Array, jaxpr: ClosedJaxpr) -> list[Array]:
        return jaxpr_as_fun(jaxpr)(*arguments)

    def derivative(primals: Sequence[Array], tangents: Sequence[Any], jaxpr: ClosedJaxpr) -> Any:
        return jax.jvp(jaxpr_as_fun(jaxpr), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))

    def mapped(arguments: Sequence[Array], axes: Sequence[int | None], jaxpr: ClosedJaxpr) -> Any:
        if any(axes[i] is not None for i in shared):  # every task with a learner of its own
            results = jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes))(*arguments)
        else:
            pairs = list(zip(arguments, axes, strict=True))
            size = next(argument.shape[axis] for argument, axis in pairs if axis is not None)
            fronts = [batching.bdim_at_front(argument, axis, size) for argument, axis in pairs]
            results = many(*(arguments[i] if i in shared else front for i, front in enumerate(fronts)))
        return results, [0] * len(results)

    primitive.def_impl(plain)
    primitive.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = mapped
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    return lambda *arguments: tuple(primitive.bind(*arguments, jaxpr=jax.make_jaxpr(one)(*arguments)))
