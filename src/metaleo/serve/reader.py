"""A child process that parses what clients send: large JSON bodies, and files of any format.

What a file unpacks to is known for certain only once it is unpacked, and Python parses JSON without letting any other
thread run. So both are done by a process whose memory and time are bounded: at the worst it is ended, and another one
takes its place. It returns JSON and arrays of numbers, never pickles.

`Reader` is the side of the server; `python -m metaleo.serve.reader` is the child.
"""

import contextlib
import ctypes
import io
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from pydantic import BaseModel

import metaleo
from metaleo.data.tables import Table
from metaleo.errors import BadInput
from metaleo.serve import api
from metaleo.serve.uploads import read_upload

Message = tuple[dict[str, Any], list[np.ndarray]]
Schema = TypeVar("Schema", bound=BaseModel)


class Reader:
    """One child process; it is started by its first use, and again after it was ended. For one thread at a time."""

    def __init__(self, memory: int, seconds: float, most: int):
        self.memory, self.seconds, self.most = memory, seconds, most
        """Bytes that it may take to parse something, seconds for that, and bytes that the result may have."""
        self.process: subprocess.Popen[bytes] | None = None

    def table(self, body: bytes, name: str, label: str | None = None) -> Table:
        """`read_upload` in the child."""
        about = {"kind": "table", "name": name, "label": label, "most": self.most}
        found, (vectors,) = self.ask(about, body, name)
        return Table(vectors, found["labels"], None, found["beside"], columns=tuple(found["columns"]))

    def body(self, schema: type[Schema], body: bytes) -> Schema:
        """`api.read_body` in the child; rows of numbers come back as arrays."""
        found, arrays = self.ask({"kind": "body", "schema": schema.__name__}, body, "the body")
        return schema.model_construct(**api.unpacked(found, arrays))

    def start(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            source = str(Path(metaleo.__file__).parents[1])
            paths = filter(None, (source, os.environ.get("PYTHONPATH")))
            own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                   "MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # fmt: skip
            self.process = subprocess.Popen(  # noqa: S603 (nothing of a client's is in it)
                [sys.executable, "-P", "-m", "metaleo.serve.reader", str(self.memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **own},
            )
        return self.process

    def ask(self, about: dict[str, Any], body: bytes, name: str) -> Message:
        """What the child answers; `BadInput` if it refuses, or if it had to be ended."""
        process, late = self.start(), threading.Event()
        assert process.stdin is not None
        assert process.stdout is not None

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self.seconds, end)
        timer.start()
        try:
            write_message(process.stdin, about, [np.frombuffer(body, np.uint8)])
            found, arrays = read_message(process.stdout, 2 * self.most)
        except (OSError, EOFError, ValueError) as error:
            self.stop()
            self.start()  # the next one need not wait for its imports
            if late.is_set():
                raise BadInput(f"{name} takes longer than {self.seconds:g} seconds to read") from error
            raise BadInput(too_large(name, self.memory)) from error
        finally:
            timer.cancel()
        if found.get("full"):
            self.stop()
            self.start()
            raise BadInput(too_large(name, self.memory))
        if "error" in found:
            raise BadInput(found["error"])
        return found, arrays

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            with process:  # closes its pipes
                pass


def too_large(name: str, memory: int) -> str:
    return f"{name} takes more than {memory >> 20:,} MB of memory to read, or is damaged"


def write_message(file: IO[bytes], about: dict[str, Any], arrays: list[np.ndarray]) -> None:
    layout = [(array.dtype.str, array.shape) for array in arrays]
    head = json.dumps({"about": about, "layout": layout}).encode()
    file.write(struct.pack("<Q", len(head)) + head)
    for array in arrays:
        file.write(np.ascontiguousarray(array).data)
    file.flush()


def read_message(file: IO[bytes], most: int) -> Message:
    def exactly(size: int) -> bytes:
        if size > most:
            raise ValueError(f"a message of {size:,} bytes")
        found = file.read(size)
        if len(found) < size:
            raise EOFError
        return found

    head = json.loads(exactly(struct.unpack("<Q", exactly(8))[0]))
    arrays = []
    for kind, shape in head["layout"]:
        dtype = np.dtype(kind)
        arrays.append(np.frombuffer(exactly(dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape))
    return head["about"], arrays


def return_free_memory() -> None:
    """Give the system back what this process has freed.

    glibc keeps what it cannot cut off the end of a heap, which after a hundred programs of XLA is gigabytes. Others
    give it back by themselves.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


# The child


def answer(about: dict[str, Any], body: bytes) -> Message:
    if about["kind"] == "body":
        return api.packed(api.read_body(getattr(api, about["schema"]), body))
    table = read_upload(body, about["name"], about["most"], about["label"])
    if table.images is not None:
        raise BadInput(f"{about['name']} holds images; only rows of numbers are read here")
    texts = {name: [str(cell)[: api.TEXT] for cell in cells] for name, cells in list(table.beside.items())[: api.TEXTS]}
    return {"labels": table.labels, "beside": texts, "columns": table.columns}, [table.vectors]


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more than now. Windows has no such limit, and macOS does not keep to it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's; when that ends, so does this
    os.dup2(2, 1)  # whatever prints cannot disturb the answers
    with contextlib.suppress(BadInput):
        read_upload(b"label,x\na,1\n", "warm.csv", 100)  # imports what the first request would wait for
    limit_memory(int(sys.argv[1]))
    if hasattr(os, "nice"):
        os.nice(5)  # the server itself goes first
    while True:
        try:
            about, (body,) = read_message(requests, 1 << 31)
        except EOFError:  # the server is gone
            return
        result = io.BytesIO()
        try:
            write_message(result, *answer(about, body.tobytes()))
        except BadInput as error:
            write_message(result, {"error": str(error)}, [])
        except MemoryError:
            result = io.BytesIO()
            write_message(result, {"full": True}, [])
        answers.write(result.getbuffer())
        answers.flush()
        del body, result
        return_free_memory()


if __name__ == "__main__":
    main()
