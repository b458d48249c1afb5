"""C++ for the cores of a CPU: compiled once on a machine that has a compiler, for its processor, and called by XLA."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

import jax

from metaleo.compiling import own_folder
from metaleo.randomness import FACTORS, GOLDEN

FOLDER = Path(__file__).parent / "cores"
FUNCTIONS = "adapt_forward", "adapt_backward", "judge_queries", "draw_normals", "adam_update", "join_arrays"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fPIC", "-shared", "-w")
CONSTANTS = {"GOLDEN": GOLDEN, "FIRST_FACTOR": FACTORS[0], "SECOND_FACTOR": FACTORS[1]}


def target(name: str) -> str:
    """What XLA knows a function as."""
    return f"metaleo_{name}"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions, which XLA can call from now on; None where they cannot be compiled."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or ""]
    if not shutil.which(compiler[0]):
        return None
    try:
        functions = load(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        log = getattr(error, "stderr", None) or str(error)
        why = next((line for line in log.splitlines() if "error" in line), log.strip().splitlines()[-1])
        warnings.warn(f"kernels do not compile here ({why}): going on without them", stacklevel=2)
        return None
    for name in FUNCTIONS:
        jax.ffi.register_ffi_target(target(name), jax.ffi.pycapsule(getattr(functions, name)), platform="cpu")
    return functions


def load(compiler: list[str]) -> ctypes.CDLL:
    """From the user's cache, where it is kept if that is the user's alone, or else compiled anew."""
    options = *FLAGS, *(f"-D{name}={number}u" for name, number in CONSTANTS.items()), f"-isystem{jax.ffi.include_dir()}"
    sources = "".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir()) if path.is_file())
    known = run(*compiler, *FLAGS, "-E", "-dM", "-xc++", os.devnull)  # to the compiler, of itself and the processor
    digest = hashlib.sha256("\0".join((sources, *options, version("jaxlib"), known)).encode()).hexdigest()
    folder = own_folder("cores")
    kept = folder and folder / f"{digest[:32]}.so"
    if kept and kept.exists():
        return ctypes.CDLL(str(kept))
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / "cores.so"
        run(*compiler, *options, str(FOLDER / "library.cpp"), "-o", str(made))
        functions = ctypes.CDLL(str(made))
        if kept:
            made.replace(kept)
        return functions


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout  # noqa: S603
