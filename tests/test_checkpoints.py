"""Model files: what goes in comes out, and nothing else is believed."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from helpers.small import DIM, close, make_learner, message
from metaleo._io.files import load_tree, read_header, save_tree
from metaleo.checkpoints import load_model, save_model
from metaleo.errors import BadInput
from metaleo.learners.registry import Structure

STRUCTURE = Structure(dim=DIM, latent=4)


@pytest.mark.parametrize("learner", ["leo", "maml", "fomaml", "meta-sgd", "nearest-centroid"])
def test_round_trip(tmp_path, learner):
    structure = Structure(learner=learner, dim=DIM, latent=4, way=3)
    trained = jax.tree.map(lambda leaf: leaf + 1, structure.init(jax.random.key(0)))
    save_model(tmp_path / "m.safetensors", trained, structure, {"seed": 7})
    model = load_model(tmp_path / "m.safetensors")
    assert model.structure == structure
    assert model.header["seed"] == 7
    assert set(model.header["versions"]) == {"metaleo", "jax"}
    assert jax.tree.structure(model.learner) == jax.tree.structure(trained)
    close(model.learner, trained, 0)


def test_leaves_have_telling_names(tmp_path):
    save_tree(tmp_path / "t.safetensors", make_learner(), {})
    names = set(safetensors.numpy.load_file(tmp_path / "t.safetensors"))
    assert {"encoder.weight", "relation.first", "decoder.to_mean", "latent_step_size"} <= names


def test_refuses_what_does_not_fit(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(path, STRUCTURE.init(jax.random.key(0)), STRUCTURE, {})
    with pytest.raises(BadInput, match=r"encoder.weight should be \[9, 4\], the file has \[8, 4\]"):
        load_tree(path, Structure(dim=9, latent=4).blank())
    with pytest.raises(BadInput, match=r"start should be \[5, 8\], the file has nothing"):
        load_tree(path, Structure(learner="maml", dim=DIM).blank())


def test_refuses_foreign_and_damaged_files(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(BadInput, match="does not exist"):
        load_model(path)
    save_model(path, STRUCTURE.init(jax.random.key(0)), STRUCTURE, {})
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(BadInput, match="truncated"):
            load_model(path)
    safetensors.numpy.save_file({"a": np.zeros(2)}, path)
    with pytest.raises(BadInput, match="not a file of Metaleo"):
        load_model(path)
    save_tree(path, make_learner(), {"kind": "state"})
    with pytest.raises(BadInput, match="not a model file"):
        load_model(path)
    safetensors.numpy.save_file({"a": np.zeros(2)}, path, {"metaleo": json.dumps({"format": 99})})
    with pytest.raises(BadInput, match="format 99"):
        read_header(path)


def with_header(path, change):
    """A model file with another header."""
    save_model(path, STRUCTURE.init(jax.random.key(0)), STRUCTURE, {"temperatures": [[1, 0.5]], "classes": ["a"]})
    with safetensors.safe_open(path, "np") as archive:
        header = json.loads(archive.metadata()["metaleo"])
    header = change(header) if callable(change) else header | change
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, {"metaleo": json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda header: "5", "is a damaged file (its header is not an object)"),
        (lambda header: [header], "its header is not an object"),
        ({"format": [1]}, "has format [1]"),
        ({"kind": ["model"]}, "kind should be a text"),
        ({"structure": "x"}, "is a damaged model file (structure should be an object, not 'x')"),
        ({"structure": None}, "structure should be an object"),
        ({"structure": {"dims": 8}}, "structure.dims is unknown"),
        ({"structure": {"dim": "8"}}, "structure.dim should be a whole number, not '8'"),
        (
            {"structure": {"dim": DIM, "latent": 4, "finetune_steps": 2**32}},
            "finetune_steps=4294967296 must be",
        ),
        ({"structure": {"dim": -1}}, "dim=-1 must be at least 1"),
        ({"structure": {"dim": DIM, "tail": [1, 2]}}, "structure.tail should be a list"),
        ({"structure": {"dim": DIM, "tail": [4, 4, 2, 3]}}, "rows of 8 numbers are no images of 4 x 4 x 2"),
        ({"structure": {"dim": 10**6, "network": "mlp", "hidden": 10**4}}, "too large to generate"),
        ({"structure": {"learner": "lion"}}, "unknown learner 'lion'"),
        ({"classes": [["a"]]}, "classes.0 should be"),
        ({"classes": 5}, "classes should be a list"),
        ({"temperatures": [[1, "hot"]]}, "temperatures.0.1 should be a finite number"),
        ({"temperatures": [[1, 0]]}, "temperatures=0"),
        ({"temperatures": [5]}, "temperatures.0 should be a list"),
        ({"config": {"structure": {}, "hyper": {}, "way": "5"}}, "way should be a whole number"),
        ({"seed": [1]}, "seed should be a whole number"),
        ({"card": ["x"]}, "card should be an object"),
    ],
)
def test_damaged_headers(tmp_path, change, expected):
    with_header(tmp_path / "m.safetensors", change)
    text = message(lambda: load_model(tmp_path / "m.safetensors"))
    assert expected in text
    assert str(tmp_path) in text


def test_other_kinds_of_numbers(tmp_path):
    path = tmp_path / "m.safetensors"
    save_model(path, STRUCTURE.init(jax.random.key(0)), STRUCTURE, {})
    arrays = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "np") as archive:
        header = archive.metadata()
    for kind in (np.int32, np.float16):
        safetensors.numpy.save_file({**arrays, "encoder.weight": arrays["encoder.weight"].astype(kind)}, path, header)
        assert "encoder.weight should be float32" in message(lambda: load_model(path))
