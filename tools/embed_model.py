"""Put a trained model into the package, with a card: `python tools/embed_model.py NAME MODEL [--network NAME]`.

The card says what one should know before using the model; `metaleo info NAME` shows it. `--out FILE` writes elsewhere.
"""

import argparse
from pathlib import Path

import metaleo
from metaleo.checkpoints import load_model, save_model

CARDS = {
    "miniimagenet": {
        "for": "2 to 20 classes with 1 to 20 examples each, as WRN-28-10 features like those in the package",
        "data": "features of the 64 training classes of miniImageNet, 100 images each, computed for this project",
        "limits": "classes of photographs; features of another network need a model of their own",
    },
    "miniimagenet-leo": {
        "for": "5-way, 1- to 10-shot tasks on WRN-28-10 features like those in the package; LEO as in the paper",
        "data": "features of the 64 training classes of miniImageNet, 100 images each, computed for this project",
        "limits": "less accurate than `miniimagenet`; it is here to look inside LEO",
    },
    "omniglot": {
        "for": "drawn symbols, 2 to 10 of them, from one or a few examples of each",
        "data": "Omniglot's background alphabets (Lake et al. 2015, MIT licence), framed as `rasterise` does",
        "limits": "pen strokes on white, one symbol in a drawing",
    },
    "intents": {
        "for": "what a sentence asks for, from a few sentences of each kind; 256 numbers of WordLlama's embedding",
        "data": "CLINC150 (Larson et al. 2019, CC BY 3.0), the intents of its training domains",
        "limits": "short English requests; embeddings of another kind need a model of their own",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CARDS)
    parser.add_argument("model", type=Path)
    parser.add_argument("--network")
    parser.add_argument("--views")
    parser.add_argument("--out", type=Path, help="write elsewhere than into the package")
    given = parser.parse_args()
    model = load_model(given.model)
    config = {**model.header["config"], "data": Path(model.header["config"]["data"]).name}  # no one else's folders
    extras = {name: value for name in ("network", "views") if (value := getattr(given, name)) is not None}
    header = {**model.header, "config": config, "card": CARDS[given.name], **extras}
    target = given.out or Path(metaleo.__file__).parent / "assets" / "models" / f"{given.name}.safetensors"
    save_model(target, model.learner, model.structure, header)
    target.chmod(0o644)
    print(f"{target.name}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
