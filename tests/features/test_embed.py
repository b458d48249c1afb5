"""Export: the same numbers every time, however it is cut into batches and however often it was killed."""

import json

import jax
import numpy as np
import pytest
import safetensors

from helpers.images import CONV4, make_images
from metaleo.cli import main
from metaleo.data import load_data
from metaleo.errors import BadInput
from metaleo.features import embed as embedding
from metaleo.features.backbone_files import BackboneFile, TrainedBackbone, blank, save_backbone
from metaleo.features.embed import Export, embed, embed_batch, embed_slab
from metaleo.features.pretrain import split_training

TAP = ((4, "rectified"),)


@pytest.fixture(scope="module")
def file():
    """A network with weights and moments of some size, that held out a quarter of its training images."""
    random = np.random.default_rng(0)
    trained = jax.tree.map(lambda leaf: leaf + 0.3 * random.random(leaf.shape).astype(np.float32), blank(CONV4))
    header = {"config": {"hold_out": 0.25, "seed": 3}, "classes": [f"class{i}" for i in range(4)]}
    return BackboneFile(TrainedBackbone(*trained), CONV4, header)


def features_of(path):
    metaset = load_data(path)
    return metaset.read(slice(None)), metaset


def contents(path):
    """All that a file holds; the order of the strings in its header is left to chance."""
    with safetensors.safe_open(path, "np") as archive:
        arrays = {name: archive.get_tensor(name).tobytes() for name in archive.keys()}  # noqa: SIM118
        return arrays, archive.metadata()


def write(images, file, export, path):
    return embed(images, file, export, [path], lambda done: None)


def test_export_is_deterministic_and_reads_as_features(file, tmp_path):
    images = make_images()
    export = Export(TAP, augmented=1)
    assert write(images, file, export, tmp_path / "one.safetensors") == len(images) + 48
    write(images, file, export, tmp_path / "two.safetensors")
    assert contents(tmp_path / "one.safetensors") == contents(tmp_path / "two.safetensors")
    metaset = load_data(tmp_path / "one.safetensors")
    assert metaset.splits == images.splits
    assert metaset.class_names == images.class_names
    assert list(metaset.counts) == [24] * 4 + [12] * 10  # a random view more of each training image
    assert sorted(place.name for place in tmp_path.iterdir()) == ["one.safetensors", "two.safetensors"]


def test_an_image_does_not_depend_on_its_batch(file):
    pixels, key = make_images().pixels[:5], jax.random.key(0)
    (together,) = embed_slab(file, pixels, key, TAP)
    (alone,) = embed_slab(file, pixels[3:4], key, TAP)
    np.testing.assert_array_equal(together[3:4], alone)


def test_a_second_slab_compiles_nothing(file, count_compilations):
    pixels, key = make_images().pixels, jax.random.key(0)
    embed_slab(file, pixels[:5], key, TAP)
    with count_compilations() as compilations:
        embed_slab(file, pixels[:7], key, TAP)
    assert compilations == []


def test_multi_view_is_the_average_over_ten_crops(file):
    """Four corners and the centre, each also mirrored: made here by slicing and flipping pixels."""
    images = make_images(side=20).pixels[:3]
    architecture = CONV4.__class__(**{**vars(CONV4), "share": 16 / 20})
    (ours,) = embed_batch(file.trained, images, jax.random.key(0), architecture, TAP, "multi")
    whole = CONV4.__class__(**{**vars(CONV4), "share": 1.0})
    parts = []
    for top, left in ((0, 0), (0, 4), (4, 0), (4, 4), (2, 2)):
        piece = images[:, top : top + 16, left : left + 16]
        for view in (piece, piece[:, :, ::-1]):
            parts.append(embed_batch(file.trained, view.copy(), jax.random.key(0), whole, TAP)[0])
    np.testing.assert_allclose(ours, np.mean(parts, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_network_that_knows_no_mirrors_sees_none(file):
    images, key = make_images(side=20).pixels[:3], jax.random.key(0)
    shared = CONV4.__class__(**{**vars(CONV4), "share": 16 / 20})
    straight = file._replace(architecture=shared, header={"config": {"recipe": {"mirrors": False}}})
    (ours,) = embed_slab(straight, images, key, TAP, "multi")
    (both,) = embed_slab(file._replace(architecture=shared), images, key, TAP, "multi")
    assert straight.mirrors is False
    assert not np.array_equal(ours, both)
    whole = CONV4.__class__(**{**vars(CONV4), "share": 1.0})
    pieces = [images[:, top : top + 16, left : left + 16] for top, left in ((0, 0), (0, 4), (4, 0), (4, 4), (2, 2))]
    parts = [embed_batch(file.trained, piece.copy(), key, whole, TAP)[0] for piece in pieces]
    np.testing.assert_allclose(ours, np.mean(parts, axis=0), rtol=2e-3, atol=1e-3)


def test_flat_features_average_to_pooled_ones(file):
    images, key, tap = make_images().pixels[:4], jax.random.key(0), ((3, "rectified"),)
    (pooled,) = embed_batch(file.trained, images, key, CONV4, tap)
    (flat,) = embed_batch(file.trained, images, key, CONV4, tap, flat=True)
    np.testing.assert_allclose(flat.reshape(4, -1, pooled.shape[1]).mean(1), pooled, rtol=1e-5, atol=1e-6)


def test_a_killed_export_goes_on(file, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "SLAB", 50)
    images, whole, target = make_images(), tmp_path / "whole.safetensors", tmp_path / "target.safetensors"
    write(images, file, Export(TAP), whole)

    class Killed(Exception):
        pass

    def kill(done):
        if done > 100:
            raise Killed

    with pytest.raises(Killed):
        embed(images, file, Export(TAP), [target], kill)
    assert not target.exists()
    seen = []
    monkeypatch.setattr(embedding, "embed_slab", lambda *given: seen.append(1) or embed_slab(*given))
    write(images, file, Export(TAP), target)
    assert len(seen) == 1  # of four slabs, three were there
    assert contents(target) == contents(whole)


def test_parts_of_another_export_are_not_used(file, tmp_path, monkeypatch):
    images, target = make_images(), tmp_path / "target.safetensors"
    parts = tmp_path / ".target.safetensors.parts"
    parts.mkdir()
    (parts / "plan.json").write_text(json.dumps({"export": "another"}))
    np.savez(parts / "0-0.npz", rows=np.arange(3), **{"0": np.zeros((3, 4), np.float16)})
    assert write(images, file, Export(TAP), target) == len(images)


def test_parts_of_another_network_are_not_used(file, tmp_path):
    """Two stops of one run leave networks with the same header."""

    class Killed(Exception):
        pass

    def kill(done):
        raise Killed

    other = file._replace(trained=jax.tree.map(lambda leaf: 1.5 * leaf, file.trained))
    with pytest.raises(Killed):
        embed(make_images(), other, Export(TAP), [tmp_path / "f.safetensors"], kill)
    write(make_images(), file, Export(TAP), tmp_path / "f.safetensors")
    write(make_images(), file, Export(TAP), tmp_path / "g.safetensors")
    assert contents(tmp_path / "f.safetensors") == contents(tmp_path / "g.safetensors")


def test_held_out_images_only(file, tmp_path):
    images = make_images()
    write(images, file, Export(TAP), tmp_path / "all.safetensors")
    write(images, file, Export(TAP, training_images="held-out"), tmp_path / "held.safetensors")
    every, (few, metaset) = features_of(tmp_path / "all.safetensors")[0], features_of(tmp_path / "held.safetensors")
    assert list(metaset.counts) == [3] * 4 + [12] * 10
    split = split_training(images, 0.25, 3)
    np.testing.assert_array_equal(few[:12], every[split.rows[split.held_out]])
    with pytest.raises(BadInput, match="held out no images of these training classes"):
        write(
            make_images(classes=(3, 5, 5)), file, Export(TAP, training_images="held-out"), tmp_path / "no.safetensors"
        )


def test_layers_together(file, tmp_path):
    taps = ((2, "rectified"), (4, "rectified"))
    write(make_images(), file, Export(taps, together=True), tmp_path / "sum.safetensors")
    parts = []
    for tap in taps:
        write(make_images(), file, Export((tap,)), tmp_path / f"{tap[0]}.safetensors")
        part = features_of(tmp_path / f"{tap[0]}.safetensors")[0]
        parts.append(part / np.linalg.norm(part, axis=1, keepdims=True))
    np.testing.assert_allclose(features_of(tmp_path / "sum.safetensors")[0], parts[0] + parts[1], atol=1e-3)
    with pytest.raises(BadInput, match="layers of 64, 4 numbers cannot be added together"):
        write(make_images(), file, Export(taps, flat=True, together=True), tmp_path / "no.safetensors")


def test_unknown_layers_are_refused(file, tmp_path):
    with pytest.raises(BadInput, match="no layer 21 to tap; it has 1, 2, 3, 4"):
        write(make_images(), file, Export(((21, "rectified"),)), tmp_path / "f.safetensors")
    with pytest.raises(BadInput, match="no features before its ReLU"):
        write(make_images(), file, Export(((4, "raw"),)), tmp_path / "f.safetensors")


def test_the_command(file, tmp_path, capsys):
    from PIL import Image

    images, photos = make_images(classes=(2, 0, 0), each=3), tmp_path / "photos"
    for row, label in enumerate(images.labels):
        (photos / images.class_names[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.pixels[row]).save(photos / images.class_names[label] / f"{row}.png")
    (photos / "class0" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    save_backbone(tmp_path / "network.safetensors", file.trained, CONV4, {"image_side": 18})
    out = tmp_path / "features.safetensors"
    arguments = ["embed", str(tmp_path / "network.safetensors"), "--images", str(photos), "--out", str(out)]
    main([*arguments, "--json"])
    output = capsys.readouterr()
    made = json.loads(output.out)
    assert made["rows"] == 6
    assert list(made["unreadable"]) == ["class0/torn.png"]
    assert "left out class0/torn.png" in output.err
    features, metaset = features_of(out)
    np.testing.assert_array_equal(features[metaset.rows], embed_slab(file, images.pixels, jax.random.key(0), TAP)[0])
    with pytest.raises(SystemExit):
        main(arguments)
    assert "exists; replace it with --overwrite" in capsys.readouterr().err
    main([*arguments, "--layer", "3", "4", "--views", "multi"])
    assert (tmp_path / "features-3.safetensors").is_file()
    assert (tmp_path / "features-4.safetensors").is_file()


def test_a_network_that_does_not_say_what_it_was_trained_on(file, tmp_path, capsys):
    save_backbone(tmp_path / "network.safetensors", file.trained, CONV4, {})
    with pytest.raises(SystemExit):
        main(["embed", str(tmp_path / "network.safetensors")])
    assert "--images is needed" in capsys.readouterr().err
