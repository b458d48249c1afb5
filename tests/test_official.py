"""The authors' released code, number by number (tests/golden/README.md says where the numbers come from)."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.small import close
from metaleo.engines import all_engines
from metaleo.learners.base import HyperParams, query_loss_and_metrics
from metaleo.learners.leo import LEO
from metaleo.learners.leo_noise import Noise
from metaleo.losses import encoder_penalty, l2, orthogonality
from metaleo.nn.encoder_decoder import Decoder, Encoder, RelationNet
from metaleo.nn.heads import linear_network
from metaleo.tasks.task import Task, labelled

GOLDEN = Path(__file__).parent / "golden"
PARTS = {
    "encoder": lambda leo: leo.encoder.weight,
    "relation_0": lambda leo: leo.relation.first,
    "relation_1": lambda leo: leo.relation.middle,
    "relation_2": lambda leo: leo.relation.last,
    "decoder": lambda leo: leo.decoder.weight,
    "latent_lr": lambda leo: leo.latent_step_size,
    "finetune_lr": lambda leo: leo.finetune_step_size,
}


@functools.cache
def read(name):
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return dict(archive)


class Golden:
    """One file of golden numbers, its model and its tasks in the current precision."""

    def __init__(self, name):
        self.numbers = read(name)
        self.training = name.endswith("train")
        weights = {part: self[f"var/{part}"] for part in PARTS}
        self.leo = LEO(
            Encoder(weights["encoder"]),
            RelationNet(weights["relation_0"], weights["relation_1"], weights["relation_2"]),
            Decoder(*jnp.split(weights["decoder"], 2, axis=1)),
            weights["latent_lr"][0, 0],
            weights["finetune_lr"][0, 0],
            linear_network(weights["encoder"].shape[0]),
            latent_steps=int(self.numbers["hp/latent_steps"]),
            finetune_steps=int(self.numbers["hp/finetune_steps"]),
            stochastic=True,
            official=True,
        )
        self.hyper = HyperParams(
            learning_rate=0.0,
            kl=float(self.numbers["hp/kl_weight"]),
            encoder_penalty=float(self.numbers["hp/encoder_penalty_weight"]),
            l2=float(self.numbers["hp/l2_penalty_weight"]),
            orthogonality=float(self.numbers["hp/orthogonality_penalty_weight"]),
            keep_prob=1.0,
        )

    def __getitem__(self, name):
        return jnp.asarray(self.numbers[name], jnp.zeros(()).dtype)

    def task(self, t):
        def batch(which):
            inputs = self[f"{which}_x"][t]  # (way, image, dim)
            labels = self.numbers[f"{which}_y"][t].reshape(-1)
            return labelled(inputs.reshape(-1, inputs.shape[-1]), labels, way=inputs.shape[0])

        return Task(batch("support"), batch("query"))

    def noise(self, t):
        if not self.training:
            return None
        way, shot, dim = self.numbers["support_x"][t].shape
        steps = self.leo.latent_steps, self.leo.finetune_steps
        kept = [jnp.ones((n, way * shot, dim), bool) for n in (1, *steps)]
        code, weights = self["noise_latent"][t][:, 0], self["noise_weights"][t][:, :, 0]
        return Noise(code, weights, kept[0][0], kept[1], kept[2], jnp.ones(()))

    def all(self):
        """All tasks and their noise, each as one tree of arrays."""
        every = [(self.task(t), self.noise(t)) for t in range(len(self.numbers["support_x"]))]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *every)


@functools.partial(jax.jit, static_argnums=0)
def adapt_and_judge(engine, leo, tasks, hyper, noises):
    """Adaptations, losses and infos of all tasks: by the learner as it is written, or by an engine."""
    if engine == "reference":
        adaptations = jax.vmap(leo.adapt_with)(tasks.support, noises)
    else:
        adaptations = all_engines()[engine].adapt_with(leo, tasks.support, Noise() if noises is None else noises)

    def judge(adaptation, query, noise):
        loss, info = query_loss_and_metrics(adaptation.head, query, hyper, None, leo.network)
        penalty, more = leo.penalties(adaptation.trace, hyper, noise)
        return loss + penalty, info | more

    return adaptations, *jax.vmap(judge)(adaptations, tasks.query, noises)


with_every_engine = pytest.mark.parametrize("engine", [name for name in all_engines() if not name.startswith("cuda")])


@pytest.fixture(params=by_default(["float64"], ["float64", "float32"]))
def tolerance(request):
    with jax.enable_x64(True) if request.param == "float64" else contextlib.nullcontext():
        yield {"float64": 1e-6, "float32": 1e-4}[request.param]


@with_every_engine
@pytest.mark.parametrize("name", ["1shot", "5shot", "1shot_train"])
def test_forward_pass(name, engine, tolerance):
    golden = Golden(name)
    tasks, noises = golden.all()
    adaptations, _, infos = adapt_and_judge(engine, golden.leo, tasks, golden.hyper, noises)
    for t in range(3):
        task, adaptation, info = jax.tree.map(lambda leaf, t=t: leaf[t], (tasks, adaptations, infos))
        trace = adaptation.trace
        # The authors keep K equal copies of each code; ours is one.
        close(trace.code, golden["latents_init"][t][:, 0], tolerance)
        close(trace.adapted_code, golden["latents_adapted"][t][:, 0], tolerance)
        close(trace.decoded_weights, golden["weights_decoded"][t].mean(1), tolerance)
        close(adaptation.head.weights, golden["weights_finetuned"][t].mean(1), tolerance)
        shots = golden["support_loss_steps"].shape[-1]
        if engine == "reference":  # others have no use for them
            close(trace.support_losses, golden["support_loss_steps"][t].sum((1, 2)) / shots, tolerance)
        logits = jax.vmap(adaptation.head)(task.query.inputs)
        close(logits, golden["query_logits"][t].reshape(logits.shape), tolerance)
        close(info["query_loss"], golden["query_loss_per_task"][t], tolerance)
        close(info["query_accuracy"], golden["query_accuracy_per_task"][t], tolerance)
        penalty = encoder_penalty(trace.code, trace.adapted_code)
        close(penalty, golden["encoder_penalty_per_task"][t], tolerance)
        if golden.training:
            close(info["kl"], golden["kl_per_task"][t], tolerance)


@pytest.mark.parametrize("name", ["1shot", "5shot", "1shot_train"])
def test_regularisers(name, tolerance):
    golden = Golden(name)
    leo, hyper = golden.leo, golden.hyper
    close(
        hyper.l2 * l2(*jax.tree.leaves((leo.encoder, leo.relation, leo.decoder))),
        golden["l2_penalty"],
        tolerance,
    )
    close(hyper.orthogonality * orthogonality(leo.decoder.weight), golden["orthogonality_penalty"], tolerance)


@with_every_engine
@pytest.mark.parametrize("name", ["1shot", "5shot", "1shot_train"])
def test_meta_gradients(name, engine, tolerance):
    """Of the query loss, of the whole loss and of the orthogonality term, compiled together."""
    golden = Golden(name)
    tasks, noises = golden.all()
    hyper, only = golden.hyper, dataclasses.replace(golden.hyper, l2=0.0)  # orthogonality alone

    def losses(leo):
        _, each, infos = adapt_and_judge(engine, leo, tasks, hyper, noises)
        total = each.mean() + all_engines()[engine].regulariser(leo, hyper)
        values = jnp.stack([infos["query_loss"].mean(), total, all_engines()[engine].regulariser(leo, only)])
        return values, values

    gradients, values = jax.jit(jax.jacrev(losses, has_aux=True))(golden.leo)
    of_value = {
        "grad_query_loss": "mean_query_loss",
        "grad_total": "official_total",
        "grad_orthogonality": "orthogonality_penalty",
    }
    compared = 0
    for number, (target, value) in enumerate(of_value.items()):
        if f"{target}/decoder" not in golden.numbers:
            continue  # the file of a training step holds the gradient of the whole loss alone
        close(values[number], golden[value], tolerance)
        for part, leaf in PARTS.items():
            if f"{target}/{part}" in golden.numbers:
                own = leaf(jax.tree.map(lambda g: g[number], gradients))  # noqa: B023
                close(own, golden[f"{target}/{part}"].reshape(own.shape), tolerance)
                compared += 1
    assert compared == {"1shot": 15, "5shot": 15, "1shot_train": 8}[name]
