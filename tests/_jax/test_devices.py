"""Several devices of a CPU at once: nothing may wait for a thread that another device holds."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from helpers.marks import by_default
from helpers.small import HYPER, LEARNERS, make_learner, make_task
from metaleo._jax.devices import fits_on_device


@pytest.mark.parametrize("name", by_default([name for name in LEARNERS if not name.startswith("leo-")], LEARNERS))
def test_no_learner_calls_lapack(name):
    """LAPACK waits for XLA's threads while it holds one: on as many devices as there are cores, for ever."""
    learner, task = make_learner(name), make_task()

    def both(learner, task, key):
        loss = jax.grad(lambda learner: learner.meta_loss(task, HYPER, key)[0])(learner)
        return loss, learner.adapt(task.support).head(task.query.inputs[0])

    program = jax.jit(both).lower(learner, task, jax.random.key(0)).as_text()
    assert "lapack" not in program


@pytest.mark.parametrize(
    ("devices", "names"),
    [(2, ("ridge",)), pytest.param(4, LEARNERS, marks=pytest.mark.slow)],
    ids=["2-ridge", "4-all"],
)
def test_learners_end_on_many_devices(devices, names):
    command = [sys.executable, "-m", "helpers.many_devices", *names]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == list(names)


def test_half_of_the_memory_is_for_features(monkeypatch):
    monkeypatch.setattr("metaleo._jax.devices.memory_bytes", lambda: 8 * 100 * jax.local_device_count())
    assert fits_on_device(99)
    assert not fits_on_device(100)
