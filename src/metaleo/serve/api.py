"""What requests and responses look like, and how large a request may be."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator

EXAMPLES = 2000
"""Of one request."""
CLASSES = 100
"""Of one task."""
WIDTH = 100_000
"""Numbers of one example, whatever the model."""
LABEL = 100
"""Letters of a label."""
ANSWERS = 50_000
"""Probabilities in one response: examples times classes."""
COLUMNS = 10_000
"""Of a table."""
ROWS = 10_000
"""Of a table."""
POINTS = 200
"""Of a function."""
FUNCTIONS = 200
"""Sampled at once."""
STROKES, STROKE_POINTS = 100, 2000
"""Of a drawing, and of a stroke."""
NUMBER = 1e30
"""No number may be larger: its square must be finite in single precision too."""

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
    """No field but those that are known."""

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
    """Examples as rows of numbers, or as drawings: strokes, each a list of points x, y, with y downwards."""

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
    """A classifier that is kept for a while under a name."""

    task: str
    classes: list[str]
    examples: int


class Predict(Inputs):
    """Examples to classify."""

    task: TaskName
    unsure_below: Unsure = 0.5


class Prediction(Exact):
    """The most probable class."""

    class_: str = Field(serialization_alias="class")
    probability: float
    unsure: bool
    probabilities: dict[str, float]


class Predictions(Exact):
    """In the order of the examples."""

    predictions: list[Prediction]


class FilePredictions(Predictions):
    """With the row of the file that each is about, counted from 0."""

    rows: list[int]


class AdaptedFile(AdaptedTask, FilePredictions):
    """A classifier made of the rows with a label, and its predictions for the others."""

    counts: dict[str, int] = Field(description="Labelled rows of each class.")


class Points(Exact):
    """A few points x, y of an unknown function."""

    points: Annotated[list[tuple[Coordinate, Coordinate]], Field(min_length=1, max_length=POINTS)]
    functions: Annotated[int, Field(ge=1, le=FUNCTIONS, strict=True)] = 24
    seed: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    model: ModelName = "sines-and-lines"


class Stage(Exact):
    """Sampled functions at one moment of their adaptation."""

    name: str
    functions: list[list[float]]
    mean: list[float]
    spread: list[float] = Field(description="Standard deviation over functions.")


class Functions(Exact):
    """Functions that explain the points, on a grid over x, at each stage."""

    x: list[float]
    stages: list[Stage]


class Problem(Exact):
    """What is wrong, in one line."""

    detail: str
