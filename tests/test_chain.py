"""The whole chain, images → features → LEO → test, on the drawings inside the package."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from metaleo.cli import main
from metaleo.data import load_data
from metaleo.features.datasets import open_images
from metaleo.features.images import Images, pack


def run(words: str) -> None:
    main(words.split())


def few(images: Images, classes: int, drawings: int) -> Images:
    """Of each split some classes, of each class some images."""
    chosen = [np.flatnonzero(np.array(images.splits) == split)[:classes] for split in ("train", "val", "test")]
    kept = np.concatenate(chosen)
    rows = np.concatenate([np.flatnonzero(images.labels == position)[:drawings] for position in kept])
    return dataclasses.replace(
        images,
        labels=np.repeat(np.arange(len(kept), dtype=np.int32), drawings),
        class_names=tuple(images.class_names[position] for position in kept),
        splits=tuple(images.splits[position] for position in kept),
        names=[images.names[row] for row in rows],
        kept=rows,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("loose_dtypes")
def test_in_miniature(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pack(few(open_images("omniglot-sample"), 6, 8), tmp_path / "few.safetensors")
    run(
        "pretrain --images few.safetensors --backbone conv-4 --width 4 --recipe omniglot --batch 8 --steps 4 "
        "--reports 2 --out net"
    )
    run("embed net --out features.safetensors")
    features = load_data("features.safetensors")
    assert (len(features.counts), features.counts.tolist(), features.dim) == (18, [8] * 18, 4)
    run(
        "train --data features.safetensors --preset omniglot-1shot --query 4 --steps 4 --meta-batch 2 "
        "--validate-every 2 --validation-tasks 4 --latent 4 --out leo"
    )
    capsys.readouterr()
    run("evaluate leo --tasks 20 --json")
    assert 0 <= json.loads(capsys.readouterr().out)["models"][0]["accuracy"] <= 1


@pytest.mark.slow
def test_leo_names_characters_of_unseen_alphabets(tmp_path):
    """The four commands as a user types them, but a tenth of the pre-training; without the flags of other tests."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def metaleo(words: str) -> str:
        command = [sys.executable, "-m", "metaleo.cli", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    metaleo("pretrain --images omniglot-sample --backbone conv-4 --recipe omniglot --steps 600 --reports 2 --out net")
    metaleo("embed net --out features.safetensors")
    metaleo("train --data features.safetensors --preset omniglot-1shot --steps 500 --out leo")
    report = json.loads(metaleo("evaluate leo --tasks 1000 --json"))
    assert report["models"][0]["accuracy"] >= 0.85
