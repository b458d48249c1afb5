"""The command line: a file per command."""

import dataclasses
import difflib
import re
import sys
import warnings
from typing import Annotated, Any, get_args

import tyro

from metaleo import __version__
from metaleo._jax.devices import enable_compilation_cache, is_first_host, join_hosts, use_all_cores
from metaleo.cli.adapt import Adapt
from metaleo.cli.analyse import Analyse
from metaleo.cli.common import console
from metaleo.cli.compare import Compare
from metaleo.cli.embed import Embed
from metaleo.cli.evaluate import Evaluate
from metaleo.cli.export import Export
from metaleo.cli.info import Info
from metaleo.cli.list_names import ListNames
from metaleo.cli.pack import Pack
from metaleo.cli.plot_functions import PlotFunctions
from metaleo.cli.predict import Predict
from metaleo.cli.pretrain import Pretrain
from metaleo.cli.quickstart import Quickstart
from metaleo.cli.report import Report
from metaleo.cli.reproduce import Reproduce
from metaleo.cli.search import Search
from metaleo.cli.serve import Serve
from metaleo.cli.split import Split
from metaleo.cli.train import Train
from metaleo.errors import BadInput, Interrupted, unknown_name

Command = (
    Annotated[Quickstart, tyro.conf.subcommand("quickstart")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Adapt, tyro.conf.subcommand("adapt")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Split, tyro.conf.subcommand("split")]
    | Annotated[ListNames, tyro.conf.subcommand("list")]
    | Annotated[Search, tyro.conf.subcommand("search")]
    | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Analyse, tyro.conf.subcommand("analyse")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[PlotFunctions, tyro.conf.subcommand("plot-functions")]
    | Annotated[Pack, tyro.conf.subcommand("pack")]
    | Annotated[Pretrain, tyro.conf.subcommand("pretrain")]
    | Annotated[Embed, tyro.conf.subcommand("embed")]
    | Annotated[Export, tyro.conf.subcommand("export")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
)
HELP = """\
Meta-learning with Latent Embedding Optimization (LEO). Flags and examples: metaleo COMMAND --help

start       quickstart      see LEO work on real features that come with the package, in a minute
            list            learners, presets, models, data, networks, recipes and engines by name
            info            what a file is: a model, a task, a network, features
your data   split           choose which classes to train, validate and test on
            train           meta-train a learner on tables of vectors
            adapt           adapt a model to a few labelled examples
            predict         classify examples with an adapted model
            export          write a model as an ONNX file
research    evaluate        test models on tasks of unseen classes
            compare         train several learners, test them on the same tasks, rank them
            search          find hyper-parameters
            reproduce       make the paper's Table 2, with its numbers beside ours
            analyse         codes, curvature, coverage, uncertainty
            plot-functions  the paper's Figure 3: functions from a few points
            report          one page about some runs
features    pack            put images into one file
            pretrain        train a network on images
            embed           turn images into vectors
serve       serve           a page to try models on, and a JSON API"""
"""Of `metaleo --help`: all commands on one screen."""
TRAINING_OR_TESTING = (Quickstart, Train, Evaluate, Search, Reproduce, Compare, Report)
"""Commands with thousands of small tasks to share out among the cores of a CPU; all others leave them to XLA."""


def in_one_line(message: Warning | str, *_: Any) -> str:
    """A warning as people are told of it, without the place in the code."""
    return f"metaleo: {message}\n"


def as_flags(message: str, command: Any) -> str:
    """A message of the library, with the arguments that are flags of the command written as such.

    `way=20` becomes `--way 20`, `resume=True` becomes `--resume`, and ``out=`` in backticks a flag without a value.
    """
    command = getattr(command, "what", command)  # of `metaleo analyse`, the analysis
    for name in (field.name for field in dataclasses.fields(command)):
        flag = f"--{name.replace('_', '-')}"
        message = re.sub(rf"`{name}=`|\b{name}=True\b", flag, message)
        message = re.sub(rf"(?<![\w-]){name}=(?=\S)", f"{flag} ", message)
    return message


def describe_unknown(argument: str, command: Any) -> str:
    """What is wrong with an argument that the command does not know, with the nearest flag that it does."""
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}; see metaleo --help"
    command = getattr(command, "what", command)
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(command)]
    near = difflib.get_close_matches(argument.split("=")[0], flags, n=1, cutoff=0.5)
    return f"unknown flag {argument}" + (f"; did you mean {near[0]}?" if near else "; see --help of the command")


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line and exit code 2 for bad input, 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        print(f"metaleo {__version__}")
        return
    if arguments in ([], ["--help"], ["-h"]):
        print(HELP)
        return
    names = [get_args(one)[1].name for one in get_args(Command)]
    if arguments[0] not in names:
        console.print(f"metaleo: {unknown_name('command', arguments[0], names)}", markup=False, soft_wrap=True)
        sys.exit(2)
    command, unknown = tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="metaleo",
        args=arguments,
        return_unknown_args=True,
    )
    if unknown:
        console.print(f"metaleo: {describe_unknown(unknown[0], command)}", markup=False, soft_wrap=True)
        sys.exit(2)
    warnings.formatwarning = in_one_line
    enable_compilation_cache()
    if isinstance(command, TRAINING_OR_TESTING):
        use_all_cores()
    try:
        join_hosts()
        if not is_first_host():
            console.quiet = True
        command.run()
    except BadInput as error:
        console.print(f"metaleo: {as_flags(str(error), command)}", markup=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted:
        sys.exit(130)
