"""Values from JSON, checked against annotations and bounds: the one place that decides what a header may hold."""

import contextlib
import dataclasses
import json
import reprlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

from metaleo.errors import BadInput, one_line

T = TypeVar("T")
Label = str | int | float | bool

BOUNDS: dict[str, dict[str, tuple[float, float]]] = {
    "Structure": {
        "dim": (1, 10**6), "way": (1, 10**4), "latent": (1, 10**5), "latent_steps": (0, 1000),
        "finetune_steps": (0, 1000), "hidden": (1, 10**4), "layers": (1, 100), "channels": (1, 10**6),
        "width": (0, 10**4), "samples": (1, 10**4), "tail": (1, 4096), "noise": (1e-9, 1e9),
    },
    "TrainConfig": {
        "way": (1, 10**4), "shot": (1, 10**6), "query": (1, 10**6), "steps": (0, 10**9), "meta_batch": (1, 10**6),
        "validate_every": (1, 10**9), "validation_tasks": (1, 10**7), "patience": (1, 10**9), "seed": (0, 2**32 - 1),
        "seeds": (1, 10**4), "ways": (1, 10**4), "shots": (1, 10**6),
    },
    "Architecture": {
        "depth": (0, 202), "width": (1, 4096), "strides": (1, 8), "side": (16, 1024), "channels": (1, 3),
        "share": (0.01, 1), "layer": (1, 202),
    },
    "Recipe": {"steps": (1, 10**9), "batch": (1, 10**6), "drops": (0, 1)},
    "PretrainConfig": {"reports": (1, 10**6), "seed": (0, 2**32 - 1)},
    "Header": {"temperature": (1e-6, 1e6), "temperatures": (1e-6, 1e6), "image_side": (1, 2048), "rung": (0, 1000),
               "alive": (0, 10**6), "devices": (1, 2048)},
    "Claim": {"number": (0, 10**9), "slot": (0, 10**9)},
    "About": {"rows": (1, 10**6), "examples": (0, 10**6)},
}  # fmt: skip
"""Smallest and largest value of numbers by the record that holds them: far beyond what anyone trains, and small enough
that no file makes a program hang or take all memory."""


class About(TypedDict, total=False):
    """What a task file says of its examples and its model."""

    rows: int
    examples: list[int]
    calibrated: bool
    learner: str
    model: str
    columns: list[str]
    network: str | None
    views: Literal["centre", "multi"]


class Header(TypedDict, total=False):
    """The fields of headers that are read by some code; a file may have others."""

    format: int
    kind: str
    versions: dict[str, str]
    structure: dict[str, Any]
    architecture: dict[str, Any]
    config: dict[str, Any]
    seed: int
    step: int
    validation_accuracy: float
    validation_loss: float
    classes: list[Label]
    temperature: float
    temperatures: list[tuple[float, float]] | None
    network: str | None
    views: Literal["centre", "multi"]
    drawings: bool
    image_side: int | None
    card: dict[str, str]
    about: About
    claims: list[dict[str, Any]]
    alive: list[int]
    rung: int
    engine: str
    devices: int
    backend: str
    cores: int | None
    since_report: dict[str, Any]


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises `BadInput` if it is none, or beyond what Python reads (digits, nesting)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {one_line(error)}") from error


def from_json(kind: type[T], value: Any, name: str = "") -> T:
    """The JSON value as an instance of a dataclass or typed dictionary, whose annotations and `BOUNDS` it must satisfy.

    A dataclass may give names that fields had in older files as its `OLD_NAMES`.
    """
    return convert(kind, value, name)


def convert(kind: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return convert_union(kind, value, name)
    if origin is Literal and value in arguments:
        return value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        each = arguments[:1] * len(value) if origin is list or arguments[-1] is Ellipsis else arguments
        if len(each) == len(value):
            items = zip(each, value, strict=True)
            return origin(convert(own, one, f"{name}.{place}") for place, (own, one) in enumerate(items))
    if (origin is dict or dataclasses.is_dataclass(kind) or is_typeddict(kind)) and isinstance(value, Mapping):
        return convert_mapping(kind, value, name)
    if (
        kind is float
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    ):
        return float(value)
    if kind in (str, int, bool, types.NoneType) and type(value) is kind:
        return value
    raise BadInput(f"{name or 'it'} should be {describe(kind)}, not {reprlib.repr(value)}")


def convert_union(kind: Any, value: Any, name: str) -> Any:
    members = [each for each in get_args(kind) if is_from_json(each)]  # arrays are not
    for each in members:
        with contextlib.suppress(BadInput):
            return convert(each, value, name)
    if len(members) == 2 and members[1] is types.NoneType:
        return convert(members[0], value, name)  # says which part of it is wrong
    raise BadInput(f"{name} should be {describe(kind)}, not {reprlib.repr(value)}")


def convert_mapping(kind: Any, value: Mapping[str, Any], name: str) -> Any:
    prefix = f"{name}." if name else ""
    if get_origin(kind) is dict:
        return {each: convert(get_args(kind)[1], one, f"{prefix}{each}") for each, one in value.items()}
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        found = {**value, **{n: convert(hints[n], one, f"{prefix}{n}") for n, one in value.items() if n in hints}}
        check_bounds(found, kind.__name__)
        return found
    fields = {field.name: field for field in dataclasses.fields(kind)}
    old = getattr(kind, "OLD_NAMES", {})
    value = {old.get(each, each): one for each, one in value.items()}
    unknown = next((each for each in value if each not in fields), None)
    if unknown is not None:
        raise BadInput(f"{prefix}{reprlib.repr(unknown)[1:-1]} is unknown")
    for each, field in fields.items():
        if each not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise BadInput(f"{prefix}{each} is missing")
    found = kind(**{each: convert(hints[each], one, f"{prefix}{each}") for each, one in value.items()})
    check_bounds(vars(found), kind.__name__)
    return found


WORDS = {
    int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", types.NoneType: "null",
    list: "a list", tuple: "a list", dict: "an object",
}  # fmt: skip


def is_from_json(kind: Any) -> bool:
    return get_origin(kind) is Literal or (get_origin(kind) or kind) in WORDS


def describe(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(describe(each) for each in get_args(kind) if is_from_json(each))
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    return WORDS.get(get_origin(kind) or kind, "an object")


def check_bounds(values: Mapping[str, Any], record: str) -> None:
    """Raise `BadInput` if a number of this kind of record is outside of its `BOUNDS`."""
    for name, (least, most) in BOUNDS.get(record, {}).items():
        for number in numbers_in(values.get(name)):
            if not number >= least:
                raise BadInput(f"{name}={number} must be at least {least:,}")
            if not number <= most:
                raise BadInput(f"{name}={number} must be at most {most:,}")


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, int | float):
        yield value
