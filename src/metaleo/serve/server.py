"""The server application: limits, API routes and the web page."""

import asyncio
import collections
import contextlib
import csv
import dataclasses
import functools
import importlib.resources
import io
import json
import math
import mimetypes
import os
import secrets
import socket
import weakref
import webbrowser
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import cachetools
import h11
import jax
import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from uvicorn.protocols.http.h11_impl import H11Protocol

import metaleo
from metaleo.data.feature_files import load_builtin
from metaleo.data.tables import Table, repeated_rows
from metaleo.errors import BadInput
from metaleo.estimators.classifier import (
    AdaptedClassifier,
    adapt,
    check_rows,
    check_way,
    number_classes,
    padded_length,
    predict,
)
from metaleo.learners.leo import LEO
from metaleo.serve.api import (
    ANSWERS,
    CHOICES,
    CLASSES,
    EXAMPLES,
    LABEL,
    Adapt,
    AdaptedFile,
    AdaptedTask,
    FileColumns,
    FilePredictions,
    Functions,
    ModelCard,
    Points,
    Predict,
    Prediction,
    Predictions,
    Problem,
    Stage,
    explain,
    read_body,
)
from metaleo.serve.costs import COMPILING, adapting_bytes, predicting_bytes
from metaleo.serve.function_stages import GRID, function_model, padded_points, sample_stages, sampling_bytes
from metaleo.serve.guard import HEADERS, Guard, Rates, Refused, address_of, is_loopback
from metaleo.serve.models import EMBEDDING_BYTES, ServedModel, load_served_models
from metaleo.serve.reader import Reader, return_free_memory
from metaleo.serve.turns import Turns

PAGE = Path(str(importlib.resources.files("metaleo") / "serve" / "page"))
HEAD_BYTES = 2**16
"""Maximum bytes of the head of a request."""
HEAD_SECONDS = 10.0
"""Maximum seconds for the head of a request to arrive on an open connection."""
WRITE_SECONDS = 20.0
"""Maximum seconds for a client to take what is written to it."""
INLINE = 64 * 2**10
"""Bodies of at most so many bytes are parsed at once, which takes a few milliseconds; larger ones by a `Reader`."""
CHUNKS, CHUNK_BYTES = 100, 256
"""A chunked body may have so many chunks, and one more for each so many bytes."""
LARGE_BODY, LARGE_ROWS, LARGE_DRAWINGS, LARGE_BYTES = 2**20, 128, 16, 128 * 2**20
"""What has more than this is large: it leaves room for the rest."""
Result = TypeVar("Result")
Shape = tuple[str, str, int, int]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resource limits of the server. `metaleo.serve.api` has the detailed limits on a request."""

    body_bytes: int = 8 * 2**20
    """Maximum bytes of one request body."""
    body_seconds: float = 10.0
    """Maximum seconds for a whole request to arrive."""
    bodies_bytes: int = 96 * 2**20
    """Maximum bytes of all request bodies in progress; of one address, three bodies."""
    file_bytes: int = 64 * 2**20
    """Maximum bytes of an uploaded file, once unpacked."""
    readers: int = 2
    """Processes that parse files and large bodies."""
    reader_bytes: int = 512 * 2**20
    """Maximum memory of each to parse one."""
    reader_seconds: float = 10.0
    """Maximum time of each to parse one."""
    work_bytes: int = 2**30
    """Maximum memory of all requests that are being computed; one that does not fit waits."""
    tasks: int = 512
    """Maximum adapted tasks in the cache."""
    tasks_bytes: int = 256 * 2**20
    """Maximum bytes of all cached tasks."""
    rate: float = 200.0
    """Maximum requests per second from one address, in the long run."""
    burst: int = 400
    """Maximum requests at once from one address."""
    threads: int = 2
    """Threads that adapt and predict."""
    waiting: int = 128
    """Maximum requests that wait for these threads or run in them; of one address, half of that may wait."""
    connections: int = 512
    """Maximum simultaneous connections."""
    connections_each: int = 128
    """Maximum simultaneous connections of one address."""
    shapes: int = 64
    """Maximum task shapes (number of classes, of examples) whose compiled programs are kept."""


class ServedTask(NamedTuple):
    """An adapted classifier and the model that it was adapted from."""

    served: ServedModel
    adapted: AdaptedClassifier


class StrictRequest(Request):
    """Parses JSON into the schema of its route; large bodies elsewhere, so that nobody else waits."""

    schema: type[BaseModel]

    async def json(self) -> Any:
        body, service = await self.body(), self.app.state.service
        try:
            if len(body) <= INLINE:
                return read_body(self.schema, body)
            return await service.read(lambda reader: reader.body(self.schema, body), len(body))
        except BadInput as error:
            raise HTTPException(422, str(error)) from error
        except Refused as refused:  # FastAPI would make a 400 of it
            raise HTTPException(refused.status, refused.detail) from refused


class StrictRoute(APIRoute):
    """A route whose bodies are read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field

        async def handle_strictly(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            if field is not None:
                strict.schema = field.field_info.annotation  # type: ignore[assignment]
            return await handle(strict)

        return handle_strictly


class InferenceService:
    """The models, a cache of adapted tasks, the threads that adapt and predict, and the processes that parse."""

    def __init__(self, models: dict[str, ServedModel], limits: Limits):
        self.models, self.limits = models, limits
        self.cache: cachetools.LRUCache[str, ServedTask] = cachetools.LRUCache(limits.tasks_bytes, self.size)
        self.pool = ThreadPoolExecutor(limits.threads, "work")
        self.turns = Turns(limits.threads, limits.waiting, limits.work_bytes)
        self.reading = Turns(limits.readers, limits.waiting, 0)
        self.reading_pool = ThreadPoolExecutor(limits.readers, "read")
        self.readers = [
            Reader(limits.reader_bytes, limits.reader_seconds, limits.file_bytes) for _ in range(limits.readers)
        ]
        weakref.finalize(self, stop_all, tuple(self.readers))
        self.shapes: dict[Shape, int] = {}
        """Compiled programs, and the memory that each takes to run."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a thread, or have one."""
        return len(self.turns.waiting) + len(self.turns.running)

    async def work(
        self, function: Callable[..., Result], *arguments: Any, size: int = 0, large: bool = False
    ) -> Result:
        """Run a function that takes `size` bytes in a thread, when there is room; refuse if too many wait already."""
        loop = asyncio.get_running_loop()
        async with self.turns.turn(size, large or size > LARGE_BYTES):
            try:
                return await loop.run_in_executor(self.pool, function, *arguments)
            finally:
                if size > LARGE_BYTES:
                    await loop.run_in_executor(self.pool, return_free_memory)

    async def read(self, use: Callable[[Reader], Result], size: int) -> Result:
        """Have a body of `size` bytes parsed by another process."""
        async with self.reading.turn(large=size > LARGE_BODY):
            reader = self.readers.pop()
            try:
                return await asyncio.get_running_loop().run_in_executor(self.reading_pool, use, reader)
            finally:
                self.readers.append(reader)

    async def cost(self, shape: Shape, measure: Callable[[], int]) -> int:
        """Bytes that a program takes; one that is new is compiled, which takes a second."""
        found = self.shapes.get(shape)
        return await self.work(self.remember, shape, measure, size=COMPILING) if found is None else found

    def remember(self, shape: Shape, measure: Callable[[], int]) -> int:
        """Record a compiled program; if there are too many, discard all of them, since they take memory too."""
        if shape not in self.shapes and len(self.shapes) >= self.limits.shapes:
            self.shapes.clear()
            jax.clear_caches()
            return_free_memory()
        self.shapes[shape] = measure()
        return self.shapes[shape]

    def model(self, name: str, functions: bool = False) -> ServedModel:
        served = self.models.get(name)
        if served is None:
            raise HTTPException(404, f"no model is called {name!r}; there are {', '.join(self.models)}")
        if (served.kind == "functions") != functions:
            raise BadInput(f"{name} is a model of {served.kind}" + (": use /api/functions" if not functions else ""))
        return served

    def task(self, name: str) -> ServedTask:
        found = self.cache.get(name)
        if found is None:
            raise HTTPException(404, f"no task is called {name!r}; those not used for long are forgotten: adapt again")
        return found

    async def adapt(self, served: ServedModel, request: Adapt) -> ServedTask:
        served.check_kind(request.drawings)
        if request.drawings is None:
            return await self.adapt_rows(served, served.rows(request.examples, None), request.labels)
        count = len(request.drawings)
        size = await self.adapting(served, count, request.labels)

        def work() -> ServedTask:
            return ServedTask(served, adapt(served.model, served.rows(None, request.drawings), request.labels))

        return await self.work(work, size=size + EMBEDDING_BYTES, large=count > LARGE_DRAWINGS)

    async def adapt_rows(self, served: ServedModel, rows: np.ndarray, labels: list[str]) -> ServedTask:
        check_rows(rows, served.model.structure)
        size = await self.adapting(served, len(rows), labels)
        found = await self.work(adapt, served.model, rows, labels, size=size, large=len(rows) > LARGE_ROWS)
        return ServedTask(served, found)

    async def adapting(self, served: ServedModel, count: int, labels: list[str]) -> int:
        """Bytes to adapt to so many examples; raises `BadInput` for labels that cannot be used."""
        way = len(set(labels))
        if way > CLASSES:
            raise BadInput(f"a task may have {CLASSES} classes, not {way}")
        if len(labels) > EXAMPLES:
            raise BadInput(f"a task may have {EXAMPLES:,} labelled examples, not {len(labels):,}")
        if max(map(len, labels)) > LABEL:
            raise BadInput(f"a label may have {LABEL} letters, not {max(map(len, labels))}")
        number_classes(labels, count)
        check_way(way, served.model.structure, count)
        shape = ("adapt", served.name, way, padded_length(count))
        return await self.cost(shape, lambda: adapting_bytes(served.model, way, count))

    async def predict(self, task: ServedTask, request: Predict) -> list[Prediction]:
        task.served.check_kind(request.drawings)
        if request.drawings is None:
            return await self.predict_rows(task, task.served.rows(request.examples, None), request.unsure_below)
        count = len(request.drawings)
        size = EMBEDDING_BYTES + await self.predicting(task, count)

        def work() -> list[Prediction]:
            return predictions(task, task.served.rows(None, request.drawings), request.unsure_below)

        return await self.work(work, size=size, large=count > LARGE_DRAWINGS)

    async def predict_rows(self, task: ServedTask, rows: np.ndarray, unsure_below: float) -> list[Prediction]:
        if not len(rows):
            return []
        check_rows(rows, task.served.model.structure)
        size = await self.predicting(task, len(rows))
        return await self.work(predictions, task, rows, unsure_below, size=size, large=len(rows) > LARGE_ROWS)

    async def predicting(self, task: ServedTask, count: int) -> int:
        """Bytes to classify so many examples; raises `BadInput` if that is too many."""
        way = len(task.adapted.classes)
        if count * way > ANSWERS:
            raise BadInput(f"of {way} classes, {ANSWERS // way:,} examples may be predicted at once")
        rows = task.adapted.about["rows"]  # the head of some learners holds all examples
        shape = (f"predict {rows}", task.served.name, way, padded_length(count))
        return await self.cost(shape, lambda: predicting_bytes(task.adapted, count))

    async def functions(self, served: ServedModel, request: Points) -> Functions:
        leo, points = function_model(served.model.learner), np.asarray(request.points, np.float32)
        shape = ("functions", served.name, 0, padded_points(len(points)))
        size = await self.cost(shape, lambda: sampling_bytes(leo, points))
        return await self.work(sampled, leo, points, request.functions, request.seed, size=size)

    def size(self, task: ServedTask) -> int:
        """Bytes of a task in the cache, at most those of the whole cache: a larger one is kept, but alone."""
        size = 4096 + sum(leaf.nbytes for leaf in jax.tree.leaves(task.adapted.head))
        return min(size, self.limits.tasks_bytes)

    def store(self, task: ServedTask) -> str:
        """Keep a task under a name that cannot be guessed, and forget those not used for longest."""
        while len(self.cache) >= self.limits.tasks:
            self.cache.popitem()
        name = secrets.token_urlsafe(16)
        self.cache[name] = task
        return name

    def warm_up(self) -> None:
        """Compile the programs that the first requests would otherwise wait for."""
        for served in self.models.values():
            if served.kind == "functions":
                sample_stages(function_model(served.model.learner), np.zeros((1, 2), np.float32), 24, 0)
            else:
                way = served.model.structure.way
                if served.embed is None:
                    rows = np.eye(way, served.model.structure.dim, dtype=np.float32)
                else:
                    rows = served.embed([[[(0.1, 0.1), (0.9, 0.1 * index)]] for index in range(way)])
                labels = [str(label) for label in range(way)]
                self.remember(
                    ("adapt", served.name, way, padded_length(way)),
                    functools.partial(adapting_bytes, served.model, way, way),
                )
                adapt(served.model, rows, labels).probabilities(rows[:1])
        for reader in self.readers:
            reader.start()
        for reader in self.readers:
            reader.table(b"x\n1\n", "first.csv")


def stop_all(readers: Iterable[Reader]) -> None:
    for reader in readers:
        reader.stop()


def predictions(task: ServedTask, rows: np.ndarray, unsure_below: float) -> list[Prediction]:
    found = predict(task.adapted, rows, unsure_below)
    if not all(math.isfinite(one["probability"]) for one in found):
        raise BadInput("the predictions are not finite: are these rows of the kind the model was trained on?")
    return [Prediction(class_=one.pop("class"), **one) for one in found]


def sampled(leo: LEO, points: np.ndarray, count: int, seed: int) -> Functions:
    stages = sample_stages(leo, points, count, seed)
    return Functions(
        x=numbers(GRID),
        stages=[
            Stage(name=name, functions=numbers(values), mean=numbers(values.mean(0)), spread=numbers(values.std(0)))
            for name, values in zip(stages.names, stages.functions, strict=True)
        ],
    )


def answer(found: BaseModel) -> Response:
    """A response of a schema, written here: FastAPI would look at each number twice more."""
    return Response(found.model_dump_json(by_alias=True), media_type="application/json")


def label_choices(table: Table, label: str | None) -> FileColumns:
    """The columns of text, and those of numbers if they are few."""
    own = [] if table.labels is None else [label or "label"]
    few = table.columns if len(table.columns) <= CHOICES else ()
    return FileColumns(label=next(iter(own), None), columns=[*own, *table.beside, *few], rows=len(table.vectors))


async def adapt_file(
    service: InferenceService, served: ServedModel, table: Table, unsure_below: float
) -> tuple[ServedTask, AdaptedFile]:
    labels, rows = table.labels or [], table.vectors
    known = [index for index, label in enumerate(labels) if label]
    if not known:
        raise BadInput("no row has a label; rows with one are what the model learns from")
    unknown = [index for index, label in enumerate(labels) if not label]
    if len(unknown) > EXAMPLES:
        raise BadInput(f"{len(unknown):,} rows are without a label; {EXAMPLES:,} may be predicted at once")
    task = await service.adapt_rows(served, rows[known], [labels[index] for index in known])
    about = {**task.adapted.about, "columns": list(table.columns)}  # later tables may have another column order
    task = task._replace(adapted=dataclasses.replace(task.adapted, about=about))
    counts = collections.Counter(labels)
    found = await service.predict_rows(task, rows[unknown], unsure_below)
    result = AdaptedFile(
        task="",
        classes=list(task.adapted.classes),
        examples=len(known),
        counts={name: counts[name] for name in task.adapted.classes},
        notes=list(repeated_rows(table)),
        predictions=found,
        rows=unknown,
        texts={name: [cells[index] for index in unknown] for name, cells in table.beside.items()},
    )
    return task, result


def example_table(served: ServedModel) -> str:
    """A CSV file of real rows from five unseen classes: three rows of each with a label and two without."""
    if served.sample is None:
        raise BadInput(f"there are no example rows for {served.name}")
    unseen = load_builtin(served.sample).subset("test")
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["label", *(f"x{index}" for index in range(unseen.dim))])
    chosen = [(name, unseen.read(unseen.rows[start : start + 5]))
              for name, start in zip(unseen.class_names[:5], unseen.starts, strict=False)]  # fmt: skip
    for shown, hidden in ((slice(0, 3), False), (slice(3, 5), True)):
        for name, rows in chosen:
            table.writerows(["" if hidden else name, *(f"{value:.4g}" for value in row)] for row in rows[shown])
    return text.getvalue()


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": why}
    for status, why in {
        400: "The request is not HTTP",
        401: "The token is missing",
        403: "Another origin, or another host's name",
        404: "Unknown model or task",
        408: "The request took too long to arrive",
        413: "The request is too large",
        422: "The request cannot be used",
        429: "Too many requests",
        503: "Busy",
    }.items()
}
UnsureBelow = Annotated[float, Query(ge=0, le=1, allow_inf_nan=False)]
FileName = Annotated[str, Query(max_length=200, description="Its ending, .csv, .npz or .parquet, says how it is read.")]
LabelName = Annotated[str | None, Query(max_length=200, description="The column of the labels: `label` unless named.")]
FILE_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": {
    "schema": {"type": "string", "format": "binary"}}}}}  # fmt: skip


def make_app(
    models: dict[str, ServedModel],
    limits: Limits | None = None,
    hosts: tuple[str, ...] | None = None,
    numbers: bool = False,
    token: str | None = None,
) -> FastAPI:
    """Create the application; `hosts`, `numbers` and `token` say to whom it answers (see `Guard`)."""
    limits = limits or Limits()
    service = InferenceService(models, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        stop_all(service.readers)

    app = FastAPI(
        title="Metaleo",
        version=metaleo.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    app.router.route_class = StrictRoute
    rates = Rates(limits.rate, limits.burst)
    app.add_middleware(
        Guard,  # type: ignore[arg-type]
        hosts=hosts,
        rates=rates,
        body_bytes=limits.body_bytes,
        body_seconds=limits.body_seconds,
        bodies_bytes=limits.bodies_bytes,
        numbers=numbers,
        token=token,
    )

    @app.exception_handler(BadInput)
    async def bad_input(_: Request, error: BadInput) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": explain(error.errors()[0])}, 422)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse({"detail": "a mistake in the server; its log says more"}, 500, HEADERS)

    @app.get("/api/models", responses=PROBLEMS)
    async def list_models() -> list[ModelCard]:
        """List the models that are served."""
        return [served.card() for served in service.models.values()]

    @app.post("/api/adapt", responses=PROBLEMS)
    async def adapt_examples(request: Adapt) -> AdaptedTask:
        """Make a classifier from a few labelled examples."""
        task = await service.adapt(service.model(request.model), request)
        return AdaptedTask(task=service.store(task), classes=list(task.adapted.classes), examples=len(request.labels))

    @app.post("/api/predict", responses=PROBLEMS, response_model=Predictions)
    async def predict_examples(request: Predict) -> Response:
        """Classify examples with a task that was adapted before."""
        return answer(Predictions(predictions=await service.predict(service.task(request.task), request)))

    @app.post("/api/functions", responses=PROBLEMS, response_model=Functions)
    async def sample_functions(request: Points) -> Response:
        """Sample functions that explain a few points, and show how each step of adaptation changes them."""
        return answer(await service.functions(service.model(request.model, functions=True), request))

    @app.post("/api/columns", responses=PROBLEMS, openapi_extra=FILE_BODY)
    async def columns_of_file(request: Request, name: FileName = "table.csv") -> FileColumns:
        """List the columns of a file that may hold the labels."""
        body = await request.body()
        return label_choices(await service.read(lambda reader: reader.table(body, name), len(body)), None)

    @app.post("/api/adapt-file", responses=PROBLEMS, openapi_extra=FILE_BODY, response_model=AdaptedFile)
    async def adapt_to_file(
        request: Request,
        model: Annotated[str, Query(max_length=200)],
        name: FileName = "table.csv",
        label: LabelName = None,
        unsure_below: UnsureBelow = 0.5,
    ) -> Response:
        """Make a classifier from the labelled rows of a file, and classify its unlabelled rows."""
        served, body = service.model(model), await request.body()
        if served.embed is not None:
            raise BadInput(f"{model} takes drawings, not rows of numbers")
        table = await service.read(lambda reader: reader.table(body, name, label), len(body))
        task, result = await adapt_file(service, served, table, unsure_below)
        return answer(result.model_copy(update={"task": service.store(task)}))

    @app.post("/api/predict-file", responses=PROBLEMS, openapi_extra=FILE_BODY, response_model=FilePredictions)
    async def predict_file(
        request: Request,
        task: Annotated[str, Query(max_length=100)],
        name: FileName = "table.csv",
        label: LabelName = None,
        unsure_below: UnsureBelow = 0.5,
    ) -> Response:
        """Classify all rows of a file; their labels, if any, are ignored."""
        found, body = service.task(task), await request.body()
        if found.served.embed is not None:
            raise BadInput(f"{found.served.name} takes drawings, not rows of numbers")
        table = await service.read(lambda reader: reader.table(body, name, label), len(body))
        rows = table.arranged(found.adapted.about.get("columns", ())).vectors
        if len(rows) > EXAMPLES:
            raise BadInput(f"{EXAMPLES:,} rows may be predicted at once, not {len(rows):,}")
        made = await service.predict_rows(found, rows, unsure_below)
        return answer(FilePredictions(predictions=made, rows=list(range(len(made)))))

    @app.get("/api/example.csv", responses={**PROBLEMS, 200: {"content": {"text/csv": {}}}}, response_class=Response)
    async def example(model: Annotated[str, Query(max_length=200)] = "miniimagenet") -> Response:
        """Download a small table for a model: real rows of classes that it has never seen."""
        text = await service.work(example_table, service.model(model))
        return Response(text, media_type="text/csv", headers={
            "content-disposition": f'attachment; filename="{model}-example.csv"'})  # fmt: skip

    described = functools.cache(lambda: json.dumps(app.openapi()).encode())

    @app.get("/api/openapi.json", include_in_schema=False)
    async def description() -> Response:
        return Response(described(), media_type="application/json")

    page = {file.name: (file.read_bytes(), mimetypes.guess_type(file.name)[0]) for file in PAGE.iterdir()}

    @app.get("/api/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page["docs.html"][0], media_type="text/html")

    @app.get("/", include_in_schema=False)
    @app.get("/{name}", include_in_schema=False)
    async def part_of_page(name: str = "index.html") -> Response:
        if name not in page:
            raise HTTPException(404, "there is no such page")
        content, kind = page[name]
        return Response(content, media_type=kind)

    return app


def numbers(values: np.ndarray) -> list[Any]:
    """Round to four decimals, as many as a screen can show."""
    return values.astype(np.float64).round(4).tolist()


class LargeChunks(h11.Connection):
    """Refuses a body in many small chunks: of one byte each, a few megabytes would keep the loop busy for seconds."""

    spare = 0.0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.spare = CHUNKS
        elif isinstance(event, h11.Data):
            self.spare += len(event.data) / CHUNK_BYTES - event.chunk_start
            if self.spare < 0:
                raise h11.RemoteProtocolError("a body in too many chunks")
        return event


class TimedProtocol(H11Protocol):
    """Closes connections that make no progress, for which uvicorn would wait for ever, and those above the limit.

    No request head that is completed in time, or an answer that is not taken in time.
    """

    gone, each = False, 0
    counts: collections.Counter[str]

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.conn = LargeChunks(h11.SERVER, HEAD_BYTES)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # it has its answer already
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = address_of(self.client[0]) if self.client else ""
        self.counts[self.address] += 1
        if self.counts[self.address] > self.each:
            transport.write(TOO_MANY_CONNECTIONS)
            transport.close()
        self.last, self.since, self.full = None, self.loop.time(), None
        self.check_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone = True
        self.counts[self.address] -= 1
        if not self.counts[self.address]:
            del self.counts[self.address]

    def check_progress(self) -> None:
        """Look again and again: what was the same for too long?"""
        if self.gone:
            return
        now = self.loop.time()
        if not self.transport.get_write_buffer_size():
            self.full = None
        elif self.full is None:
            self.full = now
        elif now - self.full > WRITE_SECONDS:
            self.transport.abort()  # `close` would wait for the rest to be taken
            return
        if self.conn.their_state is not h11.IDLE or self.cycle is not self.last:
            self.last, self.since = self.cycle, now
        elif now - self.since > HEAD_SECONDS:
            self.transport.close()
        self.loop.call_later(min(HEAD_SECONDS, WRITE_SECONDS) / 4, self.check_progress)


TOO_MANY_CONNECTIONS = b"""HTTP/1.1 429 Too Many Requests\r
content-type: application/json\r
content-length: 45\r
connection: close\r
\r
{"detail": "too many connections of yours"}\r
"""


def make_server(app: FastAPI, limits: Limits) -> uvicorn.Server:
    own = {"counts": collections.Counter(), "each": limits.connections_each}
    config = uvicorn.Config(
        app,
        http=type("OwnProtocol", (TimedProtocol,), own),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. It names TCP explicitly: otherwise asyncio leaves Nagle's delay of 40 ms on small packets."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        listener.close()
        raise BadInput(f"cannot listen on {host}, port {port}: {error}") from error
    return listener


def own_names(host: str) -> tuple[str, ...]:
    """The names that this machine answers to when it listens on `host`."""
    machine = () if is_loopback(host) else (socket.gethostname(), f"{socket.gethostname()}.local")
    return ("localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host, *machine)


def serve(
    models: tuple[Path, ...],
    host: str,
    port: int,
    limits: Limits,
    show: bool,
    say: Callable[[str], None],
    names: tuple[str, ...] = (),
) -> None:
    """Serve requests until interrupted. Where other machines are let in, they need a token, as in Jupyter."""
    with listen(host, port) as listener:
        say("loading the models …")
        exposed = not is_loopback(host)
        token = (os.environ.get("METALEO_TOKEN") or secrets.token_urlsafe(24)) if exposed else None
        app = make_app(load_served_models(models, say), limits, (*own_names(host), *names), exposed, token)
        app.state.service.warm_up()
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104
        address = f"http://{f'[{shown}]' if ':' in shown else shown}:{listener.getsockname()[1]}/"
        if token is not None:
            say(
                f"{host} lets other machines in: whoever has the token in the address below can use the models and "
                "this computer's time, and nothing is encrypted. To be safe, use 127.0.0.1 and a tunnel (ssh -L)."
            )
            address += f"?token={token}"
        say(f"{address}  (Ctrl-C stops it)")
        if show:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            make_server(app, limits).run([listener])
