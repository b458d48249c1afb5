"""Read the authors' embedding pickles without running code in them."""

import io
import pickle  # used only through a subclass that admits NumPy arrays; pickle.load is never called
import pickletools
import re
from pathlib import Path
from typing import Any

import numpy as np

from metaleo.data.metaset import SPLITS, MetaSet
from metaleo.errors import BadInput, one_line

FILES = {split: f"{split}_embeddings.pkl" for split in SPLITS}
DEEPEST = 16
"""Deepest nesting of lists and dictionaries that is read."""
OPCODES = """
    PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
    STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT
    MEMOIZE GLOBAL STACK_GLOBAL REDUCE
"""
"""The opcodes that Python's own code handles; those that make instances, sets or persistent objects are refused."""


class ArrayUnpickler(pickle._Unpickler):
    """Admits only what a pickle of NumPy arrays of numbers or strings, in lists and dictionaries, consists of.

    It is Python's own unpickler in Python: in C, nine bytes take gigabytes for the index of its memo. Stand-ins replace
    NumPy's types, whose `__setstate__` trusts its input; a pickle can call them, but not change them. All that is made
    takes about as much memory as the file.
    """

    stack: list[Any]
    append: Any
    pop_mark: Any
    read: Any

    def __init__(self, file: Any, size: int):
        super().__init__(file, encoding="latin1")
        self.bytes_left = size

    def find_class(self, module: str, name: str) -> Any:
        match module.replace("numpy._core", "numpy.core"), name:
            case "numpy.core.multiarray", "_reconstruct":
                return self.blank_array
            case "numpy.core.numeric", "_frombuffer":  # protocol 5
                return self.filled_array
            case "numpy", "ndarray":
                return None  # only an argument of _reconstruct, never called
            case "numpy", "dtype":
                return PickledDtype
            case "_codecs", "encode":  # how Python 3 writes bytes in protocols 0 to 2
                return self.encode_latin1
        raise pickle.UnpicklingError(f"it refers to {module[:80]}.{name[:80]}, which no array needs")

    def blank_array(self, *arguments: Any) -> "PickledArray":
        return PickledArray()

    def filled_array(self, content: Any, kind: "PickledDtype", shape: tuple, order: str) -> "PickledArray":
        content = self.encode_latin1(content, "") if isinstance(content, str) else content  # as Python 2 wrote it
        array = PickledArray()
        array.values = np.frombuffer(content, kind.dtype).reshape(shape, order="F" if order == "F" else "C")
        return array

    def encode_latin1(self, text: str, encoding: str) -> bytes:
        self.bytes_left -= len(text)  # one text, encoded again and again, could fill the memory
        if self.bytes_left < 0:
            raise pickle.UnpicklingError("it would take more memory than the file is long")
        return text.encode("latin1")

    def load_build(self) -> None:
        state = self.stack.pop()
        match self.stack[-1]:
            case PickledArray() as array:
                _, shape, kind, fortran, content = state
                self.stack[-1] = self.filled_array(content, kind, shape, "F" if fortran else "C")
                array.values = self.stack[-1].values  # the memo may know it already
            case PickledDtype() as kind:
                kind.dtype = kind.dtype.newbyteorder(state[1])
            case _:
                raise pickle.UnpicklingError("it changes what is no array")

    def load_bytearray8(self) -> None:
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    def load_long4(self) -> None:
        raise pickle.UnpicklingError("it holds a number of more than 255 bytes")

    def load_append(self) -> None:
        self.add_items([self.stack.pop()])

    def load_appends(self) -> None:
        self.add_items(self.pop_mark())

    def add_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise pickle.UnpicklingError("it appends to what is no list")
        self.stack[-1].extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def load_setitems(self) -> None:
        self.set_items(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self.set_items(items)

    def set_items(self, items: list[Any]) -> None:
        """Nested tuples as keys could take for ever to hash."""
        if type(self.stack[-1]) is not dict or not all(isinstance(key, str | bytes | int) for key in items[::2]):
            raise pickle.UnpicklingError("a key of a dictionary in it is neither text nor a number")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def refuse(self, code: str) -> None:
        raise pickle.UnpicklingError(f"it has the opcode {code}, which no array needs")

    dispatch: Any = {
        ord(each.code): pickle._Unpickler.dispatch[ord(each.code)]
        if each.name in OPCODES.split()
        else lambda self, name=each.name: self.refuse(name)
        for each in pickletools.opcodes
    } | {
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
        pickle.LONG4[0]: load_long4,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.DICT[0]: load_dict,
    }


class PickledDtype:
    """Stand-in for the dtype of numbers or strings of a given size and byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, *flags: Any):
        if not re.fullmatch(r"[biufSU][0-9]{1,6}", code):
            raise pickle.UnpicklingError(f"it holds an array of Python objects or the like ({code[:40]!r})")
        self.dtype = np.dtype(code)


class PickledArray:
    __slots__ = ("values",)


def plain(value: Any, most: int) -> Any:
    """The value with arrays for their stand-ins and lists for tuples; raises if it has more than `most` parts.

    What a few shared lists contain can be far more than the file is long; so can one array or text that is repeated, of
    which eight bytes count as a part.
    """
    left = most

    def part(value: Any, depth: int) -> Any:
        nonlocal left
        own = value.values.nbytes if isinstance(value, PickledArray) else 0
        own = len(value) if isinstance(value, str | bytes | memoryview) else own
        left -= 1 + own // 8
        if left < 0 or depth > DEEPEST:
            raise pickle.UnpicklingError("its parts are nested too deep, hold each other, or repeat too often")
        match value:
            case PickledArray():
                return value.values
            case dict():
                return {name: part(each, depth + 1) for name, each in value.items()}
            case list() | tuple():
                return [part(each, depth + 1) for each in value]
            case str() | bytes() | memoryview() | int() | float() | None:
                return value
        raise pickle.UnpicklingError(f"it holds a {type(value).__name__} outside of an array")

    return part(value, 0)


def read_folder(folder: Path) -> MetaSet:
    """Read `<folder>/{train,val,test}_embeddings.pkl`, the layout in which the authors released their embeddings."""
    features, labels, splits = [], [], []
    for split, name in FILES.items():
        if not (folder / name).is_file():
            raise BadInput(f"{folder} has no {name}; a folder of embeddings holds {', '.join(FILES.values())}")
        embeddings, classes = read_file(folder / name)
        features.append(embeddings)
        labels.append(classes)
        splits.append(np.full(len(classes), split, object))
    if len({part.shape[1] for part in features}) > 1:
        raise BadInput(f"{folder}: the three files have features of different sizes")
    return MetaSet.from_labels(np.concatenate(features), np.concatenate(labels), np.concatenate(splits))


def read_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings [n, dim] and their classes, the middle part of the keys `<number>-<class>-<class>_<image>`."""
    try:
        whole = path.read_bytes()
        content = plain(ArrayUnpickler(io.BytesIO(whole), len(whole)).load(), len(whole))
        embeddings, keys = np.asarray(content["embeddings"], np.float32), content["keys"]
        names = [key.decode("latin1") if isinstance(key, bytes) else str(key) for key in keys]
        classes = np.array([name.split("-")[1] for name in names], object)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadInput(f"{path} is not a pickle of embeddings that can be trusted: {one_line(error)}") from error
    if embeddings.ndim != 2 or len(embeddings) != len(classes):
        raise BadInput(f"{path}: {embeddings.shape} embeddings do not go with {len(classes)} keys")
    return embeddings, classes
