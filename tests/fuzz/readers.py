"""Every reader of files and bodies, small files that it accepts, and the ways to damage them.

A reader also uses what it has read, since a wrong header may only show then. It returns, or raises `BadInput`.
"""

import dataclasses
import functools
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fuzz import mutations as m
from metaleo._io.files import save_tree
from metaleo.checkpoints import load_candidates, load_model, save_model
from metaleo.config.schema import TrainConfig
from metaleo.data.feature_files import load_data, read_table, save_data
from metaleo.data.metaset import MetaSet
from metaleo.data.safe_unpickling import read_file
from metaleo.errors import BadInput
from metaleo.estimators.classifier import adapt, load_task
from metaleo.estimators.examples import embed_pictures, reading_side
from metaleo.estimators.regressor import LEORegressor
from metaleo.features.backbone_files import blank, load_backbone, save_backbone
from metaleo.features.datasets import cifar_pickle, from_caches, read_cache
from metaleo.features.images import PackedImages, pack, read_packed
from metaleo.features.recipes import Architecture, PretrainConfig, Recipe
from metaleo.learners.registry import Structure
from metaleo.reporting.cards import describe_files
from metaleo.search.random_search import Search, SearchConfig, TrialBatch
from metaleo.search.study import Claim
from metaleo.serve.uploads import read_upload
from metaleo.training.run import TrainingRun

DIM = 8
BYTES: tuple[m.Mutation, ...] = (m.flip, m.truncate, m.splice)
SAFETENSORS = (*BYTES, m.safetensors_layout, m.safetensors_metadata, m.safetensors_metadata, m.safetensors_numbers)
SMALL = {"dim": DIM, "way": 3, "latent": 4, "latent_steps": 1, "finetune_steps": 1}


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader, whole files for it by name, and mutations; those that are listed twice are tried twice as often."""

    read: Callable[[Path], Any]
    seeds: dict[str, bytes]
    mutations: tuple[m.Mutation, ...]


def rows(count: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


# What is done with what was read


def use_features(path: Path) -> None:
    metaset = load_data(path)
    metaset.describe()
    metaset.subset("test").checksum()
    describe_files(path)


def use_table(path: Path) -> None:
    table = read_table(path)
    table.labelled()
    describe_files(path)
    use_features(path)


def use_upload(path: Path) -> None:
    read_upload(path.read_bytes(), path.name, 2**24)


def use_model(path: Path) -> None:
    model = load_model(path)
    describe_files(path)
    load_candidates([path])
    assert model.temperature(3) > 0
    if model.structure.noise is not None:
        x = np.linspace(0, 1, 6 * model.structure.dim).reshape(6, -1)
        LEORegressor(path, n_functions=2).fit(x, x[:, 0]).predict(x)
    elif model.structure.dim <= 64:
        inputs = np.ones((2 * model.structure.way, model.structure.dim), np.float32)
        labels = np.arange(len(inputs)) % model.structure.way
        adapt(model, inputs, labels).probabilities(inputs)


def use_task(path: Path) -> None:
    task = load_task(path)
    describe_files(path)
    found = task.probabilities(np.ones((2, task.structure.dim), np.float32))
    assert np.isfinite(found).all()


def use_network(path: Path) -> None:
    file = load_backbone(path)
    describe_files(path)
    side = reading_side(file)
    if side <= 64:
        pixels = np.zeros((2, side, side, file.architecture.channels), np.uint8)
        pixels[:, 4:9, 4:9] = 255
        embed_pictures(pixels, file, "centre")


@functools.cache
def some_run() -> TrainingRun:
    structure = Structure(dim=1, latent=2, latent_steps=1, finetune_steps=0, network="mlp", hidden=2, layers=2,
                          codes="task", noise=0.3)  # fmt: skip
    return TrainingRun(TrainConfig(data="sines-and-lines", shot=2, query=2, structure=structure), Path("unused"))


def use_state(path: Path) -> None:
    run = some_run()
    run.folder = path.parent
    run.load()


@functools.cache
def some_search() -> Search:
    metaset = MetaSet.from_classes(
        np.random.default_rng(0).normal(size=(8, 4, DIM)).astype(np.float32), tuple("abcdefgh"),
        ("train",) * 4 + ("val",) * 4,
    )  # fmt: skip
    structure = Structure("meta-sgd", DIM, 3, finetune_steps=1)
    train = TrainConfig("unused", way=3, query=2, steps=8, validate_every=2, structure=structure)
    return Search(SearchConfig(train, trials=4, halvings=2, batch=4), Path("unused"), metaset, 4)


def some_batch() -> TrialBatch:
    search = some_search()
    draws = [dict.fromkeys(search.space, 0.1 * (slot + 1)) for slot in range(4)]
    claims = [Claim(slot + 1, slot, draw) for slot, draw in enumerate(draws)]
    return TrialBatch(claims, [0, 2, 3], 1, search.start([claims[place] for place in (0, 2, 3)]))


def use_population(path: Path) -> None:
    search = some_search()
    search.path = path
    search.load()


def use_config(path: Path) -> None:
    TrainConfig.read(path).check()


def use_packed(path: Path) -> None:
    images = read_packed(path)
    images.describe()
    images.read(slice(0, 4))
    images.subset("train")


def use_cache(path: Path) -> None:
    images = from_caches([read_cache(path, "train")], 8, 3)
    images.describe()
    images.read(slice(0, 4))


@functools.cache
def client() -> Any:
    from fastapi.testclient import TestClient

    from helpers.serving import HOSTS, QUICK, tiny
    from metaleo.serve.server import make_app

    return TestClient(make_app({"tiny": tiny()}, QUICK, HOSTS), base_url="http://localhost")


def use_body(path: Path, address: str = "/api/adapt") -> None:
    answer = client().post(address, content=path.read_bytes(), headers={"content-type": "application/json"})
    if answer.status_code >= 500:
        raise RuntimeError(f"{address} answers {answer.status_code}: {answer.text[:200]}")
    if answer.status_code >= 400:
        raise BadInput(answer.json()["detail"])


def use_file_body(path: Path) -> None:
    use_body(path, f"/api/adapt-file?model=tiny&name={path.name}")


# Whole files


def written(write: Callable[[Path], Any], folder: Path, suffix: str) -> bytes:
    path = folder / f"seed{suffix}"
    write(path)
    content = path.read_bytes()
    path.unlink()
    return content


def feature_seeds(folder: Path) -> Iterator[tuple[str, bytes]]:
    names, splits = ("ant", "bee", "cat"), ("train", "val", "test")
    even = MetaSet.from_classes(rows().reshape(3, 4, DIM), names, splits)
    codes = MetaSet.from_classes(np.arange(96, dtype=np.int8).reshape(3, 4, DIM), names, splits, np.ones(8, np.float32))
    odd = MetaSet.from_labels(rows(), np.repeat(names, (2, 4, 6)), np.repeat(splits, (2, 4, 6)))
    for name, metaset in {"even": even, "odd": odd, "codes": codes}.items():
        for suffix in (".npz", ".safetensors"):
            yield f"{name}{suffix}", written(lambda path, metaset=metaset: save_data(metaset, path), folder, suffix)
    out = io.BytesIO()
    np.savez_compressed(out, features=rows(), labels=np.repeat(names, 4))
    yield "packed.npz", out.getvalue()


def table_seeds() -> Iterator[tuple[str, bytes]]:
    import pyarrow as pa
    import pyarrow.parquet

    names = [f"x{place}" for place in range(DIM)]
    labels = ["ant", "bee", "cat"] * 4
    lines = [",".join([*map(str, row.tolist()), label]) for row, label in zip(rows(), labels, strict=True)]
    yield "table.csv", "\n".join([",".join([*names, "label"]), *lines]).encode()
    wide = {name: rows()[:, place] for place, name in enumerate(names)}
    for name, columns in {"wide": wide, "lists": {"vector": list(rows())}}.items():
        out = io.BytesIO()
        pyarrow.parquet.write_table(pa.table({**columns, "label": labels}), out)
        yield f"{name}.parquet", out.getvalue()


def model_seeds(folder: Path) -> Iterator[tuple[str, bytes]]:
    structures = {
        "leo": Structure(**SMALL),
        "maml": Structure(learner="maml", **SMALL),
        "prototypical": Structure(learner="prototypical", **SMALL),
        "mlp": Structure(**SMALL, network="mlp", hidden=3, codes="task"),
        "gru": Structure(**SMALL | {"finetune_steps": 0}, network="gru", hidden=3, channels=2, codes="task"),
        "tail": Structure(**SMALL | {"dim": 32}, tail=(4, 4, 2, 3)),
        "functions": Structure(**SMALL | {"dim": 1}, network="mlp", hidden=2, codes="task", noise=0.3, width=2),
    }
    for name, structure in structures.items():
        config = TrainConfig(way=3, structure=structure)
        header = {"config": config.to_json(), "seed": 1, "step": 5, "validation_accuracy": 0.5, "classes": ["a", "b"],
                  "temperatures": [[1, 0.5], [5, 0.7]], "card": {"for": "tests"}, "engine": "auto"}  # fmt: skip
        learner = structure.init(jax.random.key(0))
        write = functools.partial(save_model, learner=learner, structure=structure, header=header)
        yield f"{name}.safetensors", written(write, folder, ".safetensors")


def task_seeds(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name, structure in {
        "leo": Structure(**SMALL),
        "matching": Structure(learner="matching", **SMALL),
        "cl2n": Structure(learner="cl2n", **SMALL),
    }.items():
        path = folder / "model.safetensors"
        save_model(path, structure.init(jax.random.key(0)), structure, {})
        task = adapt(load_model(path), rows(6), ["a", "b", "c"] * 2)
        about = {"model": "mine", "columns": ["x", "y"], "views": "centre", "network": None}
        task = dataclasses.replace(task, about=task.about | about)
        yield f"{name}.safetensors", written(task.save, folder, ".safetensors")


def network_seeds(folder: Path) -> Iterator[tuple[str, bytes]]:
    conv4 = Architecture("conv4", 0, 3, side=16, channels=1, layer=4)
    wide = Architecture("wrn", 10, 1, side=16, layer=7)
    for name, architecture in {"conv4": conv4, "wrn": wide}.items():
        config = PretrainConfig("mine", architecture, Recipe(about="tests"))
        header = {"config": config.to_json(), "classes": ["a", "b"], "record": {"step": 3}, "image_side": 18,
                  "drawings": name == "conv4"}  # fmt: skip
        trained = blank(architecture)
        write = functools.partial(save_backbone, trained=trained, architecture=architecture, header=header)
        yield f"{name}.safetensors", written(write, folder, ".safetensors")


def pickled(value: Any) -> Iterator[tuple[str, bytes]]:
    for protocol in (0, 2, 4, 5):
        yield f"{protocol}.pkl", pickle.dumps(value, protocol)


def packed_seed(folder: Path) -> bytes:
    images = PackedImages(
        labels=np.arange(6, dtype=np.int32) % 2, class_names=("a", "b"), splits=("train", "test"),
        names=[f"{place}.png" for place in range(6)], side=4, channels=3, pixels=np.zeros((6, 4, 4, 3), np.uint8),
    )  # fmt: skip
    return written(lambda path: pack(images, path), folder, ".safetensors")


def make_readers(folder: Path) -> dict[str, Reader]:
    """All readers, by name; `folder` is for writing the seeds."""
    features = dict(feature_seeds(folder))
    npz = {name: content for name, content in features.items() if name.endswith(".npz")}
    tensors = {name: content for name, content in features.items() if name.endswith(".safetensors")}
    tables = dict(table_seeds())
    csv = {name: content for name, content in tables.items() if name.endswith(".csv")}
    parquet = {name: content for name, content in tables.items() if name.endswith(".parquet")}
    embeddings = {"keys": [f"{place}-n{place % 3}-x" for place in range(6)], "embeddings": rows(6), "labels": [0] * 6}
    pixels = np.zeros((4, 8, 8, 3), np.uint8)
    cache = {"image_data": pixels, "class_dict": {"ant": [0, 1], "bee": [2, 3]}}
    cifar = {"data": np.zeros((4, 3072), np.uint8), "fine_labels": [0, 1, 2, 3], "batch_label": "x"}
    state = written(lambda path: save_tree(path, some_run().start(), {"kind": "state"}), folder, ".safetensors")
    engine = some_search().engine
    population = written(lambda path: some_batch().save(path, engine), folder, ".safetensors")
    body = {"model": "tiny", "examples": rows(4).tolist(), "labels": ["a", "b"] * 2}
    pickles = (*BYTES, m.pickle_opcodes, m.pickle_opcodes, m.pickle_values)
    numbers = {"data": pixels, "labels": np.array([0, 0, 1, 1]), "label_specific_str": ["x", "y"]}
    pretraining = json.dumps(PretrainConfig("mine", Architecture(), Recipe()).to_json()).encode()
    training = json.dumps(TrainConfig().to_json()).encode()
    return {
        "npz": Reader(use_table, npz, (*BYTES, m.npz_members, m.npz_members, m.npz_members)),
        "features": Reader(use_table, tensors, SAFETENSORS),
        "csv": Reader(use_table, csv, (*BYTES, m.csv_cells, m.csv_cells)),
        "parquet": Reader(use_table, parquet, (*BYTES, m.parquet_columns, m.parquet_columns)),
        "upload": Reader(use_upload, csv | npz | parquet, (*BYTES, *BYTES)),
        "embeddings": Reader(read_file, dict(pickled(embeddings)), pickles),
        "cache": Reader(use_cache, dict(pickled(cache)) | {f"n{n}": c for n, c in pickled(numbers)}, pickles),
        "cifar": Reader(cifar_pickle, dict(pickled(cifar)), pickles),
        "images": Reader(use_packed, {"packed.safetensors": packed_seed(folder)}, SAFETENSORS),
        "model": Reader(use_model, dict(model_seeds(folder)), SAFETENSORS),
        "task": Reader(use_task, dict(task_seeds(folder)), SAFETENSORS),
        "network": Reader(use_network, dict(network_seeds(folder)), SAFETENSORS),
        "state": Reader(use_state, {"state.safetensors": state}, SAFETENSORS),
        "population": Reader(use_population, {"population.safetensors": population}, SAFETENSORS),
        "config": Reader(use_config, {"config.json": training}, (*BYTES, m.json_text, m.json_text)),
        "pretraining": Reader(PretrainConfig.read, {"config.json": pretraining}, (*BYTES, m.json_text, m.json_text)),
        "body": Reader(use_body, {"body.json": json.dumps(body).encode()}, (*BYTES, m.json_text, m.json_text)),
        "file body": Reader(use_file_body, csv | npz | parquet, (*BYTES, m.flip)),
    }
