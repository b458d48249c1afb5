"""Read pickles of images without running code in them; pixels stay on disk, memory-mapped."""

import mmap
import os
import pickle  # used only through a subclass that admits NumPy arrays; pickle.load is never called
from pathlib import Path
from typing import Any

from metaleo.data.safe_unpickling import ArrayUnpickler, plain
from metaleo.errors import BadInput, one_line

LONGEST_TEXT = 255
"""Longest string in bytes that is read as text; a longer one holds pixels."""


class MappedUnpickler(ArrayUnpickler):
    """An `ArrayUnpickler` whose pixels are views of the memory-mapped file instead of copies."""

    def __init__(self, mapped: mmap.mmap):
        super().__init__(mapped, len(mapped))
        self.mapped, self.view = mapped, memoryview(mapped)

    def take(self, width: int) -> str | memoryview:
        """Read a string that is preceded by its length in `width` bytes; return a long one as a view of the file."""
        length = int.from_bytes(self.mapped.read(width), "little")
        if length <= LONGEST_TEXT:
            return self.mapped.read(length).decode("latin1")
        start = self.mapped.tell()
        self.mapped.seek(length, os.SEEK_CUR)
        return self.view[start : start + length]

    def load_string_of_4(self: Any) -> None:
        self.append(self.take(4))

    def load_string_of_8(self: Any) -> None:
        self.append(self.take(8))

    def load_frame(self: Any) -> None:
        """Skip the frame header: a frame is only a hint for read-ahead, and views need positions in the file itself."""
        self.mapped.seek(8, os.SEEK_CUR)

    dispatch = ArrayUnpickler.dispatch | {
        pickle.BINSTRING[0]: load_string_of_4,
        pickle.BINBYTES[0]: load_string_of_4,
        pickle.BINBYTES8[0]: load_string_of_8,
        pickle.BYTEARRAY8[0]: load_string_of_8,
        pickle.FRAME[0]: load_frame,
    }


def read_pickle(path: Path) -> Any:
    """Read a pickle of arrays (as views of the file), numbers, strings, lists and dictionaries."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # the views keep the map open
        return plain(MappedUnpickler(mapped).load(), len(mapped))
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadInput(f"{path} is not a pickle of images that can be trusted: {one_line(error)}") from error
