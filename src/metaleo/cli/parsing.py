"""From the words of a command line to a command, and from the library's messages to those of the command line."""

import contextlib
import difflib
import io
import re
import sys
from typing import Any

import tyro

from metaleo.cli import command_class
from metaleo.cli.common import flag_names, registry
from metaleo.errors import BadInput, unknown_name

STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes, tyro.conf.DisallowNone,
         tyro.conf.PositionalMetavarFromFieldName)  # fmt: skip


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
    if value := re.match(r"Error parsing (\S+?): (takes .*? not '.*?')", text):
        return f"{value[1]} {value[2]}"
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
