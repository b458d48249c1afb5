"""Make the embedded intents from CLINC150: `python tools/make_intents_sample.py FOLDER [--out FILE]`.

FOLDER holds data_full.json and domains.json (the folder `data` of github.com/clinc/oos-eval). Needs `pip install
wordllama`, whose wheel carries the model: a sentence becomes the mean of its tokens' 256 learned numbers, at length
one. 50 sentences of each intent, drawn with seed 0 from all of its 150; each of the 256 numbers stored in 8 bits, in
units of 1/127 of its largest size in the sample.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import wordllama

from metaleo.data import MetaSet, save_data

SENTENCES = 50
SPLITS = {"travel": "val", "work": "val", "banking": "test", "credit_cards": "test"}
"""Every other domain is for training. The two about money are near each other, so they are on one side."""
TARGET = Path(__file__).parent.parent / "src/metaleo/assets/data/intents.safetensors"


def read(folder: Path) -> dict[str, list[str]]:
    """The sentences of each domain/intent; those outside every intent (`oos`) are left out."""
    domains = json.loads((folder / "domains.json").read_text(encoding="utf-8"))
    parts = json.loads((folder / "data_full.json").read_text(encoding="utf-8"))
    names = {intent: f"{domain}/{intent}" for domain, intents in domains.items() for intent in intents}
    sentences: dict[str, list[str]] = {name: [] for name in sorted(names.values())}
    for part in ("train", "val", "test"):
        for sentence, intent in parts[part]:
            sentences[names[intent]].append(sentence)
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=TARGET, help="write elsewhere than into the package")
    given = parser.parse_args()
    random = np.random.default_rng(0)
    drawn = {
        name: [own[i] for i in np.sort(random.choice(len(own), SENTENCES, replace=False))]
        for name, own in read(given.folder).items()
    }
    inside = Path(wordllama.__file__).parent  # weights and tokenizer come with the package
    model = wordllama.WordLlama.load(cache_dir=inside, disable_download=True)
    features = np.asarray(model.embed([sentence for own in drawn.values() for sentence in own], norm=True))
    scale = np.abs(features).max(0) / 127
    quantised = np.round(features / scale).astype(np.int8).reshape(len(drawn), SENTENCES, -1)
    splits = tuple(SPLITS.get(name.split("/")[0], "train") for name in drawn)
    save_data(MetaSet.from_classes(quantised, tuple(drawn), splits, scale), given.out)
    error = np.abs(quantised.reshape(features.shape) * scale - features).max()
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB, largest error {error:.4f}")


if __name__ == "__main__":
    main()
