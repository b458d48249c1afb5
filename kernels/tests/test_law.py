"""The law of engines on a GPU: numbers are those of XLA, to the rounding of TF32."""

import jax
import pytest
from metaleo.engines.closed_form import ClosedForm

from metaleo_kernels import Cuda, CudaMany
from metaleo_kernels.launching import has_clusters
from problems import apart, leaves, losses_and_gradient, make_runs

TF32 = 0.02
"""Of the largest number of an array. Products in TF32 differ by a tenth of this; a kernel gone wrong, by all of it."""
OF_QUERIES = 0.1
"""The same for accuracies: queries near the border."""
pytestmark = pytest.mark.skipif(not has_clusters(), reason="needs a GPU of compute capability 9.0")


@pytest.mark.parametrize("official", [False, True])
@pytest.mark.parametrize("shot", [1, 5])
@pytest.mark.parametrize(("engine", "runs"), [(Cuda(), 1), (CudaMany(), 8)])
def test_losses_and_meta_gradient(engine, runs, shot, official):
    """Where rounding decides on a slope, XLA in TF32 says how much that may change: at the edge of official scales."""
    learner, tasks, *rest = make_runs(runs, 12, way=5, shot=shot, query=15, dim=640, official=official)
    assert engine.supports(jax.tree.map(lambda leaf: leaf[0], learner), runs)
    compute = losses_and_gradient(engine, tasks)
    traced = str(jax.make_jaxpr(compute)(learner, *rest))
    kernels = {f"{engine.kernels}_forward", f"{engine.kernels}_backward"}
    kernels |= {"draw_normals", "judge_queries"} if runs > 6 else set()
    assert all(traced.count(f"target_name={kernel}") == 1 for kernel in kernels)
    own, by_xla = compute(learner, *rest), losses_and_gradient(ClosedForm(), tasks)(learner, *rest)
    with jax.default_matmul_precision("highest"):
        exact = losses_and_gradient(ClosedForm(), tasks)(learner, *rest)
    accuracies = [results[0][1][1].pop("query_accuracy") for results in (own, by_xla, exact)]
    assert apart(accuracies[0], accuracies[2]) <= OF_QUERIES
    for path, mine, theirs, truth in leaves(own, by_xla, exact):
        allowed = max(TF32, 2 * apart(theirs, truth))
        assert apart(mine, truth) <= allowed, f"{path}: {apart(mine, truth):.2g}, {apart(theirs, truth):.2g} by XLA"
