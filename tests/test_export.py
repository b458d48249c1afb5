"""An exported file computes what JAX does, from raw rows to calibrated probabilities, and nothing else is written."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest

import metaleo.export
from helpers.marks import by_default
from helpers.small import DIM, adapt, logits, make_batch, message, shake
from metaleo.checkpoints import load_model, save_model
from metaleo.cli import main
from metaleo.config.schema import TrainConfig
from metaleo.export import build, export_onnx
from metaleo.learners.registry import Structure

GUIDE = Path(__file__).parent.parent / "docs/guides/export.md"


def save(folder, temperatures=None, **changes):
    """A model file whose weights matter."""
    sizes = {"latent": 4, "latent_steps": 2, "finetune_steps": 2, "latent_step_size": 0.5, "finetune_step_size": 0.3}
    structure = Structure(**{"dim": DIM, "way": 3, **sizes, **changes})
    learner = shake(structure.init(jax.random.key(0)))
    config = TrainConfig(data="somewhere/features.npz", way=3, shot=2, structure=structure)
    header = {"config": config.to_json(), "seed": 4, "validation_accuracy": 0.5, "temperatures": temperatures}
    save_model(folder / "model.safetensors", learner, structure, header)
    return learner, folder / "model.safetensors"


def run(path, support, query):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rows = {"support": np.asarray(support, np.float32), "query": np.asarray(query, np.float32)}
    return session.run(["probabilities"], rows)[0]


def softmax(values):
    powers = np.exp(values - values.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


CASES = {
    "leo": {},
    "leo-deterministic": {"learner": "leo-deterministic"},
    "leo-generator": {"learner": "leo-generator"},
    "leo-anchored": {"learner": "leo-anchored", "anchor": "centroid"},
    "leo of mlps": {"network": "mlp", "hidden": 4, "layers": 2, "from_start": True, "max_grad_norm": 10.0},
    "leo of one mlp": {"network": "mlp", "hidden": 4, "layers": 2, "codes": "task", "max_grad_norm": 10.0},
    "meta-sgd": {"learner": "meta-sgd"},
    "prototypical": {"learner": "prototypical"},
    "matching": {"learner": "matching"},
    "relation": {"learner": "relation"},
    "feat": {"learner": "feat"},
}


@pytest.mark.parametrize("case", by_default(["leo"], CASES))
def test_file_agrees_with_the_learner(tmp_path, case):
    """Raw rows of any length, any number of queries."""
    learner, path = save(tmp_path, **CASES[case])
    made = export_onnx(path, tmp_path / "leo.onnx")
    assert made["largest_difference"] < 1e-5
    support, prepare = make_batch(1, (2, 2, 2)), load_model(path).prepare
    head = adapt(learner, dataclasses.replace(support, inputs=prepare(7 * support.inputs))).head
    for counts in ((1, 0, 0), (2, 5, 4)):
        query = make_batch(2, counts).inputs
        found = run(tmp_path / "leo.onnx", 7 * support.inputs, 0.1 * query)
        assert found.shape == (sum(counts), 3)
        np.testing.assert_allclose(found, softmax(np.asarray(logits(head, prepare(0.1 * query)))), atol=1e-5)


@pytest.mark.slow
def test_rows_that_are_no_features_stay_as_they_are(tmp_path):
    """A recurrent network reads raw rows; its loops run in both directions, and start anew for each query."""
    gru = {"network": "gru", "hidden": 2, "channels": 4, "latent_steps": 1, "finetune_steps": 1, "from_start": True}
    learner, path = save(tmp_path, **gru)
    export_onnx(path, tmp_path / "leo.onnx", shot=1)
    support, query = make_batch(1, (1, 1, 1)), make_batch(2, (2, 2, 1))
    found = run(tmp_path / "leo.onnx", support.inputs, 3 * query.inputs)
    expected = softmax(np.asarray(logits(adapt(learner, support).head, 3 * query.inputs)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_another_way_and_shot_at_its_temperature(tmp_path):
    learner, path = save(tmp_path, temperatures=[[1, 0.5], [2, 3.0]])
    assert export_onnx(path, tmp_path / "two.onnx")["temperature"] == pytest.approx(3.0)
    made = export_onnx(path, tmp_path / "one.onnx", way=4, shot=1)
    assert made["temperature"] == pytest.approx(0.5)
    support, query = make_batch(1, (1, 1, 1, 1)), make_batch(2, (2, 2, 2, 2))
    expected = softmax(np.asarray(logits(adapt(learner, support).head, query.inputs)) / 0.5)
    np.testing.assert_allclose(run(tmp_path / "one.onnx", support.inputs, query.inputs), expected, atol=1e-5)


def test_operations_one_by_one(tmp_path):
    """Those that learners use in few of their forms."""

    def predict(support, query):  # (6, 8) and (queries, 8)
        pairs = support.reshape(3, 2, 8)
        batched = jnp.einsum("nij,nkj->ink", pairs, 2 * pairs)  # (2, 3, 2)
        first, second = jnp.split(batched.reshape(6, 2), [1], axis=1)
        repeated = jnp.broadcast_to(first[:, None], (6, 3, 1)).sum(1) + second[1::2].sum()  # thrice, not once
        beside = jnp.concatenate([jnp.broadcast_to(first[:1], (6, 1)), second], axis=1)  # (6, 2)
        turned = pairs.transpose(1, 2, 0).reshape(-1)[:6] - pairs.transpose(2, 0, 1).reshape(-1)[:6]

        def step(total, now):
            row, weight = now
            total = total * weight + row
            return total, total

        weights = jnp.arange(6, dtype=jnp.float32) / 6
        last, totals = jax.lax.scan(step, jnp.zeros(8), (support, weights), reverse=True)
        each = jnp.ones_like(query).sum(0) / jnp.maximum(jnp.abs(last), 1) + jnp.log1p(totals**2).min(0)
        finite = jnp.where(jnp.isfinite(query / query.max(1, keepdims=True)), query, 0) @ totals.T
        return finite + turned + repeated[:, 0] + beside.sum(1) + each.sum() + (query @ each)[:, None] * jnp.ones(6)

    random = np.random.default_rng(0)
    support, query = (random.normal(size=(count, 8)).astype(np.float32) for count in (6, 5))
    with jax.numpy_rank_promotion("allow"):
        model = build(predict, 6, Structure(dim=8), {})
        expected = predict(jnp.asarray(support), jnp.asarray(query))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "some.onnx")
    np.testing.assert_allclose(run(tmp_path / "some.onnx", support, query), expected, rtol=1e-4, atol=1e-4)


def test_what_the_file_says(tmp_path):
    _, path = save(tmp_path)
    export_onnx(path, tmp_path / "leo.onnx")
    model = onnx.load(tmp_path / "leo.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [(one.domain, one.version) for one in model.opset_import] == [("", 18)]
    facts = {one.key: one.value for one in model.metadata_props}
    assert facts["learner"] == "leo"
    assert [int(facts[name]) for name in ("way", "shot", "dim", "seed")] == [3, 2, DIM, 4]
    assert float(facts["temperature"]) == 1
    assert facts["trained_on"] == "features.npz"  # and not where that was
    assert len(facts["model_sha256"]) == 64
    assert {"metaleo", "jax", "trained_for", "validation_accuracy"} <= facts.keys()
    inputs = {one.name: [size.dim_value or size.dim_param for size in one.type.tensor_type.shape.dim]
              for one in (*model.graph.input, *model.graph.output)}  # fmt: skip
    assert inputs == {"support": [6, DIM], "query": ["queries", DIM], "probabilities": ["queries", 3]}
    read = {name for node in model.graph.node for name in node.input}
    made = {name for node in model.graph.node for name in node.output} | {one.name for one in model.graph.initializer}
    assert made - read == {"probabilities"}  # nothing is computed or kept for nobody


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run")
    main(["export", "run", "--shot", "3", "--out", "leo.onnx", "--json"])
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert (made["way"], made["shot"], made["bytes"]) == (3, 3, Path("leo.onnx").stat().st_size)
    main(["export", "run", "--shot", "3", "--out", "leo.onnx", "--overwrite"])
    said = capsys.readouterr()
    assert "largest difference" in said.out
    assert "3-way 3-shot" in said.out
    for arguments, why in (
        (["run", "--out", "leo.onnx"], "--overwrite"),
        (["run", "--out", "leo.bin"], "end in .onnx"),
        (["sines-and-lines", "--out", "sines.onnx"], "real targets"),
        (["run", "--way", "1", "--out", "one.onnx"], "at least 2 classes"),
        (["nowhere", "--out", "none.onnx"], "does not exist"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["export", *arguments])
        said = capsys.readouterr().err.strip()
        assert why in said
        assert len(said.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["leo.onnx", "run"]


def test_refused_learners(tmp_path):
    out = tmp_path / "leo.onnx"
    _, path = save(tmp_path, learner="leo-anchored")
    assert "with `anchor=centroid` can" in message(lambda: export_onnx(path, out))
    _, path = save(tmp_path, learner="ridge")
    assert "ridge cannot be exported" in message(lambda: export_onnx(path, out))
    _, path = save(tmp_path, network="mlp", codes="task")
    assert "way=4 is not possible" in message(lambda: export_onnx(path, out, way=4))
    assert not out.exists()


@pytest.mark.parametrize(("name", "wrong"), [("mul", "Add"), ("exp", "Log")])
def test_a_wrong_graph_is_not_left_in_place(tmp_path, monkeypatch, name, wrong):
    """Numbers that differ, and those that are none."""
    _, path = save(tmp_path, learner="prototypical")
    out = tmp_path / "leo.onnx"
    out.write_bytes(b"an older file")
    monkeypatch.setitem(metaleo.export.ALIKE, name, wrong)
    assert "differ from JAX's" in message(lambda: export_onnx(path, out))
    assert out.read_bytes() == b"an older file"
    assert {path.name for path in tmp_path.iterdir()} == {"leo.onnx", "model.safetensors"}


def test_without_the_runtime(tmp_path, monkeypatch, capsys):
    _, path = save(tmp_path, learner="prototypical")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    main(["export", str(path), "--out", str(tmp_path / "leo.onnx")])
    assert "not compared with JAX" in capsys.readouterr().out


def test_the_guide_runs(tmp_path, monkeypatch, capsys):
    _, path = save(tmp_path)
    export_onnx(path, tmp_path / "leo.onnx")
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(block, str(GUIDE), "exec"), names)
    np.testing.assert_allclose(names["probabilities"].sum(1), 1, rtol=1e-5)
    assert capsys.readouterr().out.startswith("[")
