"""The command line: a file per command."""

import sys
import warnings
from typing import Annotated, Any

import tyro

from metaleo import __version__
from metaleo.cli.adapt import Adapt
from metaleo.cli.analyse import Analyse
from metaleo.cli.common import say
from metaleo.cli.compare import Compare
from metaleo.cli.embed import Embed
from metaleo.cli.evaluate import Evaluate
from metaleo.cli.export import Export
from metaleo.cli.info import Info
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
from metaleo.compiling import keep_compilations
from metaleo.devices import use_cores
from metaleo.errors import BadInput
from metaleo.population import is_first_host, join_hosts

Command = (
    Annotated[Quickstart, tyro.conf.subcommand("quickstart")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Adapt, tyro.conf.subcommand("adapt")]
    | Annotated[Predict, tyro.conf.subcommand("predict")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Split, tyro.conf.subcommand("split")]
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
TRAINING_OR_TESTING = (Quickstart, Train, Evaluate, Search, Reproduce, Compare, Report)
"""Commands with thousands of small tasks to share out among the cores of a CPU; all others leave them to XLA."""


def in_one_line(message: Warning | str, *_: Any) -> str:
    """A warning as people are told of it, without the place in the code."""
    return f"metaleo: {message}\n"


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line and exit code 2 for bad input, 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        print(f"metaleo {__version__}")
        return
    from metaleo.journal import Interrupted

    command = tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="metaleo",
        description="Meta-learning with Latent Embedding Optimization (LEO).",
        args=arguments,
    )
    warnings.formatwarning = in_one_line
    keep_compilations()
    if isinstance(command, TRAINING_OR_TESTING):
        use_cores()
    try:
        join_hosts()
        if not is_first_host():
            say.quiet = True
        command.run()
    except BadInput as error:
        say.print(f"metaleo: {error}", markup=False, soft_wrap=True)
        sys.exit(2)
    except Interrupted:
        sys.exit(130)
