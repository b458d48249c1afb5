"""Schemas of requests and responses, and limits on the size of a request."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator

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
POINTS = 200
"""Maximum points of a function."""
FUNCTIONS = 200
"""Maximum functions sampled per request."""
STROKES, STROKE_POINTS = 100, 2000
"""Maximum strokes of a drawing, and points of a stroke."""
NUMBER = 1e30
"""Maximum absolute value of a number; it must be finite in single precision too."""

Label = Annotated[str, StringConstraints(min_length=1, max_length=LABEL)]
ModelName = Annotated[str, Field(max_length=200, examples=["miniimagenet"])]
TaskName = Annotated[str, Field(max_length=100)]
Number = Annotated[FiniteFloat, Field(ge=-NUMBER, le=NUMBER)]
Examples = Annotated[list[Annotated[list[Number], Field(max_length=WIDTH)]], Field(min_length=1, max_length=EXAMPLES)]
Coordinate = Annotated[FiniteFloat, Field(ge=-1e6, le=1e6)]
Stroke = Annotated[list[tuple[Coordinate, Coordinate]], Field(min_length=1, max_length=STROKE_POINTS)]
Drawing = Annotated[list[Stroke], Field(min_length=1, max_length=STROKES)]
Drawings = Annotated[list[Drawing], Field(min_length=1, max_length=EXAMPLES)]
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
        return self


class Adapt(Inputs):
    """Labelled examples, and the model to adapt to them."""

    model: ModelName
    labels: Annotated[list[Label], Field(min_length=1, max_length=EXAMPLES)]


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


class Points(Exact):
    """A few points x, y of an unknown function."""

    points: Annotated[list[tuple[Coordinate, Coordinate]], Field(min_length=1, max_length=POINTS)]
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
