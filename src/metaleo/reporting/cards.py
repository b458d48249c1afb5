"""Cards: readable summaries of what a file is and how it was made, from its header."""

import math
from pathlib import Path
from typing import Any

import safetensors

from metaleo._io.files import read_header
from metaleo.checkpoints import model_paths, read_model_header, read_task_header
from metaleo.data.feature_files import BUILTIN, load_data, read_table
from metaleo.data.tables import is_table
from metaleo.errors import BadInput
from metaleo.features.backbone_files import read_network_header

Card = dict[str, Any]


def describe_files(place: Path) -> list[Card]:
    """One card for each file that `place` stands for; short entries come first, the full header last."""
    if place.suffix == ".npz" or is_table(place) or (str(place) in BUILTIN and not place.exists()):
        return [describe_features(place)]
    paths = model_paths(place) if place.is_dir() or not place.exists() else [place]
    return [describe_file(path) for path in paths]


def describe_file(path: Path) -> Card:
    if not is_ours(path):
        return describe_features(path)
    header = read_header(path)
    kinds = {
        "model": (read_model_header, describe_model),
        "task": (read_task_header, describe_task),
        "network": (read_network_header, describe_network),
    }
    kind, found = header.get("kind", "unknown"), {}
    if kind in kinds:
        check, describe = kinds[kind]
        found = describe(check(path)[0])
    versions = ", ".join(f"{name} {version}" for name, version in header.get("versions", {}).items())
    return {
        "file": path.name,
        "kind": kind,
        **{name: value for name, value in found.items() if value is not None},
        "numbers": f"{count_numbers(path):,}",
        "made with": versions,
        "header": header,
    }


def is_ours(path: Path) -> bool:
    """Whether the file has a Metaleo header, unlike a plain feature file. True if damaged: its reader reports that."""
    try:
        with safetensors.safe_open(path, framework="np") as archive:
            return "features" not in archive.keys()  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return True


def count_numbers(path: Path) -> int:
    with safetensors.safe_open(path, framework="np") as archive:
        return sum(math.prod(archive.get_slice(name).get_shape()) for name in archive.keys())  # noqa: SIM118


def describe_features(place: Path) -> Card:
    if is_table(place):
        table = read_table(place)
        classes = len(set(table.labelled().labels or ()))
        rows, dim = table.vectors.shape
        return {"file": place.name, "kind": "table", "holds": f"{rows:,} rows of {dim} numbers, {classes} classes"}
    try:
        holds = load_data(str(place) if str(place) in BUILTIN else place).describe()
    except BadInput:
        rows, dim = read_table(place).vectors.shape
        holds = f"{rows:,} rows of {dim} numbers"
    return {"file": place.name, "kind": "features", "holds": holds}


def describe_model(header: Card) -> Card:
    config, structure = header.get("config", {}), header.get("structure", {})
    functions = structure.get("noise") is not None
    validation_scores = {name: header[name] for name in ("validation_accuracy", "validation_loss") if name in header}
    shown = {name.replace("_", " "): f"{100 * value:.2f} %" if "accuracy" in name else f"{value:.3f}"
             for name, value in validation_scores.items()}  # fmt: skip
    temperatures = ", ".join(f"{value:.2f} at {shot}" for shot, value in header.get("temperatures") or [])
    network = header.get("network")
    trained_on = Path(str(config.get("data", "?"))).name
    classes = len(header.get("classes", ()))
    ways, shots = ("..".join(map(str, config.get(f"{name}s") or [config.get(name)])) for name in ("way", "shot"))
    return {
        "learner": structure.get("learner"),
        "takes": f"{structure.get('dim')} numbers per example"
        + (f", made of images by the network `{network}`" if network else ""),
        "trained on": trained_on + (f", {classes} classes" if classes else ""),
        "tasks": f"{shots}-shot" if functions else f"{ways}-way {shots}-shot",
        "best step": f"{header.get('step', 0):,} of {config.get('steps', 0):,}, seed {header.get('seed')}",
        **shown,
        "temperature": f"{temperatures} shots" if temperatures else None,
        **header.get("card", {}),
    }


def describe_task(header: Card) -> Card:
    about, classes = header["about"], header["classes"]
    counts = ", ".join(f"{name} ({count})" for name, count in zip(classes, about["examples"], strict=True))
    return {
        "classes": counts,
        "takes": f"{header['structure']['dim']} numbers per example",
        "adapted from": about.get("model"),
        "learner": about.get("learner"),
        "temperature": f"{header['temperature']:.2f}",
    }


def describe_network(header: Card) -> Card:
    architecture, config = header.get("architecture", {}), header.get("config", {})
    return {
        "network": architecture.get("kind"),
        "takes": f"images of {architecture.get('side')} x {architecture.get('side')} pixels, "
        f"{architecture.get('channels')} channels",
        "trained on": f"{Path(str(config.get('images', '?'))).name}, {len(header.get('classes', ()))} classes",
        "layer": architecture.get("layer"),
        **header.get("card", {}),
    }
