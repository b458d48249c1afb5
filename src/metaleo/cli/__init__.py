"""The command line: a file per command.

This module imports nothing that takes time, so that Ctrl-C finds `main` in charge. Before, while Python starts and
imports this module (some 50 ms), the answer to Ctrl-C is Python's own.
"""

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from metaleo import __version__
from metaleo.errors import BadInput, Interrupted, require_seed, unknown_name

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "start": {
        "quickstart": ("Quickstart", "see LEO work on real features that come with the package, in a minute"),
        "list": ("ListNames", "learners, presets, models, data, backbones, recipes and engines by name"),
        "info": ("Info", "what a file is: a model, a task, a backbone, features"),
    },
    "your data": {
        "split": ("Split", "choose which classes to train, validate and test on"),
        "train": ("Train", "meta-train a learner on tables of vectors"),
        "adapt": ("Adapt", "adapt a model to a few labelled examples"),
        "predict": ("Predict", "classify examples with an adapted model"),
        "export": ("Export", "write a model as an ONNX file"),
    },
    "research": {
        "evaluate": ("Evaluate", "test models on tasks of unseen classes"),
        "compare": ("Compare", "train several learners, test them on the same tasks, rank them"),
        "search": ("Search", "find hyper-parameters"),
        "reproduce": ("Reproduce", "make the paper's Table 2, with its numbers beside ours"),
        "analyse": ("Analyse", "codes, curvature, coverage, uncertainty"),
        "plot-functions": ("PlotFunctions", "the paper's Figure 3: functions from a few points"),
        "report": ("Report", "one page about some runs"),
    },
    "features": {
        "pack": ("Pack", "put images into one file"),
        "pretrain": ("Pretrain", "train a backbone on images"),
        "embed": ("Embed", "turn images into vectors"),
    },
    "serve": {"serve": ("Serve", "a page to try models on, and a JSON API")},
}
"""By group: each command's class, in the module of its name, and what `metaleo --help` says of it."""
CLASSES = {name: kind for group in COMMANDS.values() for name, (kind, _) in group.items()}
TRAINING_OR_TESTING = ("quickstart", "train", "evaluate", "search", "reproduce", "compare", "report")
"""Commands with thousands of small tasks to share out among the cores of a CPU; all others leave them to XLA."""
RESUMING = ("train", "search", "reproduce", "compare")
"""Those of them that go on with what they find in their folder."""


def help_text() -> str:
    """All commands on one screen."""
    lines = ["Meta-learning with Latent Embedding Optimization (LEO). Flags and examples: metaleo COMMAND --help", ""]
    for title, group in COMMANDS.items():
        for number, (name, (_, about)) in enumerate(group.items()):
            lines.append(f"{title if number == 0 else '':12}{name:16}{about}")
    return "\n".join(lines)


def command_class(name: str) -> type:
    """The class of a command; no other command's module is imported for it."""
    module = "list_names" if name == "list" else name.replace("-", "_")
    return getattr(importlib.import_module(f"metaleo.cli.{module}"), CLASSES[name])


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line and exit code 2 for bad input, at most one line and 130 when interrupted, at any moment."""
    try:
        with ctrl_c(ours=arguments is None):
            run_command(sys.argv[1:] if arguments is None else arguments)
    except Interrupted:  # the command has said how to go on
        sys.exit(130)
    except KeyboardInterrupt:
        print("metaleo: stopped", file=sys.stderr)
        if arguments is None:  # our own process: XLA may still compute, and crash if Python shuts down meanwhile
            with contextlib.suppress(OSError):
                sys.stdout.flush()
            os._exit(130)
        sys.exit(130)


@contextlib.contextmanager
def ctrl_c(ours: bool) -> Iterator[None]:
    """After Ctrl-C, end with a KeyboardInterrupt, whatever becomes of the one that it raises on the spot.

    Python drops it in callbacks of the garbage collector, and XLA turns it into an error of its own in callbacks of a
    compiled program. A second Ctrl-C ends the process at once; so does the first, while a process of `ours` shuts down.
    """
    if threading.current_thread() is not threading.main_thread():  # only there does Python handle signals
        yield
        return
    received = []

    def stop(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        logging.disable()  # JAX would log that a callback failed
        raise KeyboardInterrupt

    def unraisable(hooked: Any) -> None:
        if not isinstance(hooked.exc_value, KeyboardInterrupt):
            return previous_hook(hooked)
        signal.signal(signal.SIGINT, stop)
        threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]).start()  # again, outside of the callback
        return None

    previous_hook, sys.unraisablehook = sys.unraisablehook, unraisable
    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    except Interrupted:
        raise
    except BaseException:
        if not received:
            raise
    finally:
        sys.unraisablehook = previous_hook
        logging.disable(logging.NOTSET)
        signal.signal(signal.SIGINT, signal.SIG_DFL if ours else previous or signal.SIG_DFL)
    if received:
        raise KeyboardInterrupt


def run_command(arguments: list[str]) -> None:
    if arguments in (["--version"], ["-V"]):
        print(f"metaleo {__version__}")
        return
    if arguments in ([], ["--help"], ["-h"]):
        print(help_text())
        return
    name, *rest = arguments
    from metaleo.cli.common import console
    from metaleo.cli.parsing import as_flags, parse

    command = None
    warnings.formatwarning = lambda message, *_: f"metaleo: {as_flags(str(message), command)}\n"  # without the place
    try:
        if name not in CLASSES:
            raise unknown_name("command", name, CLASSES)
        command = parse(name, rest)
        run(name, command)
    except BadInput as error:
        console.print(f"metaleo: {as_flags(str(error), command)}", markup=False, soft_wrap=True)
        sys.exit(2)


def devices_begun_on(command: Any) -> int | None:
    """The number of devices for a command that goes on with work in a folder; None if that is free."""
    from metaleo.training.population import devices_of

    folder = getattr(command, "folder", command.out)
    return None if folder is None or command.overwrite else devices_of(folder)


def run(name: str, command: Any) -> None:
    """Run a command on the devices that it needs."""
    from metaleo._jax.devices import enable_compilation_cache, is_first_host, join_hosts, use_all_cores
    from metaleo.cli.common import console

    asked = getattr(command, "what", command)  # of `metaleo analyse`, the analysis
    require_seed(getattr(asked, "seed", 0))
    enable_compilation_cache()
    if name in TRAINING_OR_TESTING:
        use_all_cores(devices_begun_on(command) if name in RESUMING else None)
    join_hosts()
    if not is_first_host():
        console.quiet = True
    command.run()
