"""Make the embedded pen strokes from Omniglot: `python tools/make_strokes_sample.py SOURCE [SOURCE …] [--out FILE]`.

A SOURCE is one of Omniglot's archives of strokes, or a folder it was unpacked to: strokes_background_small1.zip and
strokes_background_small2.zip made the embedded file. (A drawing that is in both counts once.) Each drawing becomes 32
points at equal distances along the way of the pen, from stroke to stroke too, each (x, y, pen): the drawing's box is
centred at 0 and its longer side goes from -1 to 1, y upwards; pen is the share of the step from the point before on
which the pen was down, 1 at the first point.
"""

import argparse
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from metaleo.data import MetaSet, load_data, save_data

POINTS = 32
DRAWERS = 20
SPLITS = {"Early_Aramaic": "val", "Balinese": "test", "Korean": "test"}
"""Every other alphabet is for training."""
NAME = re.compile(r"(?:.*/)?([^/]+/character\d+)/\d+_(\d+)\.txt")
TARGET = Path(__file__).parent.parent / "src/metaleo/assets/data/strokes.npz"


def texts(source: Path) -> Iterator[tuple[str, str]]:
    """Names and contents of the text files in a folder or an archive."""
    if source.is_dir():
        for path in source.rglob("*_*.txt"):
            if NAME.fullmatch(path.as_posix()):
                yield path.as_posix(), path.read_text()
    else:
        with zipfile.ZipFile(source) as archive:
            for name in archive.namelist():
                if NAME.fullmatch(name):
                    yield name, archive.read(name).decode()


def sequence(text: str) -> np.ndarray:
    """(x, y, pen) of each point of a drawing, from lines `x,y,milliseconds`, with `BREAK` after each stroke."""
    strokes = [
        [[float(number) for number in line.split(",")[:2]] for line in stroke.split()]
        for stroke in text.replace("START", "").split("BREAK")
    ]
    strokes = [stroke for stroke in strokes if stroke]
    path = np.concatenate(strokes)
    steps = np.linalg.norm(np.diff(path, axis=0), axis=1)
    ink = steps.copy()
    ink[np.cumsum([len(stroke) for stroke in strokes])[:-1] - 1] = 0  # from stroke to stroke
    way, ink = np.insert(np.cumsum(steps), 0, 0), np.insert(np.cumsum(ink), 0, 0)
    places = np.linspace(0, way[-1], POINTS)
    points = np.stack([np.interp(places, way, path[:, axis]) for axis in (0, 1)], axis=1)
    low, high = path.min(0), path.max(0)
    points = (points - (low + high) / 2) / ((high - low).max() / 2)
    pen = np.diff(np.interp(places, way, ink)) / places[1]
    return np.column_stack([points, np.insert(pen, 0, 1)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=TARGET, help="write elsewhere than into the package")
    given = parser.parse_args()
    drawings: dict[str, dict[int, np.ndarray]] = {}
    for source in given.sources:
        for path, text in texts(source):
            name, drawer = NAME.fullmatch(path).groups()
            drawings.setdefault(name, {})[int(drawer)] = sequence(text)
    names = sorted(drawings)
    drawers = range(1, DRAWERS + 1)
    rows = np.array([[drawings[name][drawer].ravel() for drawer in drawers] for name in names])
    splits = tuple(SPLITS.get(name.split("/")[0], "train") for name in names)
    save_data(MetaSet.from_classes(rows.astype(np.float16), tuple(names), splits), given.out)
    print(f"{given.out}: {load_data(given.out).describe()}, {given.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
