"""Write docs/cli.md, the reference of the command line, from the commands themselves."""

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro

from metaleo.cli import COMMANDS, command_class
from metaleo.cli.common import Switch, attribute_docstrings, records

INTRODUCTION = """# Command line

`metaleo COMMAND --help` prints the same. Results go to standard output, progress and advice to standard error; `--json`
prints the result as JSON. A mistake is answered with one line and exit code 2, Ctrl-C with exit code 130.
(`tools/make_cli_page.py` writes this page.)
"""


def rows_of(record: Any, kind: type, title: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Group, flag, default and meaning of each argument; `record` holds the defaults where there is an instance."""
    about = {name: text for base in reversed(kind.__mro__[:-1]) for name, text in attribute_docstrings(base).items()}
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if field.name in records.get(kind, ()):
            continue
        marks = getattr(hints[field.name], "__metadata__", ())
        given = [mark for mark in marks if hasattr(mark, "help_behavior_hint")]
        value = getattr(record, field.name, field.default)
        if dataclasses.is_dataclass(value):
            yield from rows_of(value, type(value), given[-1].name if given else field.name)
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if tyro.conf.Positional in marks:
            flag = next((mark.metavar for mark in given if mark.metavar), field.name.upper())
        hint = next((mark.help_behavior_hint for mark in given if mark.help_behavior_hint is not None), None)
        if hint is not None:
            shown = re.sub(r"^\(default: (.*)\)$", r"\1", hint)
        elif value is dataclasses.MISSING:
            shown = "required"
        else:
            shown = f"`{' '.join(map(str, value)) if type(value) is tuple else value}`"
        yield title, f"`{flag}`", shown if hints[field.name] is not Switch else "", about.get(field.name, "")


def section(name: str, kind: type, level: str) -> Iterator[str]:
    text = inspect.cleandoc(kind.__doc__ or "")
    text, _, examples = text.partition("Try:\n")
    yield f"{level} metaleo {name}\n\n{text.strip()}\n"
    yield f"```sh\n{inspect.cleandoc(examples)}\n```\n"
    make = getattr(kind, "defaults", None)
    rows = list(rows_of(None if make is None else make([]), kind))
    for title in dict.fromkeys(row[0] for row in rows):
        yield f"| {title or 'argument'} | meaning | default |\n|---|---|---|"
        yield "\n".join(f"| {flag} | {about} | {shown} |" for own, flag, shown, about in rows if own == title) + "\n"


def page() -> str:
    parts = [INTRODUCTION]
    for title, group in COMMANDS.items():
        parts.append(f"## {title.capitalize()}\n")
        for name in group:
            kind = command_class(name)
            if name == "analyse":
                for each in typing.get_args(typing.get_type_hints(kind, include_extras=True)["what"]):
                    (analysis, mark) = typing.get_args(each)
                    parts += section(f"analyse {mark.name}", analysis, "###")
            else:
                parts += section(name, kind, "###")
    return "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/cli.md"))
    parser.parse_args().out.write_text(page(), encoding="utf-8")
