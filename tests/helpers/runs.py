"""Run folders, without the training."""

import contextlib
import dataclasses
import json
import threading

import jax

from helpers.small import initialise, shake
from metaleo._io.files import write_text
from metaleo._io.run_log import owned
from metaleo.checkpoints import save_model
from metaleo.config.schema import TrainConfig


@contextlib.contextmanager
def owned_by_another(folder):
    """Another thread owns the folder, as another process would."""
    ready, over = threading.Event(), threading.Event()

    def own():
        with owned(folder):
            ready.set()
            over.wait()

    thread = threading.Thread(target=own)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def make_run(folder, structure, seeds=(0,), **training):
    """A run folder as training leaves it, with learners of weights that matter."""
    config = TrainConfig(data="features.npz", way=3, shot=2, seeds=len(seeds), structure=structure)
    config = dataclasses.replace(config, **training)
    for seed in seeds:
        name = "model.safetensors" if len(seeds) == 1 else f"model-{seed}.safetensors"
        validation_score = "validation_loss" if structure.noise else "validation_accuracy"
        header = {"config": config.to_json(), "seed": seed, "step": 20 + seed, validation_score: 0.5 + 0.1 * seed}
        save_model(folder / name, shake(initialise(structure, jax.random.key(seed)), 0.1), structure, header)
    write_text(folder / "config.json", json.dumps(config.to_json()))
    records = [
        {"step": step, "seed": seed, "query_accuracy": 0.4, "validation_accuracy": 0.5, "skipped": 0}
        for step in (10, 20) for seed in seeds
    ]  # fmt: skip
    write_text(folder / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))
