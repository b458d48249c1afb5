"""CUDA C++ to PTX, by NVIDIA's run-time compiler: a library that JAX's CUDA packages bring along."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def library() -> ctypes.CDLL | None:
    """NVRTC, if it can be found; where JAX has it from a package, JAX has loaded it by now."""
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def compile_ptx(source: str, constants: dict[str, int | float], capability: str) -> str:
    """PTX of the kernels in a source, with these numbers for the preprocessor, for a compute capability like 9.0."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("there is no NVRTC")
    options = [f"--gpu-architecture=compute_{capability.replace('.', '')}", "--std=c++17"]
    options += [f"-D{name}={f'{value!r}f' if isinstance(value, float) else value}" for name, value in constants.items()]
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"metaleo.cu", 0, None, None):
        raise RuntimeError("NVRTC cannot start")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded):
            raise RuntimeError(f"NVRTC: {text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)}")
        return text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def text(size_of: Callable[..., int], read: Callable[..., int], program: ctypes.c_void_p) -> str:
    """What one of NVRTC's pairs of functions, for the size and for the characters, says of a program."""
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer: Any = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.value.decode()
