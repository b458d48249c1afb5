"""Backbones: what they compute, where their layers are, how large they are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.small import message
from metaleo.errors import BadInput
from metaleo.features.backbone import Moments, Norm, Pass, pool
from metaleo.features.backbone_files import TrainedBackbone, blank, load_backbone, save_backbone
from metaleo.features.pretrain import Classifier
from metaleo.features.recipes import ARCHITECTURES, Architecture, find_architecture, second_of_third_group
from metaleo.features.wrn import Block, WideResNet

SMALL = Architecture(depth=10, width=1, side=16, layer=7)


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def passed(backbone, images, **settings):
    through = Pass(**settings)
    backbone(images, through)
    return through


def test_the_papers_network_has_36_5_million_parameters():
    classifier = jax.eval_shape(lambda: Classifier.init(jax.random.key(0), Architecture(), 64, turns=False))
    assert count(classifier) == 36_513_808
    assert round(count(classifier) / 1e6, 1) == 36.5


def test_shapes_and_layers_of_the_papers_network():
    backbone = Architecture().blank()
    assert backbone.layers == tuple(range(1, 26, 2))
    assert backbone.dim == 640
    image = jax.ShapeDtypeStruct((2, 80, 80, 3), jnp.float32)
    shapes = {
        key: value.shape for key, value in jax.eval_shape(lambda net, x: passed(net, x).taps, backbone, image).items()
    }
    assert shapes[1, "raw"] == (2, 80, 80, 16)
    assert shapes[9, "rectified"] == (2, 40, 40, 160)  # three reductions, one in each group
    assert shapes[17, "rectified"] == (2, 20, 20, 320)
    assert shapes[21, "rectified"] == shapes[25, "rectified"] == (2, 10, 10, 640)
    assert len(backbone.groups) == 3
    assert all(len(group) == 4 for group in backbone.groups)


@pytest.mark.slow
def test_layer_21_is_the_second_block_of_the_third_group():
    """Its features are what the third block of that group is given after its first norm and ReLU."""
    backbone = WideResNet.init(jax.random.key(0), depth=28, width=1)
    images = jax.random.normal(jax.random.key(1), (2, 16, 16, 3))
    taps = passed(backbone, images).taps
    group = backbone.groups[2]
    through = Pass()
    values = taps[17, "raw"]
    for block in group[:2]:
        rectified = jnp.maximum(through.norm(block.norm1, values), 0)
        values = block(values, rectified, through)
    np.testing.assert_allclose(taps[21, "raw"], values, rtol=1e-5, atol=1e-5)
    expected = jnp.maximum(through.norm(group[2].norm1, values), 0)
    np.testing.assert_allclose(taps[21, "rectified"], expected, rtol=1e-5, atol=1e-5)


def test_the_same_layer_in_other_depths():
    assert [second_of_third_group(depth) for depth in (10, 16, 22, 28)] == [7, 13, 17, 21]


def convolve(images, weight, stride):
    """A convolution by its definition, in loops."""
    size, pad = weight.shape[0], weight.shape[0] // 2
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    side = (images.shape[1] + 2 * pad - size) // stride + 1
    out = np.zeros((len(images), side, side, weight.shape[3]))
    for row in range(side):
        for column in range(side):
            patch = padded[:, row * stride : row * stride + size, column * stride : column * stride + size]
            out[:, row, column] = np.einsum("nhwi,hwio->no", patch, weight)
    return out


def normalise(values, norm):
    mean, variance = values.mean((0, 1, 2)), values.var((0, 1, 2))
    return (values - mean) / np.sqrt(variance + 1e-5) * np.asarray(norm.scale) + np.asarray(norm.offset)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_equals_an_independent_computation(stride, float64):
    random = np.random.default_rng(stride)
    block = Block.init(jax.random.key(0), 3 if stride == 2 else 4, 4, stride)
    block = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape)), block)
    images = random.normal(size=(2, 6, 6, 3 if stride == 2 else 4))
    through = Pass()
    rectified = jnp.maximum(through.norm(block.norm1, jnp.asarray(images)), 0)
    ours = block(jnp.asarray(images), rectified, through)
    first = np.maximum(normalise(images, block.norm1), 0)
    middle = np.maximum(normalise(convolve(first, np.asarray(block.convolution1.weight), stride), block.norm2), 0)
    change = convolve(middle, np.asarray(block.convolution2.weight), 1)
    around = images if block.shortcut is None else convolve(first, np.asarray(block.shortcut.weight), stride)
    assert (block.shortcut is None) == (stride == 1)
    np.testing.assert_allclose(ours, change + around, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_running_moments_take_the_place_of_the_batchs():
    backbone = SMALL.init(jax.random.key(0))
    images = jax.random.normal(jax.random.key(1), (4, 16, 16, 3))
    batch = passed(backbone, images)
    again = passed(backbone, images, running=batch.seen)
    np.testing.assert_allclose(batch.taps[7, "rectified"], again.taps[7, "rectified"], rtol=1e-5, atol=1e-5)
    alone = passed(backbone, images[:1], running=batch.seen)  # an image does not depend on its neighbours
    np.testing.assert_allclose(alone.taps[7, "rectified"], again.taps[7, "rectified"][:1], rtol=1e-4, atol=1e-5)


def test_a_norm_in_bfloat16_keeps_its_moments_in_float32():
    through = Pass()
    values = through.norm(Norm.init(3), jnp.full((2, 4, 4, 3), 1000.0, jnp.bfloat16))
    assert values.dtype == jnp.bfloat16
    assert through.seen[0].mean.dtype == jnp.float32


def test_dropout_keeps_the_expectation_and_the_share():
    through = Pass(key=jax.random.key(0), keep_prob=0.5)
    values = through.dropout(jnp.ones((8, 16, 16, 6)))  # six channels: not a multiple of the four draws of a word
    assert set(np.unique(values)) == {0.0, 2.0}
    assert abs(float(values.mean()) - 1) < 0.03
    assert not np.array_equal(values, through.dropout(jnp.ones((8, 16, 16, 6))))
    plain = jnp.ones((1, 2, 2, 3))
    assert Pass(keep_prob=0.5).dropout(plain) is plain  # no key: evaluation


def test_mixing_pairs_the_two_ends_of_a_batch():
    values = jnp.arange(4.0)[:, None, None, None]
    mixed = Pass(mixing=jnp.array([0.75, 1.0, 1.0])).mix(0, values)
    np.testing.assert_allclose(mixed.ravel(), [0.75, 1.25, 1.75, 2.25])
    np.testing.assert_array_equal(Pass(mixing=jnp.array([0.75, 1.0, 1.0])).mix(1, values), values)


@pytest.mark.slow
def test_a_conv4_halves_four_times():
    architecture = ARCHITECTURES["conv-4"]
    backbone = architecture.init(jax.random.key(0))
    taps = passed(backbone, jnp.zeros((2, 28, 28, 1))).taps
    assert [taps[layer, "rectified"].shape[1] for layer in backbone.layers] == [14, 7, 3, 1]
    assert pool(taps[4, "rectified"]).shape == (2, backbone.dim)


def test_network_files_come_back_as_they_were(tmp_path):
    trained = blank(SMALL)
    trained = TrainedBackbone(trained.backbone, [Moments(m.mean + 1, m.variance * 2) for m in trained.moments])
    save_backbone(tmp_path / "network.safetensors", trained, SMALL, {"classes": ["a", "b"]})
    for place in (tmp_path, tmp_path / "network.safetensors"):
        file = load_backbone(place)
        assert file.architecture == SMALL
        assert file.header["classes"] == ["a", "b"]
        jax.tree.map(np.testing.assert_array_equal, file.trained, trained)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(BadInput, match="does not exist"):
        load_backbone(tmp_path / "network.safetensors")
    save_backbone(tmp_path / "network.safetensors", blank(SMALL), dataclasses.replace(SMALL, width=2), {})
    with pytest.raises(BadInput, match="does not fit"):
        load_backbone(tmp_path)
    (tmp_path / "network.safetensors").write_bytes(b"half")
    with pytest.raises(BadInput, match="truncated"):
        load_backbone(tmp_path)
    with pytest.raises(BadInput, match="unknown backbone 'resnet'; known are wrn-28-10"):
        find_architecture("resnet")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"architecture": "x"}, "architecture should be an object"),
        ({"architecture": {"kind": "vgg"}}, "architecture.kind should be one of wrn, conv4"),
        ({"architecture": {"strides": [1, 2]}}, "architecture.strides should be a list"),
        ({"architecture": {"depth": 2**32}}, "depth=4294967296 must be at most"),
        ({"architecture": {"kind": "conv4", "width": 0, "layer": 4}}, "width=0 must be at least 1"),
        ({"architecture": {"layer": 20}}, "layer=20 is none of the network's"),
        ({"config": {"images": "x", "recipe": {"mirrors": "yes"}}}, "config.recipe.mirrors should be true or false"),
        ({"image_side": 10**6}, "image_side=1000000 must be at most"),
        ({"drawings": "no"}, "drawings should be true or false"),
    ],
)
def test_damaged_headers(tmp_path, change, expected):
    save_backbone(tmp_path / "network.safetensors", blank(SMALL), SMALL, change)
    text = message(lambda: load_backbone(tmp_path))
    assert expected in text
    assert "is a damaged network file" in text
