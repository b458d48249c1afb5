"""The command line: a file per command."""

import contextlib
import difflib
import importlib
import io
import re
import sys
import warnings
from typing import Any

import tyro

from metaleo import __version__
from metaleo.cli.common import console, flag_names, registry
from metaleo.errors import BadInput, Interrupted, unknown_name

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
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.DisallowNone,
         tyro.conf.PositionalMetavarFromFieldName)  # fmt: skip


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


def parse(name: str, arguments: list[str]) -> Any:
    """The command with its flags; raises `BadInput` for what it does not know, `SystemExit` after printing help."""
    kind, said = command_class(name), io.StringIO()
    defaults = getattr(kind, "defaults", None)
    try:
        with contextlib.redirect_stderr(said):
            command, unknown = tyro.cli(
                kind, prog=f"metaleo {name}", args=arguments, return_unknown_args=True, registry=registry,
                config=STYLE, default=tyro.MISSING_NONPROP if defaults is None else defaults(arguments),
            )  # fmt: skip
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise BadInput(in_one_line(said.getvalue(), f"metaleo {name}")) from None
    sys.stderr.write(said.getvalue())
    if unknown:
        raise BadInput(describe_unknown(unknown[0], command, name))
    return command


def in_one_line(said: str, command: str) -> str:
    """The frame in which tyro explains a mistake, as one line."""
    lines = re.sub("[│╭╮╰╯]", " ", said.replace("─", "-")).splitlines()[1:]  # without the title
    rules = [number for number, line in enumerate(lines) if number and re.fullmatch(" *-{9,} *", line)]
    framed = [line for line in lines[: rules[0] if rules else None] if not re.fullmatch("[ -]*", line)]
    text = " ".join(line.strip() for line in framed)
    more = f"; see {command} --help"
    if choice := re.match(r"invalid choice '(.*?)' for argument '(\S+?)'\. Expected one of \((.*?)\)", text):
        known = sorted(set(re.findall(r"'([^']*)'", choice[3])) - {"None"})
        return str(unknown_name(choice[2], choice[1], known))
    if value := re.match(r"Error parsing (\S+?):.*?(int|float)\b.*?: '(.*?)'", text):
        return f"{value[1]} takes a {'whole number' if value[2] == 'int' else 'number'}, not {value[3]!r}"
    if value := re.match(r"Error parsing (\S+?): Could not parse arguments \[(.*?)\]", text):
        return f"{value[1]} cannot be {value[2]}{more}"
    if value := re.match(r"Missing value for argument '(\S+)'\. Expected (\d+)", text):
        return f"{value[1]} takes {'a value' if value[2] == '1' else f'{value[2]} values'}{more}"
    if text.startswith("Missing from"):
        first = [line.split()[0] for line in framed if re.match(r" {6}\S", line)]
        names = ["--out" if name == "-o" else name for name in first]
        return f"{' and '.join(names)} must be given{more}"
    return text.rstrip(".") + more


def as_flags(message: str, command: Any) -> str:
    """A message of the library, with the arguments that are flags of the command written as such.

    `way=20` becomes `--way 20`, `resume=True` becomes `--resume`, and ``out=`` in backticks a flag without a value.
    """
    if command is None:  # it could not be parsed
        return message
    for name in flag_names(getattr(command, "what", command)):  # of `metaleo analyse`, the analysis
        flag = f"--{name.replace('_', '-')}"
        message = re.sub(rf"`{name}=`|\b{name}=True\b", flag, message)
        message = re.sub(rf"(?<![\w-]){name}=(?=\S)", f"{flag} ", message)
    return message


def describe_unknown(argument: str, command: Any, name: str) -> str:
    """What is wrong with an argument that the command does not know, with the nearest flag that it does."""
    if not argument.startswith("-"):
        hint = "; a switch takes no value" if argument.lower() in ("true", "false") else ""
        return f"unexpected argument {argument!r}{hint}; see metaleo {name} --help"
    flags = [f"--{flag.replace('_', '-')}" for flag in flag_names(getattr(command, "what", command))]
    near = difflib.get_close_matches(argument.split("=")[0], flags, n=1, cutoff=0.5)
    return f"unknown flag {argument}" + (f"; did you mean {near[0]}?" if near else f"; see metaleo {name} --help")


def fail(message: str) -> None:
    """Say what is wrong in one line, and end with code 2."""
    console.print(f"metaleo: {message}", markup=False, soft_wrap=True)
    sys.exit(2)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line and exit code 2 for bad input, 130 when interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments in (["--version"], ["-V"]):
        print(f"metaleo {__version__}")
        return
    if arguments in ([], ["--help"], ["-h"]):
        print(help_text())
        return
    name, *rest = arguments
    command = None
    warnings.formatwarning = lambda message, *_: f"metaleo: {as_flags(str(message), command)}\n"  # without the place
    try:
        if name not in CLASSES:
            raise unknown_name("command", name, CLASSES)
        command = parse(name, rest)
        run(name, command)
    except BadInput as error:
        fail(as_flags(str(error), command))
    except Interrupted:
        sys.exit(130)


def run(name: str, command: Any) -> None:
    """Run a command on the devices that it needs."""
    from metaleo._jax.devices import enable_compilation_cache, is_first_host, join_hosts, use_all_cores

    enable_compilation_cache()
    if name in TRAINING_OR_TESTING:
        use_all_cores()
    join_hosts()
    if not is_first_host():
        console.quiet = True
    command.run()
