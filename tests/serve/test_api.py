"""Every route of the server, and every limit."""

import asyncio
import io
import json
import math
import socket
import threading
import time
import zipfile
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fastapi import HTTPException

from helpers.serving import DIM, examples, running, tiny
from metaleo.checkpoints import BUILTIN_MODELS
from metaleo.errors import BadInput
from metaleo.estimators.regressor import LEORegressor
from metaleo.serve.api import COLUMNS
from metaleo.serve.guard import Rates, host_name, is_loopback, origin_host
from metaleo.serve.models import ServedModel, load_served_models
from metaleo.serve.server import InferenceService, Limits, ServedTask
from metaleo.serve.uploads import read_upload

POINTS = [[-4.0, 1.1], [-1.5, -2.0], [0.5, -0.2], [2.0, 1.7], [4.5, -2.2]]


@pytest.fixture(scope="module")
def models():
    found = load_served_models()

    def embed(drawings):
        """The first point of each drawing, in the place of a network."""
        return np.stack([np.resize(np.asarray(strokes[0][0], np.float32), DIM) for strokes in drawings])

    pen = tiny()
    return found | {"tiny": tiny(), "pen": ServedModel("pen", "drawings", pen.model, embed)}


@pytest.fixture(scope="module")
def server(models):
    with running(models) as (client, service):
        yield client, service


@pytest.fixture
def client(server):
    return server[0]


def adapt(client: httpx.Client, **changes) -> httpx.Response:
    return client.post("/api/adapt", json={"model": "tiny", **examples(), **changes})


def refused(response: httpx.Response, status: int, *words: str) -> None:
    """One line for people, with these words in it."""
    assert response.status_code == status, response.text
    detail = response.json()["detail"]
    assert isinstance(detail, str)
    assert "\n" not in detail
    for word in words:
        assert word in detail


def post(client: httpx.Client, path: str, body: str | bytes) -> httpx.Response:
    return client.post(path, content=body, headers={"content-type": "application/json"})


# Routes


def test_models_are_listed(client):
    cards = {card["name"]: card for card in client.get("/api/models").json()}
    assert set(BUILTIN_MODELS) < set(cards)
    assert cards["sines-and-lines"]["kind"] == "functions"
    assert cards["miniimagenet"] | {"kind": "vectors", "dim": 640, "way": 5, "classes": 64} == cards["miniimagenet"]
    assert cards["tiny"] == {
        "name": "tiny", "kind": "vectors", "learner": "leo", "dim": DIM, "way": 5, "shot": 1, "classes": 2,
        "example": False,
    }  # fmt: skip


def test_adapt_and_predict_are_those_of_the_library(client, models):
    from metaleo.estimators.classifier import adapt as adapt_model

    made = adapt(client, **examples(3, 2)).json()
    assert made["classes"] == ["class 0", "class 1", "class 2"]
    assert made["examples"] == 6
    rows = np.asarray(examples(3, 1, seed=1)["examples"], np.float32)
    answer = client.post("/api/predict", json={"task": made["task"], "examples": rows.tolist()}).json()
    given = examples(3, 2)
    adapted = adapt_model(models["tiny"].model, np.asarray(given["examples"], np.float32), given["labels"])
    for found, expected in zip(answer["predictions"], adapted.probabilities(rows), strict=True):
        assert list(found["probabilities"].values()) == pytest.approx(expected.tolist(), abs=1e-6)
        assert found["class"] == f"class {expected.argmax()}"
        assert found["probability"] == max(found["probabilities"].values())
        assert found["unsure"] == (found["probability"] < 0.5)


@pytest.mark.parametrize(("threshold", "unsure"), [(0.0, False), (1.0, True)])
def test_what_is_below_the_threshold_is_unsure(client, threshold, unsure):
    rows = [[1.0] * DIM]
    body = {"task": adapt(client).json()["task"], "examples": rows, "unsure_below": threshold}
    (found,) = client.post("/api/predict", json=body).json()["predictions"]
    assert found["unsure"] == unsure


def test_drawings(client):
    drawings = [[[[0.1, 0.9], [0.2, 0.2]]], [[[0.9, 0.1]], [[0.5, 0.5], [0.6, 0.6]]]]
    made = client.post("/api/adapt", json={"model": "pen", "drawings": drawings, "labels": ["one", "two"]}).json()
    answer = client.post("/api/predict", json={"task": made["task"], "drawings": drawings[:1]}).json()
    assert set(answer["predictions"][0]["probabilities"]) == {"one", "two"}
    refused(client.post("/api/predict", json={"task": made["task"], "examples": [[1.0] * DIM]}), 422, "takes drawings")
    refused(adapt(client, examples=None, drawings=drawings), 422, "not drawings")
    refused(adapt(client, drawings=drawings), 422, "either examples or drawings")
    refused(adapt(client, examples=None), 422, "either examples or drawings")


@pytest.mark.slow
def test_the_last_functions_are_those_of_the_regressor(client):
    answer = client.post("/api/functions", json={"points": POINTS, "functions": 40, "seed": 3}).json()
    regressor = LEORegressor(n_functions=40, random_state=3).fit([p[:1] for p in POINTS], [p[1] for p in POINTS])
    mean, std = regressor.predict(np.asarray(answer["x"])[:, None], return_std=True)
    last = answer["stages"][-1]
    np.testing.assert_allclose(last["mean"], mean, atol=2e-3)
    np.testing.assert_allclose(last["spread"], std, atol=2e-3)
    np.testing.assert_allclose(np.mean(last["functions"], 0), mean, atol=2e-3)
    names = [stage["name"] for stage in answer["stages"]]
    assert names[:3] == ["before any latent step", "after 1 latent step", "after 2 latent steps"]
    assert all(np.shape(stage["functions"]) == (40, len(answer["x"])) for stage in answer["stages"])

    def error(stage):
        return sum((np.interp(x, answer["x"], stage["mean"]) - y) ** 2 for x, y in POINTS)

    assert error(answer["stages"][-1]) < error(answer["stages"][0])


def test_few_programs_serve_any_number_of_points(client, count_compilations):
    for count in (1, 24):
        client.post("/api/functions", json={"points": POINTS * 2, "functions": count}).raise_for_status()
    with count_compilations() as compilations:
        for points in (POINTS, POINTS * 3, POINTS[:1]):
            for count in (1, 24):
                client.post("/api/functions", json={"points": points, "functions": count}).raise_for_status()
    assert not compilations


def table_of(format: str, unlabelled: int = 2) -> bytes:
    given = examples(2, 2)
    rows = np.asarray(given["examples"] + examples(2, 1, seed=1)["examples"][:unlabelled], np.float32)
    labels = given["labels"] + [""] * unlabelled
    if format == "npz":
        file = io.BytesIO()
        np.savez(file, features=rows, labels=np.array(labels))
        return file.getvalue()
    columns = {"label": labels, **{f"x{index}": rows[:, index] for index in range(DIM)}}
    if format == "parquet":
        import pyarrow as pa
        import pyarrow.parquet

        file = io.BytesIO()
        pyarrow.parquet.write_table(pa.table(columns), file)
        return file.getvalue()
    lines = [",".join(columns), *(",".join(map(str, line)) for line in zip(*columns.values(), strict=True))]
    return "\n".join(lines).encode()


@pytest.mark.parametrize("format", ["csv", "npz", "parquet"])
def test_files(client, format):
    query = {"model": "tiny", "name": f"mine.{format}"}
    made = client.post("/api/adapt-file", params=query, content=table_of(format)).raise_for_status().json()
    assert made["counts"] == {"class 0": 2, "class 1": 2}
    assert made["rows"] == [4, 5]
    assert made["examples"] == 4
    again = client.post("/api/predict-file", params={"task": made["task"], "name": f"x.{format}"},
                        content=table_of(format)).json()  # fmt: skip
    assert again["rows"] == list(range(6))
    for one, other in zip(made["predictions"], again["predictions"][4:], strict=True):
        assert one["class"] == other["class"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-6)
    body = {"task": made["task"], "examples": examples(2, 1, seed=1)["examples"]}
    same = client.post("/api/predict", json=body).json()["predictions"]
    assert [one["class"] for one in same] == [one["class"] for one in made["predictions"]]


def test_columns_of_a_later_file_are_known_by_their_names(client):
    rows = np.random.default_rng(0).normal(size=(6, DIM)).round(3)
    names = [f"x{index}" for index in range(DIM)]

    def text(columns, labels=()):
        picked = rows[:, [names.index(name) for name in columns]].tolist()
        head = [*(["label"] if labels else []), *columns]
        lines = [[*labels[index : index + 1], *row] for index, row in enumerate(picked)]
        return "\n".join(",".join(map(str, line)) for line in [head, *lines]).encode()

    made = client.post("/api/adapt-file", params={"model": "tiny"}, content=text(names, ["a", "b"] * 3)).json()
    found = [client.post("/api/predict-file", params={"task": made["task"]}, content=text(columns)).json()
             for columns in (names, names[::-1])]  # fmt: skip
    assert found[0]["predictions"] == found[1]["predictions"]
    refused(client.post("/api/predict-file", params={"task": made["task"]}, content=text(names[1:])), 422, "'x0'")


def test_another_column_may_hold_the_labels_and_texts_stand_beside(client):
    lines = [f"{kind},say {row},{','.join(map(str, values))}" for row, (kind, values) in enumerate(
        zip(["a", "b", "a", "b", ""], np.eye(5, DIM).tolist(), strict=True))]  # fmt: skip
    head = ",".join(["intent", "sentence", *(f"x{index}" for index in range(DIM))])
    table = "\n".join([head, *lines]).encode()
    found = client.post("/api/columns", params={"name": "mine.csv"}, content=table).json()
    assert found["label"] is None
    assert found["columns"] == ["intent", "sentence", *(f"x{index}" for index in range(DIM))]
    query = {"model": "tiny", "name": "mine.csv"}
    refused(client.post("/api/adapt-file", params=query, content=table), 422, "no row has a label")
    made = client.post("/api/adapt-file", params={**query, "label": "intent"}, content=table).json()
    assert (made["classes"], made["rows"], made["texts"]) == (["a", "b"], [4], {"sentence": ["say 4"]})
    assert made["notes"] == []
    contrary = table + b"\n" + lines[0].replace("a,", "b,", 1).encode()
    made = client.post("/api/adapt-file", params={**query, "label": "intent"}, content=contrary).json()
    assert made["notes"] == ["1 of 6 rows repeat an earlier row under another label; the first is row 6, as row 1"]
    refused(client.post("/api/adapt-file", params={**query, "label": "no"}, content=table), 422, "no column 'no'")
    assert client.post("/api/columns", params={"name": "x.csv"}, content=table_of("csv")).json()["label"] == "label"


def test_files_are_parsed_by_another_process(client, monkeypatch):
    task = adapt(client).json()["task"]
    monkeypatch.setattr("metaleo.serve.reader.Reader.ask", lambda *_: (_ for _ in ()).throw(BadInput("elsewhere")))
    for path in ("columns", "adapt-file?model=tiny", f"predict-file?task={task}"):
        refused(client.post(f"/api/{path}", content=table_of("csv")), 422, "elsewhere")


def test_files_that_cannot_be_used(client):
    def send(body: bytes, name: str = "mine.csv", model: str = "tiny") -> httpx.Response:
        return client.post("/api/adapt-file", params={"model": model, "name": name}, content=body)

    refused(send(b"", "mine.csv"), 422, "mine.csv is empty")
    refused(send(b"x", "mine.exe"), 422, "must end in .csv, .npz or .parquet")
    refused(send(b"not a zip", "../../mine.npz"), 422, "mine.npz cannot be read")
    refused(send(b"PAR1" + bytes(50), "mine.parquet"), 422, "mine.parquet cannot be read")
    refused(send(bytes(range(256)) * 9), 422, "mine.csv")
    refused(send(b"label,a\nx,1\ny,2"), 422, "rows have 1 numbers")
    refused(send(b"a,b\n1,2\n"), 422, "no row has a label")
    refused(send(b"label," + b",".join(b"c%d" % i for i in range(COLUMNS)) + b"\n"), 422, "10,000 columns")
    header = ",".join(f"x{index}" for index in range(DIM))
    numbers = ",".join("1" * DIM)
    refused(send(f"label,{header}\nx,{numbers}\nx,{numbers}".encode()), 422, "at least 2 classes")
    refused(send(f"label,{header}\nx,{numbers}\n{'y' * 101},{numbers}".encode()), 422, "100 letters")
    refused(send(f"label,{header}\nx,{numbers}\ny,{numbers[:-1]}nan".encode()), 422, "finite")
    many = "".join(f"label {index},{numbers}\n" for index in range(101))
    refused(send(f"label,{header}\n{many}".encode()), 422, "100 classes")
    refused(send(table_of("csv"), model="pen"), 422, "takes drawings")
    refused(send(table_of("csv"), model="nobody"), 404, "nobody")
    refused(client.post("/api/predict-file", params={"task": "x"}, content=b"a"), 404)


def test_small_files_that_unpack_to_large_ones():
    """Zeros, and a text that is stored once and meant many times."""
    import pyarrow as pa
    import pyarrow.parquet

    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("features.npy", bytes(40_000_000))
    assert len(packed.getvalue()) < 50_000
    with pytest.raises(BadInput, match="unpacked"):
        read_upload(packed.getvalue(), "x.npz", 30_000_000)
    for columns in (
        {"x": np.zeros(8_000_000, np.float32)},
        {"text": pa.DictionaryArray.from_arrays(pa.array(np.zeros(10_000, np.int32)), ["long " * 1000])},
    ):
        file = io.BytesIO()
        pyarrow.parquet.write_table(pa.table(columns), file)
        assert len(file.getvalue()) < 1_000_000
        with pytest.raises(BadInput, match=r"unpacked|rows"):
            read_upload(file.getvalue(), "x.parquet", 30_000_000)


def test_many_short_rows_take_more_room_than_their_file():
    """Each label becomes a text, each number four bytes."""
    file = io.BytesIO()
    np.savez_compressed(file, features=np.zeros((20_000, 1), np.uint8), labels=np.zeros(20_000, np.uint8))
    with pytest.raises(BadInput, match="10,000 rows, not 20,000"):
        read_upload(file.getvalue(), "x.npz", 30_000_000)
    with pytest.raises(BadInput, match="10,000 rows, not 20,000"):
        read_upload(b"x,label\n" + b"1,a\n" * 20_000, "x.csv", 30_000_000)


def test_the_example_is_a_table_that_can_be_sent_back(client):
    response = client.get("/api/example.csv", params={"model": "miniimagenet"})
    assert response.headers["content-type"].startswith("text/csv")
    query = {"model": "miniimagenet", "name": "example.csv"}
    made = client.post("/api/adapt-file", params=query, content=response.content).raise_for_status().json()
    assert len(made["classes"]) == 5
    assert len(made["predictions"]) == 10
    refused(client.get("/api/example.csv", params={"model": "tiny"}), 422, "no example rows")


def test_page_and_description_come_from_here_alone(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    for path in ("/", "/api/docs", "/main.js", "/functions.js", "/draw.js", "/data.js", "/style.css", "/help.html"):
        text = client.get(path).raise_for_status().text
        assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    described = client.get("/api/openapi.json").json()
    assert "/api/adapt" in described["paths"]
    for path in ("/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/nothing", "/api/nothing"):
        assert client.get(path).status_code == 404


# Limits


def test_unknown_models_and_tasks(client):
    refused(adapt(client, model="nobody"), 404, "no model is called 'nobody'", "tiny")
    refused(adapt(client, model="sines-and-lines"), 422, "/api/functions")
    refused(client.post("/api/functions", json={"points": POINTS, "model": "tiny"}), 422, "model of vectors")
    refused(client.post("/api/predict", json={"task": "x", "examples": [[1.0]]}), 404, "adapt again")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"examples": [[1.0] * 7, [1.0] * 8]}, ["examples.0 has 7 numbers", "rows of 8"]),
        ({"examples": [[1.0] * 8, []]}, ["examples.1 has 0 numbers"]),
        ({"examples": []}, ["at least 1 item"]),
        ({"examples": [[1e31] * 8] * 2}, ["less than or equal to 1000"]),
        ({"examples": [["x"] * 8] * 2}, ["examples.0.0", "number"]),
        ({"examples": "x"}, ["examples"]),
        ({"labels": ["a", "a"]}, ["at least 2 classes"]),
        ({"labels": ["a"]}, ["2 examples need as many labels"]),
        ({"labels": ["a", ""]}, ["labels.1"]),
        ({"labels": ["a", "b" * 101]}, ["labels.1"]),
        ({"labels": ["a", 3]}, ["labels.1"]),
        ({"more": 1}, ["more"]),
        ({"examples": [[0.0] * 8] * 2001, "labels": ["a"] * 2001}, ["2000"]),
        ({"examples": [[0.0] * 8] * 101, "labels": [str(index) for index in range(101)]}, ["100 classes"]),
    ],
)
def test_examples_that_cannot_be_used(client, changes, words):
    refused(adapt(client, **changes), 422, *words)


def test_extreme_numbers_are_answered(client):
    """Large as they are, they are finite."""
    made = adapt(client, examples=[[1e30] * 8, [-1e30] * 8])
    assert made.status_code in (200, 422)
    task = adapt(client).json()["task"]
    for value in (1e30, -1e30, 1e-300, 0.0):
        answer = client.post("/api/predict", json={"task": task, "examples": [[value] * 8]})
        if abs(value) > 1:
            refused(answer, 422, "at most")
        else:
            assert math.isfinite(answer.json()["predictions"][0]["probability"])


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "nan"])
def test_numbers_that_are_none(client, value):
    refused(post(client, "/api/functions", f'{{"points": [[1, {value}]]}}'), 422)
    rows = json.dumps(examples()).replace("class 0", "class 2")[:-1].replace("[[", f"[[{value}, ", 1)
    refused(post(client, "/api/adapt", rows + ', "model": "tiny"}'), 422)


@pytest.mark.parametrize("depth", [300, 100_000, 1_000_000])
def test_deep_nesting(client, depth):
    refused(post(client, "/api/adapt", "[" * depth), 422, "JSON")
    body = '{"model": "tiny", "labels": ["a"], "examples": ' + "[" * depth + "]" * depth + "}"
    refused(post(client, "/api/adapt", body), 422)


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[]", b"\xff\xfe", b'{"model": "\\ud800"}', b'{"a":1}{"a":2}'])
def test_malformed_bodies(client, body):
    refused(post(client, "/api/adapt", body), 422)


def test_other_content_and_methods(client):
    refused(client.post("/api/adapt", content=json.dumps({"model": "tiny", **examples()})), 422)
    refused(client.get("/api/adapt"), 405)
    refused(client.delete("/api/models"), 405)


def test_limits_of_functions_and_drawings(client):
    refused(client.post("/api/functions", json={"points": []}), 422, "points")
    refused(client.post("/api/functions", json={"points": [[0, 0]] * 201}), 422, "200")
    refused(client.post("/api/functions", json={"points": [[0, 1e7]]}), 422)
    refused(client.post("/api/functions", json={"points": [[0, 0]], "functions": 201}), 422)
    refused(client.post("/api/functions", json={"points": [[0, 0]], "seed": -1}), 422)
    assert client.post("/api/functions", json={"points": [[1e6, -1e6]] * 200}).status_code in (200, 422)
    for drawing in ([], [[]], [[[0, 0]] * 2001], [[[0, 0]]] * 101, [[[0, 0, 0]]], [[[0, 1e7]]]):
        body = {"model": "pen", "drawings": [drawing] * 2, "labels": ["a", "b"]}
        refused(client.post("/api/adapt", json=body), 422)


def test_answers_are_bounded(client):
    task = adapt(client, **examples(8, 1) | {"examples": np.eye(100, 8).tolist(), "labels": list(map(str, range(100)))})
    body = {"task": task.json()["task"], "examples": [[1.0] * 8] * 501}
    refused(client.post("/api/predict", json=body), 422, "500 examples")


def test_what_never_fits_is_refused_before_it_is_computed(models, monkeypatch):
    """Each kind of work is admitted with the memory of its program; of drawings, also that of their network."""
    drawings = {"drawings": [[[[0.1, 0.9]]]] * 2, "labels": ["a", "b"]}
    with running(models) as (client, _):
        task = adapt(client).json()["task"]
        pen = client.post("/api/adapt", json={"model": "pen", **drawings}).json()["task"]
        monkeypatch.setattr("metaleo.serve.server.EMBEDDING_BYTES", 5 * 2**30)
        refused(client.post("/api/adapt", json={"model": "pen", **drawings}), 413, "MB of memory")
        refused(client.post("/api/predict", json={"task": pen, "drawings": drawings["drawings"]}), 413, "MB of memory")
        for name in ("predicting_bytes", "sampling_bytes"):
            monkeypatch.setattr(f"metaleo.serve.server.{name}", lambda *_: 5 * 2**30)
        rows = examples()["examples"]
        refused(client.post("/api/predict", json={"task": task, "examples": rows}), 413, "5,120 MB of memory")
        refused(client.post("/api/functions", json={"points": POINTS}), 413, "5,120 MB of memory")


def test_large_bodies(models):
    with running(models, Limits(body_bytes=10_000)) as (client, _):
        refused(post(client, "/api/adapt", b" " * 10_001), 413, "10,000 bytes")
        refused(post(client, "/api/adapt", b" " * 3_000_000), 413)

        def endless():
            for _ in range(100):
                yield b" " * 10_000

        refused(client.post("/api/adapt", content=endless()), 413)  # without a length in its head
        assert adapt(client).status_code == 200


def test_too_many_large_bodies_at_once(models):
    limits = Limits(bodies_bytes=60_000, body_seconds=5.0)
    with running(models, limits) as (client, _):
        held = socket.create_connection((client.base_url.host, client.base_url.port))
        held.sendall(b"POST /api/adapt HTTP/1.1\r\nhost: localhost\r\ncontent-length: 55001\r\n\r\n" + b" " * 55_000)
        time.sleep(0.3)
        refused(post(client, "/api/adapt", b" " * 10_000), 503, "try again")
        assert client.get("/api/models").status_code == 200
        held.close()
        time.sleep(0.3)
        refused(post(client, "/api/adapt", b" " * 10_000), 422)  # there is room again


def test_a_body_that_dribbles(models):
    with running(models, Limits(body_seconds=0.5)) as (client, _):
        slow = socket.create_connection((client.base_url.host, client.base_url.port))
        slow.sendall(b"POST /api/adapt HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
        begin = time.monotonic()
        slow.settimeout(0.1)
        answer = b""
        while not answer and time.monotonic() - begin < 20:
            slow.send(b" ")
            try:
                answer = slow.recv(10_000)
            except TimeoutError:
                assert client.get("/api/models").status_code == 200  # nobody else waits
        assert b"408" in answer
        while more := slow.recv(10_000):
            answer += more
        assert b"within 0.5 seconds" in answer
        slow.close()


def test_connections_without_a_request_are_closed(models, monkeypatch):
    monkeypatch.setattr("metaleo.serve.server.HEAD_SECONDS", 0.2)
    with running(models) as (client, _):
        for start in (b"", b"GET / HTTP/1.1\r\nhost: lo"):
            silent = socket.create_connection((client.base_url.host, client.base_url.port))
            silent.sendall(start)
            silent.settimeout(20)
            assert silent.recv(100) == b""
            silent.close()


def test_only_so_many_tasks_are_kept(models):
    with running(models, Limits(tasks=5, rate=1e6, burst=10**6)) as (client, service):
        first = adapt(client).json()["task"]
        question = {"task": first, "examples": [[1.0] * DIM]}
        for _ in range(100):
            adapt(client).raise_for_status()
            assert client.post("/api/predict", json=question).status_code == 200  # used again and again, it stays
        assert len(service.cache) == 5
        for _ in range(5):
            adapt(client)
        refused(client.post("/api/predict", json=question), 404, "forgotten")


def task_of(size):
    """A task of so many bytes, as the cache counts them."""
    return ServedTask(None, SimpleNamespace(head=np.zeros(size - 4096, np.int8)))


def test_kept_tasks_are_bounded_in_number_and_size():
    service = InferenceService({}, Limits(tasks=10, tasks_bytes=100_000))
    tasks = [task_of(5000) for _ in range(1000)]
    names = [service.store(task) for task in tasks]
    assert (len(service.cache), service.cache.currsize) == (10, 50_000)
    assert len(set(names)) == 1000
    assert all(len(name) >= 20 for name in names)
    assert [service.task(name) for name in names[-10:]] == tasks[-10:]
    with pytest.raises(HTTPException, match="adapt again"):
        service.task(names[0])
    halves = [service.store(task_of(50_000)) for _ in range(2)]
    assert set(service.cache) == set(halves)
    large = service.store(task_of(500_000))  # more than fits: it stays, alone
    assert set(service.cache) == {large}
    small = service.store(task_of(5000))
    assert set(service.cache) == {small}
    assert service.cache.currsize == 5000


def test_the_task_that_was_used_least_recently_is_forgotten():
    service = InferenceService({}, Limits(tasks=2))
    first, second = service.store(task_of(5000)), service.store(task_of(5000))
    service.task(first)
    third = service.store(task_of(5000))
    assert set(service.cache) == {first, third}
    assert second not in service.cache


@pytest.mark.slow
def test_programs_are_forgotten(models):
    with running(models, Limits(shapes=3, rate=1e6, burst=10**6)) as (client, service):
        for way in range(2, 8):
            adapt(client, **examples(way)).raise_for_status()
            assert len(service.shapes) <= 3


def test_freed_memory_is_given_back(monkeypatch):
    """After programs were discarded, and after large work: else the heap only grows."""
    given_back = []
    monkeypatch.setattr("metaleo.serve.server.return_free_memory", lambda: given_back.append(1))
    service = InferenceService({}, Limits(shapes=2))
    for way in range(5):
        service.remember(("adapt", "m", way, 1), lambda: 1)
    assert (len(service.shapes), len(given_back)) == (1, 2)
    for size in (10, 200 * 2**20):
        assert asyncio.run(service.work(lambda: 7, size=size)) == 7
    assert len(given_back) == 3


def test_rates(models):
    with running(models, Limits(rate=1.0, burst=5)) as (client, _):
        answers = [client.get("/api/models") for _ in range(8)]
        assert [answer.status_code for answer in answers[:5]] == [200] * 5
        refused(answers[-1], 429, "1 per second")
        assert answers[-1].headers["retry-after"] == "1"


def test_a_bucket_fills_again():
    now = [0.0]
    rates = Rates(10.0, 3, lambda: now[0])
    assert [rates.admit("a") for _ in range(4)] == [True, True, True, False]
    assert rates.admit("b")
    now[0] = 0.1
    assert [rates.admit("a") for _ in range(2)] == [True, False]
    now[0] = 100.0
    assert [rates.admit("a") for _ in range(4)] == [True, True, True, False]
    for number in range(20_000):
        rates.admit(str(number))
    assert len(rates.buckets) <= 10_000


def test_busy(models):
    """While the threads work and the queue is full, others are sent away, and the page still answers."""
    go_on = threading.Event()
    slow = tiny()
    blocked = ServedModel("slow", "drawings", slow.model, lambda drawings: go_on.wait(60))
    body = {"model": "slow", "drawings": [[[[0, 0]]]] * 2, "labels": ["a", "b"]}
    with running(models | {"slow": blocked}, Limits(threads=1, waiting=2)) as (client, service):

        def send():
            with httpx.Client(base_url=client.base_url, timeout=60) as other:
                other.post("/api/adapt", json=body)

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        while service.waiting < 2:
            time.sleep(0.01)
        refused(adapt(client), 503, "busy")
        assert client.get("/").status_code == 200
        go_on.set()
        for thread in threads:
            thread.join()


def test_a_mistake_of_ours_is_told_without_its_details(models, capfd):
    def broken(drawings):
        raise RuntimeError("secret")

    body = {"model": "broken", "drawings": [[[[0, 0]]]] * 2, "labels": ["a", "b"]}
    with running(models | {"broken": ServedModel("broken", "drawings", tiny().model, broken)}) as (client, _):
        answer = client.post("/api/adapt", json=body)
    refused(answer, 500)
    assert "secret" not in answer.text
    assert "secret" in capfd.readouterr().err


def test_names_of_other_hosts_and_pages_of_other_origins(client):
    for host in ("evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]"):
        refused(client.get("/api/models", headers={"host": host}), 403)
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:8765"):
        assert client.get("/api/models", headers={"host": host}).status_code == 200
    for origin in ("http://evil.example", "null", "http://localhost:1", "http://["):
        refused(client.get("/api/models", headers={"origin": origin}), 403, "origins")
    own = str(client.base_url).rstrip("/")
    answer = client.get("/api/models", headers={"origin": own})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


def test_host_names():
    assert host_name("[::1]:80") == "[::1]"
    assert host_name("Local:80") == "local"
    assert origin_host("https://A.b:1") == "a.b:1"
    assert is_loopback("127.0.0.2")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")


def test_models_by_path(tmp_path):
    import shutil

    from metaleo.checkpoints import builtin_model_path

    shutil.copy(builtin_model_path("miniimagenet"), tmp_path / "mine.safetensors")
    (tmp_path / "run").mkdir()
    shutil.copy(builtin_model_path("sines-and-lines"), tmp_path / "run" / "model.safetensors")
    found = load_served_models([tmp_path / "mine.safetensors", tmp_path / "run"])
    assert {"mine", "run", *BUILTIN_MODELS} == set(found)
    assert found["run"].kind == "functions"
    said = []
    (tmp_path / "run").rename(tmp_path / "intents")
    found = load_served_models(
        [tmp_path / "intents", tmp_path / "mine.safetensors", tmp_path / "mine.safetensors"], said.append
    )
    assert set(found) == {*BUILTIN_MODELS, "intents-2", "mine", "mine-2"}
    assert (found["intents"].kind, found["intents-2"].kind) == ("vectors", "functions")
    assert [line.split("/")[-1] for line in said] == [
        "intents is served as intents-2: another model is called intents",
        "mine.safetensors is served as mine-2: another model is called mine",
    ]
    with pytest.raises(BadInput):
        load_served_models([tmp_path / "nothing"])


def test_commands_that_cannot_be_run(capsys):
    from metaleo.cli import main

    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    for flags in (["--port", port], ["--port", "70000"], ["--rate", "0"], ["--tasks", "0"], ["--megabytes", "900"]):
        with pytest.raises(SystemExit) as stopped:
            main(["serve", *flags])
        assert stopped.value.code == 2
        assert "metaleo: " in capsys.readouterr().err
    taken.close()
