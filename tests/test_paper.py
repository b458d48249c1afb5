"""What the paper states in numbers: sizes, shapes and hyper-parameters."""

import jax
import pytest

from helpers.small import close
from metaleo.config.presets import PRESETS, find_preset, resolve_config
from metaleo.errors import BadInput
from metaleo.learners import LEO
from metaleo.learners.registry import Structure
from metaleo.tasks.task import labelled


def test_sizes_of_the_networks():
    """Appendix B.3: 640 → 64 → pairs of 128 → 2 · 64, and 64 → 2 · 640; with the step sizes, 172,736 numbers."""
    leo = Structure().init(jax.random.key(0))
    assert isinstance(leo, LEO)
    assert sum(leaf.size for leaf in jax.tree.leaves(leo)) == 172_736
    assert leo.encoder.weight.shape == (640, 64)
    assert leo.relation.first.shape == leo.relation.middle.shape == leo.relation.last.shape == (128, 128)
    assert leo.decoder.weight.shape == (64, 2 * 640)
    assert (leo.latent_steps, leo.finetune_steps) == (5, 5)
    assert (leo.latent_step_size == 1).all()
    close(leo.finetune_step_size, 0.001 + 0 * leo.finetune_step_size)


def test_shapes_of_an_adaptation():
    """Table 3: five codes of 64 numbers become five rows of 640 weights."""
    leo = Structure().init(jax.random.key(0))
    support = labelled(jax.random.normal(jax.random.key(1), (5, 640)), jax.numpy.arange(5), 5)
    adaptation = jax.eval_shape(leo.adapt, support)
    assert adaptation.trace.code.shape == adaptation.trace.adapted_code.shape == (5, 64)
    assert adaptation.head.weights.shape == adaptation.trace.decoded_weights.shape == (5, 640)
    assert adaptation.trace.support_losses.shape == (5 + 5 + 1,)


@pytest.mark.parametrize(
    ("name", "shot", "field", "value"),
    [
        ("paper-mini-1shot", 1, "learning_rate", 0.00043653954),
        ("paper-mini-1shot", 1, "orthogonality", 303.216647),
        ("paper-mini-5shot", 5, "encoder_penalty", 5.39245830e-06),
        ("paper-mini-5shot", 5, "kl", 0.0440372182),
        ("paper-tiered-1shot", 1, "l2", 3.10725285e-08),
        ("paper-tiered-5shot", 5, "keep_prob", 0.628325359),
        ("official-mini-1shot", 1, "kl", 0.756143),
        ("official-mini-5shot", 5, "keep_prob", 1 - 0.300299),
        ("official-tiered-1shot", 1, "encoder_penalty", 8.302962e-5),
        ("official-tiered-5shot", 5, "l2", 1.690399e-10),
    ],
)
def test_presets_hold_the_published_numbers(name, shot, field, value):
    preset = PRESETS[name]
    assert preset.shot == shot
    assert getattr(preset.hyper, field) == pytest.approx(value, rel=1e-9)
    assert preset.structure.official == name.startswith("official")
    assert preset.clip == ("per-tensor" if name.startswith("official") else "global")


def test_unknown_preset_lists_the_known():
    with pytest.raises(BadInput, match=r"paper-mini-1shot.*official-tiered-5shot"):
        find_preset("nonsense", "leo", 1)


def test_a_run_is_its_preset_and_then_what_is_given():
    config = resolve_config(256, data="intents", preset="intents-1shot")
    assert (config.steps, config.validate_every, config.structure.finetune_step_size) == (750, 250, 3.0)
    changed = resolve_config(256, preset="intents-1shot", steps=5, keep_prob=0.9, latent=8)
    assert (changed.steps, changed.validate_every) == (5, 250)
    assert (changed.hyper.keep_prob, changed.structure.latent, changed.structure.dim) == (0.9, 8, 256)
    with pytest.raises(TypeError, match="a run has no stepz"):
        resolve_config(256, stepz=5)
