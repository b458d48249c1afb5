"""Model files: what goes in comes out, and nothing else is believed."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from helpers.small import DIM, close, make_learner
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
