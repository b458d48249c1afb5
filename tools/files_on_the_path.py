"""Count the files whose functions run in a command, or in `LEOClassifier.fit`: what a reader has to open.

python tools/files_on_the_path.py fit [MODEL]
python tools/files_on_the_path.py train --steps 200 --validate-every 100 --out run
"""

import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import metaleo

PACKAGE = str(Path(metaleo.__file__).parent)
OPTIMISED = 1
"""Flag of the code of a function, which the bodies of modules and classes lack."""


def fit(model: str = "miniimagenet") -> None:
    rows = np.random.default_rng(0).normal(size=(5, 640))
    metaleo.LEOClassifier(model).fit(rows, list("abcde"))


def command(arguments: list[str]) -> Callable[[], None]:
    from metaleo.cli import main

    return lambda: main(arguments)


def watch(files: set[str]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that collects the files of functions, unless they run on import."""

    def see(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(PACKAGE) or not frame.f_code.co_flags & OPTIMISED or name in files:
            return
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(PACKAGE):
                return
            above = above.f_back
        files.add(name)

    return see


if __name__ == "__main__":
    what, *others = sys.argv[1:]
    run, found = functools.partial(fit, *others) if what == "fit" else command(sys.argv[1:]), set()
    threading.setprofile(watch(found))
    sys.setprofile(watch(found))
    run()
    sys.setprofile(None)
    files = sorted(Path(name).relative_to(PACKAGE).as_posix() for name in found)
    print(json.dumps({"count": len(files), "files": files}, indent=1))
