"""A server of the page on a free port, in a thread of the test's process."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jax
import numpy as np

from metaleo.checkpoints import TrainedModel
from metaleo.learners.registry import Structure
from metaleo.serve.models import ServedModel
from metaleo.serve.server import Limits, listen, make_app, make_server

DIM = 8
HOSTS = ("localhost", "127.0.0.1", "[::1]")
QUICK = Limits(rate=1e6, burst=1_000_000)


def tiny(name: str = "tiny") -> ServedModel:
    """A LEO that has learned nothing."""
    structure = Structure(dim=DIM, latent=4, latent_steps=2, finetune_steps=1)
    header = {"config": {"shot": 1}, "classes": ["a", "b"]}
    return ServedModel(name, "vectors", TrainedModel(structure.init(jax.random.key(0)), structure, header))


@contextlib.contextmanager
def running(models: dict[str, ServedModel], limits: Limits = QUICK) -> Iterator[tuple[httpx.Client, Any]]:
    """A client of a server with these limits, and its service."""
    app = make_app(models, limits, HOSTS)
    server = make_server(app, limits)
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=120) as client:
            yield client, app.state.service
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def examples(way: int = 2, shot: int = 1, dim: int = DIM, seed: int = 0) -> dict[str, Any]:
    """Rows with a place of their own for each class, and their labels."""
    noise = np.random.default_rng(seed).normal(size=(way * shot, dim)) * 0.1
    rows = np.repeat(np.eye(way, dim), shot, axis=0) + noise
    return {"examples": rows.tolist(), "labels": [f"class {index}" for index in range(way) for _ in range(shot)]}
