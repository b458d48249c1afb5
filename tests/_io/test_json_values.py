"""What a header may hold is decided in one place: types by annotations, sizes by bounds."""

import dataclasses
from typing import ClassVar, Literal

import pytest

from helpers.small import message
from metaleo._io.json_values import BOUNDS, About, Header, from_json, parse_json
from metaleo.config.schema import TrainConfig
from metaleo.features.recipes import Architecture, PretrainConfig, Recipe
from metaleo.learners.base import HyperParams
from metaleo.learners.registry import Structure
from metaleo.search.study import Claim


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 1
    OLD_NAMES: ClassVar = {"length": "size"}


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"] = "a"
    share: float | None = None
    pair: tuple[int, int] = (1, 2)
    shares: tuple[float, ...] = ()
    inner: Inner = Inner()


def test_values_become_what_the_annotations_say():
    values = {"name": "x", "share": 1, "pair": [3, 4], "shares": [0, 0.5], "inner": {"length": 5}}
    found = from_json(Outer, values)
    assert found == Outer("x", share=1.0, pair=(3, 4), shares=(0.0, 0.5), inner=Inner(5))
    assert isinstance(found.share, float)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": 5}, "outer.name should be a text, not 5"),
        ({"kind": "c"}, "outer.kind should be one of a, b, not 'c'"),
        ({"kind": ["a"]}, "outer.kind should be one of a, b, not ['a']"),
        ({"share": "1"}, "outer.share should be a finite number, not '1'"),
        ({"share": float("nan")}, "outer.share should be a finite number"),
        ({"share": 10**400}, "outer.share should be a finite number"),
        ({"share": True}, "outer.share should be a finite number"),
        ({"pair": [1]}, "outer.pair should be a list, not [1]"),
        ({"pair": [1, 2.5]}, "outer.pair.1 should be a whole number, not 2.5"),
        ({"inner": {"size": True}}, "outer.inner.size should be a whole number, not True"),
        ({"inner": [1]}, "outer.inner should be an object, not [1]"),
        ({"more": 1}, "outer.more is unknown"),
    ],
)
def test_other_values_are_named(changes, expected):
    assert expected in message(lambda: from_json(Outer, {"name": "x", **changes}, "outer"))


def test_what_is_missing_and_what_is_no_object():
    assert message(lambda: from_json(Outer, {})) == "name is missing"
    assert message(lambda: from_json(Outer, "5", "it all")) == "it all should be an object, not '5'"


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "1" * 5000, b"\xff\xfe", '{"a": }'], ids=lambda text: text[:2]
)
def test_no_json(text):
    assert "not JSON" in message(lambda: parse_json(text))


@pytest.mark.parametrize("anchor", [None, "centroid", "ridge"])
def test_one_of_some_words_or_nothing(anchor):
    """As `metaleo train --anchor` writes it, and every command reads it."""
    structure = Structure(learner="leo-anchored", anchor=anchor)
    assert from_json(Structure, dataclasses.asdict(structure)) == structure
    said = message(lambda: Structure.from_json({"anchor": "x"}))
    assert "anchor should be one of centroid, ridge, logistic, not 'x'" in said


def test_bounds_are_of_fields_that_exist():
    records = {each.__name__: each for each in (Structure, TrainConfig, Architecture, Recipe, PretrainConfig, Claim)}
    fields = {name: {field.name for field in dataclasses.fields(record)} for name, record in records.items()}
    fields |= {each.__name__: set(each.__annotations__) for each in (Header, About)}
    assert {name: set(own) - fields[name] for name, own in BOUNDS.items()} == {name: set() for name in BOUNDS}


@pytest.mark.parametrize("record", [Structure, TrainConfig, Architecture, Recipe, HyperParams])
def test_records_come_back(record):
    assert from_json(record, dataclasses.asdict(record())) == record()
