"""Read the authors' embedding pickles without running code in them."""

import io
import pickle  # used only through a subclass that admits NumPy arrays; pickle.load is never called
import re
from pathlib import Path
from typing import Any

import numpy as np

from metaleo.data.metaset import SPLITS, MetaSet
from metaleo.errors import BadInput

FILES = {split: f"{split}_embeddings.pkl" for split in SPLITS}


class ArrayUnpickler(pickle.Unpickler):
    """Admits only the names that a pickled NumPy array of numbers or strings refers to.

    Stand-ins replace NumPy's own types, whose `__setstate__` trusts its input.
    """

    def find_class(self, module: str, name: str) -> Any:
        match module.replace("numpy._core", "numpy.core"), name:
            case "numpy.core.multiarray", "_reconstruct":
                return _blank_array
            case "numpy.core.numeric", "_frombuffer":  # protocol 5
                return _filled_array
            case "numpy", "ndarray":
                return None  # only an argument of _reconstruct, never called
            case "numpy", "dtype":
                return PickledDtype
            case "_codecs", "encode":  # how Python 3 writes bytes in protocols 0 to 2
                return _encode_latin1
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no array needs")


class PickledDtype:
    """Stand-in for the dtype of numbers or strings of a given size and byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, *flags: Any):
        if not re.fullmatch(r"[biufSU][0-9]{1,6}", code):
            raise pickle.UnpicklingError(f"it holds an array of Python objects or the like ({code!r})")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: tuple) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class PickledArray:
    __slots__ = ("values",)

    def __setstate__(self, state: tuple) -> None:
        _, shape, kind, fortran, content = state
        content = content.encode("latin1") if isinstance(content, str) else content  # Python 2 wrote a string
        self.values = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if fortran else "C")


def _blank_array(*arguments: Any) -> PickledArray:
    return PickledArray()


def _filled_array(content: bytes | bytearray, kind: PickledDtype, shape: tuple, order: str) -> PickledArray:
    array = PickledArray()
    array.__setstate__((1, shape, kind, order == "F", content))
    return array


def _encode_latin1(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def read_folder(folder: Path) -> MetaSet:
    """Read `<folder>/{train,val,test}_embeddings.pkl`, the layout in which the authors released their embeddings."""
    features, labels, splits = [], [], []
    for split, name in FILES.items():
        if not (folder / name).is_file():
            raise BadInput(f"{folder} has no {name}; a folder of embeddings holds {', '.join(FILES.values())}")
        embeddings, classes = read_file(folder / name)
        features.append(embeddings)
        labels.append(classes)
        splits.append(np.full(len(classes), split))
    if len({part.shape[1] for part in features}) > 1:
        raise BadInput(f"{folder}: the three files have features of different sizes")
    return MetaSet.from_labels(np.concatenate(features), np.concatenate(labels), np.concatenate(splits))


def read_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings [n, dim] and their classes, the middle part of the keys `<number>-<class>-<class>_<image>`."""
    try:
        content = ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="latin1").load()
        embeddings, keys = (
            value.values if isinstance(value, PickledArray) else value
            for value in (content["embeddings"], content["keys"])
        )
        names = [key.decode("latin1") if isinstance(key, bytes) else str(key) for key in keys]
        classes = np.array([name.split("-")[1] for name in names])
        embeddings = np.asarray(embeddings, np.float32)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadInput(f"{path} is not a pickle of embeddings that can be trusted: {error}") from error
    if embeddings.ndim != 2 or len(embeddings) != len(classes):
        raise BadInput(f"{path}: {embeddings.shape} embeddings do not go with {len(classes)} keys")
    return embeddings, classes
