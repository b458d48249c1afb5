"""The server application: limits, API routes and the web page."""

import asyncio
import contextlib
import csv
import dataclasses
import importlib.resources
import io
import math
import secrets
import socket
import webbrowser
from collections.abc import Callable, Coroutine
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
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from uvicorn.protocols.http.h11_impl import H11Protocol

import metaleo
from metaleo.data.feature_files import load_builtin
from metaleo.data.tables import Table
from metaleo.errors import BadInput
from metaleo.estimators.classifier import AdaptedClassifier, adapt, padded_length, predict
from metaleo.serve.api import (
    ANSWERS,
    CLASSES,
    EXAMPLES,
    LABEL,
    Adapt,
    AdaptedFile,
    AdaptedTask,
    FilePredictions,
    Functions,
    ModelCard,
    Points,
    Predict,
    Prediction,
    Predictions,
    Problem,
    Stage,
)
from metaleo.serve.function_stages import GRID, function_model, sample_stages
from metaleo.serve.guard import HEADERS, Guard, Rates, is_loopback
from metaleo.serve.models import ServedModel, load_served_models
from metaleo.serve.uploads import read_upload

PAGE = Path(str(importlib.resources.files("metaleo") / "serve" / "page"))
HEAD_SECONDS = 10.0
"""Maximum seconds for the head of a request to arrive on an open connection."""
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resource limits of the server. `metaleo.serve.api` has the detailed limits on a request."""

    body_bytes: int = 8 * 2**20
    """Maximum bytes of one request body."""
    body_seconds: float = 10.0
    """Maximum seconds for a whole request to arrive."""
    bodies_bytes: int = 48 * 2**20
    """Maximum bytes of all request bodies in progress; parsed, they may take ten times as much."""
    file_bytes: int = 64 * 2**20
    """Maximum bytes of an uploaded file, once unpacked."""
    tasks: int = 512
    """Maximum adapted tasks in the cache."""
    tasks_bytes: int = 256 * 2**20
    """Maximum bytes of all cached tasks."""
    rate: float = 1000.0
    """Maximum requests per second from one address, in the long run."""
    burst: int = 2000
    """Maximum requests at once from one address."""
    threads: int = 2
    """Threads that adapt and predict."""
    waiting: int = 64
    """Maximum requests that wait for these threads or run in them."""
    connections: int = 512
    """Maximum simultaneous connections."""
    shapes: int = 100
    """Maximum task shapes (number of classes, of examples) whose compiled programs are kept."""


class ServedTask(NamedTuple):
    """An adapted classifier and the model that it was adapted from."""

    served: ServedModel
    adapted: AdaptedClassifier


class StrictRequest(Request):
    """Parses JSON, and refuses NaN and nesting so deep that a parser runs out of stack."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(422, f"the body is not JSON: {error}") from error


class StrictRoute(APIRoute):
    """A route whose bodies are read by `StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


class InferenceService:
    """The models, a cache of adapted tasks, and the threads that adapt and predict."""

    def __init__(self, models: dict[str, ServedModel], limits: Limits):
        self.models, self.limits = models, limits
        self.cache: cachetools.LRUCache[str, ServedTask] = cachetools.LRUCache(limits.tasks_bytes, self.size)
        self.pool = ThreadPoolExecutor(limits.threads, "work")
        self.waiting = 0
        self.shapes: set[tuple[str, str, int, int]] = set()

    async def work(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function in a thread, so that the event loop stays free; refuse if too many requests wait already."""
        if self.waiting >= self.limits.waiting:
            raise HTTPException(503, "busy: too many requests are waiting; try again in a moment", {"Retry-After": "1"})
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)
        finally:
            self.waiting -= 1

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

    def adapt(self, served: ServedModel, rows: np.ndarray, labels: list[str]) -> ServedTask:
        if len(set(labels)) > CLASSES:
            raise BadInput(f"a task may have {CLASSES} classes, not {len(set(labels))}")
        if len(labels) > EXAMPLES:
            raise BadInput(f"a task may have {EXAMPLES:,} labelled examples, not {len(labels):,}")
        if max(map(len, labels)) > LABEL:
            raise BadInput(f"a label may have {LABEL} letters, not {max(map(len, labels))}")
        self.remember(("adapt", served.name, len(set(labels)), padded_length(len(labels))))
        return ServedTask(served, adapt(served.model, rows, labels))

    def predict(self, task: ServedTask, rows: np.ndarray, unsure_below: float) -> list[Prediction]:
        classes = task.adapted.classes
        if not len(rows):
            return []
        if len(rows) * len(classes) > ANSWERS:
            raise BadInput(f"of {len(classes)} classes, {ANSWERS // len(classes):,} examples may be predicted at once")
        self.remember(("predict", task.served.name, len(classes), padded_length(len(rows))))
        found = predict(task.adapted, rows, unsure_below)
        if not all(math.isfinite(one["probability"]) for one in found):
            raise BadInput("the predictions are not finite: are these rows of the kind the model was trained on?")
        return [Prediction(class_=one.pop("class"), **one) for one in found]

    def remember(self, shape: tuple[str, str, int, int]) -> None:
        """Record a compiled shape; if there are too many, discard all compiled programs, since they take memory."""
        if shape not in self.shapes and len(self.shapes) >= self.limits.shapes:
            self.shapes.clear()
            jax.clear_caches()
        self.shapes.add(shape)

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
                adapt(served.model, rows, [str(label) for label in range(way)]).probabilities(rows[:1])


def adapt_file(
    service: InferenceService, served: ServedModel, table: Table, unsure_below: float
) -> tuple[ServedTask, AdaptedFile]:
    labels = table.labels or []
    rows = np.asarray(table.vectors, np.float32)
    known = [index for index, label in enumerate(labels) if label]
    if not known:
        raise BadInput("no row has a label; rows with one are what the model learns from")
    unknown = [index for index, label in enumerate(labels) if not label]
    if len(unknown) > EXAMPLES:
        raise BadInput(f"{len(unknown):,} rows are without a label; {EXAMPLES:,} may be predicted at once")
    task = service.adapt(served, rows[known], [labels[index] for index in known])
    about = {**task.adapted.about, "columns": list(table.columns)}  # later tables may have another column order
    task = task._replace(adapted=dataclasses.replace(task.adapted, about=about))
    counts = {name: labels.count(name) for name in task.adapted.classes}
    found = service.predict(task, rows[unknown], unsure_below)
    result = AdaptedFile(
        task="", classes=list(task.adapted.classes), examples=len(known), counts=counts, predictions=found, rows=unknown
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


def explain(error: RequestValidationError) -> str:
    """The first validation error, in one line."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": why}
    for status, why in {
        400: "The request is not HTTP",
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
FILE_BODY = {"requestBody": {"required": True, "content": {"application/octet-stream": {
    "schema": {"type": "string", "format": "binary"}}}}}  # fmt: skip


def make_app(
    models: dict[str, ServedModel], limits: Limits | None = None, hosts: tuple[str, ...] | None = None
) -> FastAPI:
    """Create the application; with `hosts`, it answers only requests to these host names."""
    limits = limits or Limits()
    service = InferenceService(models, limits)
    app = FastAPI(
        title="Metaleo", version=metaleo.__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json"
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
    )

    @app.exception_handler(BadInput)
    async def bad_input(_: Request, error: BadInput) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": explain(error)}, 422)

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
        served = service.model(request.model)

        def work() -> ServedTask:
            return service.adapt(served, served.rows(request.examples, request.drawings), request.labels)

        task = await service.work(work)
        return AdaptedTask(task=service.store(task), classes=list(task.adapted.classes), examples=len(request.labels))

    @app.post("/api/predict", responses=PROBLEMS)
    async def predict_examples(request: Predict) -> Predictions:
        """Classify examples with a task that was adapted before."""
        task = service.task(request.task)

        def work() -> list[Prediction]:
            return service.predict(task, task.served.rows(request.examples, request.drawings), request.unsure_below)

        return Predictions(predictions=await service.work(work))

    @app.post("/api/functions", responses=PROBLEMS)
    async def sample_functions(request: Points) -> Functions:
        """Sample functions that explain a few points, and show how each step of adaptation changes them."""
        leo = function_model(service.model(request.model, functions=True).model.learner)
        points = np.asarray(request.points, np.float32)
        stages = await service.work(sample_stages, leo, points, request.functions, request.seed)
        return Functions(
            x=numbers(GRID),
            stages=[
                Stage(name=name, functions=numbers(values), mean=numbers(values.mean(0)), spread=numbers(values.std(0)))
                for name, values in zip(stages.names, stages.functions, strict=True)
            ],
        )

    @app.post("/api/adapt-file", responses=PROBLEMS, openapi_extra=FILE_BODY)
    async def adapt_to_file(
        request: Request,
        model: Annotated[str, Query(max_length=200)],
        name: FileName = "table.csv",
        unsure_below: UnsureBelow = 0.5,
    ) -> AdaptedFile:
        """Make a classifier from the labelled rows of a file, and classify its unlabelled rows."""
        served, body = service.model(model), await request.body()
        if served.embed is not None:
            raise BadInput(f"{model} takes drawings, not rows of numbers")
        task, result = await service.work(
            lambda: adapt_file(service, served, read_upload(body, name, limits.file_bytes), unsure_below)
        )
        return result.model_copy(update={"task": service.store(task)})

    @app.post("/api/predict-file", responses=PROBLEMS, openapi_extra=FILE_BODY)
    async def predict_file(
        request: Request,
        task: Annotated[str, Query(max_length=100)],
        name: FileName = "table.csv",
        unsure_below: UnsureBelow = 0.5,
    ) -> FilePredictions:
        """Classify all rows of a file; their labels, if any, are ignored."""
        found, body = service.task(task), await request.body()
        if found.served.embed is not None:
            raise BadInput(f"{found.served.name} takes drawings, not rows of numbers")

        def work() -> list[Prediction]:
            table = read_upload(body, name, limits.file_bytes).arranged(found.adapted.about.get("columns", ()))
            rows = np.asarray(table.vectors, np.float32)
            if len(rows) > EXAMPLES:
                raise BadInput(f"{EXAMPLES:,} rows may be predicted at once, not {len(rows):,}")
            return service.predict(found, rows, unsure_below)

        made = await service.work(work)
        return FilePredictions(predictions=made, rows=list(range(len(made))))

    @app.get("/api/example.csv", responses={**PROBLEMS, 200: {"content": {"text/csv": {}}}}, response_class=Response)
    async def example(model: Annotated[str, Query(max_length=200)] = "miniimagenet") -> Response:
        """Download a small table for a model: real rows of classes that it has never seen."""
        text = await service.work(example_table, service.model(model))
        return Response(text, media_type="text/csv", headers={
            "content-disposition": f'attachment; filename="{model}-example.csv"'})  # fmt: skip

    @app.get("/api/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(PAGE / "docs.html")

    page = {file.name: file for file in PAGE.iterdir()}

    @app.get("/", include_in_schema=False)
    @app.get("/{name}", include_in_schema=False)
    async def part_of_page(name: str = "index.html") -> FileResponse:
        if name not in page:
            raise HTTPException(404, "there is no such page")
        return FileResponse(page[name])

    return app


def numbers(values: np.ndarray) -> list[Any]:
    """Round to four decimals, as many as a screen can show."""
    return values.astype(np.float64).round(4).tolist()


class TimedProtocol(H11Protocol):
    """Closes connections on which no request head is completed in time; uvicorn itself would wait for ever."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, self.check_progress, None)

    def check_progress(self, last: Any) -> None:
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.cycle is last:
            self.transport.close()
        else:
            self.loop.call_later(HEAD_SECONDS, self.check_progress, self.cycle)


def make_server(app: FastAPI, limits: Limits) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=TimedProtocol,
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


def serve(
    models: tuple[Path, ...], host: str, port: int, limits: Limits, show: bool, say: Callable[[str], None]
) -> None:
    """Serve requests until interrupted."""
    with listen(host, port) as listener:
        say("loading the models …")
        hosts = ("localhost", "127.0.0.1", "[::1]", host) if is_loopback(host) else None
        app = make_app(load_served_models(models), limits, hosts)
        app.state.service.warm_up()
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/"
        say(f"{address}  (Ctrl-C stops it)")
        if show:
            webbrowser.open(address)
        with contextlib.suppress(KeyboardInterrupt):
            make_server(app, limits).run([listener])
