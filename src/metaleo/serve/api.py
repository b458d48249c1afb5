"""Schemas of requests and responses, and limits on the size of a request."""

import itertools
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from metaleo.errors import BadInput

EXAMPLES = 2000
"""Maximum examples per request."""
CLASSES = 100
"""Maximum classes per task."""
WIDTH = 100_000
"""Maximum numbers per example, for any model."""
LABEL = 100
"""Maximum characters of a label."""
ANSWERS = 50_000
"""Maximum probabilities per response: examples times classes."""
COLUMNS = 10_000
"""Maximum columns of a table."""
ROWS = 10_000
"""Maximum rows of a table."""
TEXTS, TEXT = 8, 200
"""Maximum text columns of a table that are returned beside its predictions, and letters of each of their cells."""
CHOICES = 50
"""Maximum columns of numbers that are offered as the labels of a table."""
POINTS = 200
"""Maximum points of a function."""
FUNCTIONS = 200
"""Maximum functions sampled per request."""
DRAWINGS, STROKES, STROKE_POINTS = 500, 100, 2000
"""Maximum drawings per request, strokes of a drawing, and points of a stroke."""
DRAWN_POINTS = 50_000
"""Maximum points of all drawings of a request: each takes time to draw."""
NUMBER = 1e30
"""Maximum absolute value of a number; it must be finite in single precision too."""

Label = Annotated[str, StringConstraints(min_length=1, max_length=LABEL)]
ModelName = Annotated[str, Field(max_length=200, examples=["miniimagenet"])]
TaskName = Annotated[str, Field(max_length=100)]
Number = Annotated[FiniteFloat, Field(ge=-NUMBER, le=NUMBER)]
Examples = Annotated[
    list[Annotated[list[Number], Field(max_length=WIDTH, fail_fast=True)]],
    Field(min_length=1, max_length=EXAMPLES, fail_fast=True),
]
Coordinate = Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)]
Point = tuple[Coordinate, Coordinate]
Stroke = Annotated[list[Point], Field(min_length=1, max_length=STROKE_POINTS, fail_fast=True)]
Drawing = Annotated[list[Stroke], Field(min_length=1, max_length=STROKES, fail_fast=True)]
Drawings = Annotated[list[Drawing], Field(min_length=1, max_length=DRAWINGS, fail_fast=True)]
Probability = Annotated[FiniteFloat, Field(ge=0, le=1)]
Unsure = Annotated[Probability, Field(description="A prediction of a lower probability is marked as unsure.")]
Kind = Literal["vectors", "drawings", "functions"]


class Exact(BaseModel):
    """A schema that forbids unknown fields."""

    model_config = ConfigDict(extra="forbid")


class ModelCard(Exact):
    """A model that is served."""

    name: str
    kind: Kind
    learner: str
    dim: int = Field(description="Numbers per example.")
    way: int | None = Field(description="Classes of a training task.")
    shot: int | None = Field(description="Examples per class of a training task, or points of a function.")
    classes: int = Field(description="Classes that it was trained on.")
    example: bool = Field(description="Whether /api/example.csv has rows for it.")


class Inputs(Exact):
    """Examples as rows of numbers, or as drawings: lists of strokes, each a list of points x, y; y points down."""

    examples: Examples | None = None
    drawings: Drawings | None = None

    @model_validator(mode="after")
    def one_kind(self) -> "Inputs":
        if (self.examples is None) == (self.drawings is None):
            raise ValueError("give either examples or drawings")
        points = sum(len(stroke) for drawing in self.drawings or () for stroke in drawing)
        if points > DRAWN_POINTS:
            raise ValueError(f"the drawings of a request may have {DRAWN_POINTS:,} points in all, not {points:,}")
        return self


class Adapt(Inputs):
    """Labelled examples, and the model to adapt to them."""

    model: ModelName
    labels: Annotated[list[Label], Field(min_length=1, max_length=EXAMPLES, fail_fast=True)]


class AdaptedTask(Exact):
    """An adapted classifier, kept for a while under the name `task`."""

    task: str
    classes: list[str]
    examples: int


class Predict(Inputs):
    """Examples to classify."""

    task: TaskName
    unsure_below: Unsure = 0.5


class Prediction(Exact):
    """The most probable class of an example, and the probabilities of all classes."""

    class_: str = Field(serialization_alias="class")
    probability: float
    unsure: bool
    probabilities: dict[str, float]


class Predictions(Exact):
    """Predictions in the order of the examples."""

    predictions: list[Prediction]


class FilePredictions(Predictions):
    """Predictions for a file, with the row of each, counted from 0."""

    rows: list[int]


class AdaptedFile(AdaptedTask, FilePredictions):
    """A classifier adapted to the labelled rows of a file, and its predictions for the unlabelled rows."""

    counts: dict[str, int] = Field(description="Labelled rows of each class.")
    notes: list[str] = Field(description="What looks wrong in the file: rows that repeat, also under another label.")
    texts: dict[str, list[str]] = Field(
        description=f"Other columns of text, for the predicted rows: at most {TEXTS} columns, {TEXT} letters of a cell."
    )


class FileColumns(Exact):
    """The columns of a file that may hold the labels."""

    label: str | None = Field(description="The column that is taken for the labels if none is named.")
    columns: list[str]
    rows: int


class Points(Exact):
    """A few points x, y of an unknown function."""

    points: Annotated[list[Point], Field(min_length=1, max_length=POINTS, fail_fast=True)]
    functions: Annotated[int, Field(ge=1, le=FUNCTIONS, strict=True)] = 24
    seed: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    model: ModelName = "sines-and-lines"


class Stage(Exact):
    """Sampled functions at one stage of their adaptation."""

    name: str
    functions: list[list[float]]
    mean: list[float]
    spread: list[float] = Field(description="Standard deviation over functions.")


class Functions(Exact):
    """Functions that explain the points, on a grid over x, at each stage of their adaptation."""

    x: list[float]
    stages: list[Stage]


class Problem(Exact):
    """An error, described in one line."""

    detail: str


# Bodies

Schema = TypeVar("Schema", bound=BaseModel)


def read_body(schema: type[Schema], body: bytes) -> Schema:
    """Parse a request; raises `BadInput` at the first mistake: NaN, deep nesting, an unknown key, a wrong value."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadInput(f"the body is not JSON: {error}") from error
    unknown = next((key for key in value if key not in schema.model_fields), None) if isinstance(value, dict) else None
    if unknown is not None:  # pydantic would list all of them
        raise BadInput(f"{one_line(unknown)[:100]!r} is no field of this request")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise BadInput(explain(error.errors(include_url=False, include_input=False)[0])) from error


def explain(error: Any) -> str:
    """A validation error in one line."""
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "query"))
    message = error["msg"].removeprefix("Value error, ")
    return one_line(f"{place}: {message}" if place else message)


def one_line(text: str) -> str:
    return " ".join(text.split())


def packed(request: BaseModel) -> tuple[dict[str, Any], list[np.ndarray]]:
    """A request as JSON and arrays: `unpacked` takes it apart without looking at each number."""
    fields = request.model_dump(exclude={"examples", "drawings"})
    if (examples := getattr(request, "examples", None)) is not None:
        fields["widths"] = [len(row) for row in examples]
        return fields, [np.fromiter(itertools.chain.from_iterable(examples), np.float32)]
    if (drawings := getattr(request, "drawings", None)) is not None:
        fields["strokes"] = [[len(stroke) for stroke in drawing] for drawing in drawings]
        points = [point for drawing in drawings for stroke in drawing for point in stroke]
        return fields, [np.asarray(points, np.float64)]
    return fields, []


def unpacked(fields: dict[str, Any], arrays: list[np.ndarray]) -> dict[str, Any]:
    """The fields of a request that `packed` was given, with an array for each row or stroke."""
    if (widths := fields.pop("widths", None)) is not None:
        return {**fields, "examples": split(arrays[0], widths), "drawings": None}
    if (strokes := fields.pop("strokes", None)) is not None:
        each = iter(split(arrays[0], [length for drawing in strokes for length in drawing]))
        return {
            **fields,
            "examples": None,
            "drawings": [list(itertools.islice(each, len(drawing))) for drawing in strokes],
        }
    return fields


def split(values: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1])
