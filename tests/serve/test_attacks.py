"""What hostile clients have tried: the server's memory stays bounded, and nobody else waits for them."""

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from helpers.marks import by_default
from helpers.serving import DIM, HOSTS, QUICK, examples, running, tiny
from metaleo.errors import BadInput
from metaleo.learners.registry import Structure
from metaleo.serve.api import Adapt, read_body
from metaleo.serve.guard import Refused, address_of, client
from metaleo.serve.models import EMBEDDED_AT_ONCE, EMBEDDING_BYTES
from metaleo.serve.reader import Reader
from metaleo.serve.server import Limits, make_app, own_names
from metaleo.serve.turns import Turns
from metaleo.serve.uploads import read_upload

DATA = Path(__file__).parents[1] / "data"
MOST = 64 * 2**20
needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@pytest.fixture(scope="module")
def server():
    with running({"tiny": tiny()}) as (http, service):
        yield http, service


@pytest.fixture
def http(server):
    return server[0]


@pytest.fixture
def reader():
    made = Reader(2**28, 60.0, MOST)
    yield made
    made.stop()


def peak_megabytes(pid) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def in_child(program: str, **settings: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={**os.environ, **settings}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Files


@needs_linux
@pytest.mark.parametrize("width", by_default([340_000], [340_000, 1_000_000]))
def test_a_small_parquet_file_does_not_fill_the_memory(width):
    """Ten thousand times the same value of fixed length, which the file holds once: 3.4 GB and 10 GB unpacked."""
    file = DATA / f"fixed-width-{width}.parquet"
    assert file.stat().st_size < 500
    told = in_child(
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30,) * 2)  # should it fail, it fails here\n"
        "from metaleo.errors import BadInput\n"
        "from metaleo.serve.uploads import read_upload\n"
        "try:\n"
        f"    read_upload(open({str(file)!r}, 'rb').read(), 'x.parquet', {MOST})\n"
        "except BadInput as error:\n"
        "    print(error)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"  # ru_maxrss would count the parent's too
        "print(next(int(line.split()[1]) // 1024 for line in lines if line.startswith('VmHWM')))\n"
    ).splitlines()
    assert "unpacked it would take" in told[0]
    assert int(told[-1]) < 500


@needs_linux
def test_a_reader_takes_no_more_memory_than_it_is_given(reader):
    """Whatever a file claims: this one is in order, and takes more than there is."""
    numbers = io.BytesIO()
    np.savez_compressed(numbers, features=np.zeros((10_000, 1600), np.float32))
    reader.memory = 2**25
    with pytest.raises(BadInput, match="takes more than 32 MB of memory to read"):
        reader.table(numbers.getvalue(), "zeros.npz")
    assert reader.table(b"label,x\na,1\n", "x.csv").labels == ["a"]  # another one has taken its place
    assert peak_megabytes(reader.process.pid) < 500


def test_a_reader_takes_no_longer_than_it_is_given(reader):
    os.kill(reader.start().pid, signal.SIGSTOP)  # as if it had much to do
    reader.seconds = 0.1
    with pytest.raises(BadInput, match=r"^x.csv takes longer than 0.1 seconds to read$"):
        reader.table(b"x\n1\n", "x.csv")
    reader.seconds = 60.0
    assert reader.table(b"x\n1\n", "x.csv").vectors.tolist() == [[1.0]]


def test_an_upload_reads_nothing_from_the_disk(tmp_path, monkeypatch):
    """A folder of Hugging Face's in the working directory, by the name that the client gives."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"label": ["of the server"], "x": [1.0]}).save_to_disk(str(tmp_path / "secret.csv"))
    monkeypatch.chdir(tmp_path)
    for name in ("secret.csv", "../secret.csv", f"{tmp_path}/secret.csv", "..\\secret.csv"):
        assert read_upload(b"label,x\nof the client,2\n", name, MOST).labels == ["of the client"]


@pytest.mark.parametrize("start", [b"", b"\n", b"\r\n\r\n", b"\r"])
@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_lines_of_a_csv_file_are_counted_however_they_end(start, end):
    with pytest.raises(BadInput, match="10,000 rows, not 10,001"):
        read_upload(start + b"x,label" + end + (b"1,a" + end) * 10_001, "x.csv", MOST)
    wide = b",".join(b"c%d" % index for index in range(10_001))
    with pytest.raises(BadInput, match="10,000 columns, not 10,001"):
        read_upload(start + wide + end, "x.csv", MOST)
    assert len(read_upload(start + b"x,label" + end + (b"1,a" + end) * 10, "x.csv", MOST).vectors) == 10


def test_the_rows_that_were_read_count_too(monkeypatch):
    """Parsers differ in what they take for a line."""
    monkeypatch.setattr("metaleo.serve.uploads.check_csv", lambda *_: None)
    with pytest.raises(BadInput, match=r"^x.csv: a table may have 10,000 rows, not 10,001$"):
        read_upload(b"x,label\n" + b"1,a\n" * 10_001, "x.csv", MOST)


# Memory of what is computed


def test_what_takes_more_memory_than_there_is_gets_one_line(monkeypatch):
    """A LEO whose network reads sequences takes gigabytes for many examples of many classes: XLA says so beforehand."""
    from metaleo.serve.costs import adapting_bytes

    model = tiny().model
    assert adapting_bytes(model, 2, 8) < 2**20 < adapting_bytes(model, 2, 256)
    with running({"tiny": tiny()}, Limits(work_bytes=2**30)) as (http, _):
        monkeypatch.setattr("metaleo.serve.server.adapting_bytes", lambda *_: 5 * 2**30)
        answer = http.post("/api/adapt", json={"model": "tiny", **examples()})
        assert answer.status_code == 413
        assert answer.json()["detail"] == "this takes 5,120 MB of memory; a request may take 1,024 MB"


@pytest.mark.slow
def test_gated_networks_of_many_classes_are_refused_before_they_are_computed():
    import jax

    from metaleo.checkpoints import TrainedModel
    from metaleo.serve.models import ServedModel

    structure = Structure(dim=96, network="gru", latent=8)
    model = TrainedModel(structure.init(jax.random.key(0)), structure, {})
    with running({"sequences": ServedModel("sequences", "vectors", model)}) as (http, _):
        few = examples(5, 1, dim=96)
        assert http.post("/api/adapt", json={"model": "sequences", **few}).status_code == 200
        many = {"examples": np.zeros((2000, 96)).tolist(), "labels": [str(index % 100) for index in range(2000)]}
        answer = http.post("/api/adapt", json={"model": "sequences", **many})
        assert answer.status_code == 413
        assert "MB of memory" in answer.json()["detail"]


def test_programs_that_are_measured_are_compiled_once(http, count_compilations):
    body = {"model": "tiny", **examples(3, 1)}
    http.post("/api/adapt", json=body).raise_for_status()
    with count_compilations() as compilations:
        http.post("/api/adapt", json={"model": "tiny", **examples(7, 1)}).raise_for_status()
    assert len(compilations) <= 2  # the program, and a conversion at most


@pytest.mark.slow
def test_drawings_take_no_more_memory_than_is_counted():
    import jax

    from metaleo.features.backbone_files import load_backbone
    from metaleo.features.embed import embed_batch
    from metaleo.serve.costs import program_bytes

    file = load_backbone(Path("omniglot"))
    images = jax.ShapeDtypeStruct((EMBEDDED_AT_ONCE, 28, 28, 1), np.uint8)
    taps = ((file.architecture.layer, "rectified"),)
    found = program_bytes(
        embed_batch, file.trained, images, jax.random.key(0), file.architecture, taps, "multi", False, file.mirrors
    )
    assert found < EMBEDDING_BYTES


async def hold(turns: Turns, name: str, log: list[str], go: asyncio.Event | None = None, **what) -> None:
    client.set(name.split()[0])
    async with turns.turn(**what):
        log.append(name)
        if go is not None:
            await go.wait()


def test_turns_are_fair_and_within_the_memory():
    async def try_all():
        turns, log, go = Turns(2, 20, 100), [], asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(hold(turns, f"greedy {number}", log, go, size=60))
            group.create_task(hold(turns, "modest 0", log, size=40))
            group.create_task(hold(turns, "modest 1", log, size=40))
            await asyncio.sleep(0.01)
            assert log == ["greedy 0", "modest 0", "modest 1"]  # the others are too much beside the first
            go.set()
        assert sorted(log) == [*(f"greedy {number}" for number in range(4)), "modest 0", "modest 1"]
        assert not turns.running
        assert not turns.last
        with pytest.raises(Refused, match="0 MB"):
            await hold(turns, "huge 0", log, size=101)

    asyncio.run(try_all())


def test_large_work_leaves_a_slot_and_one_client_leaves_places():
    async def try_all():
        turns, log, go = Turns(2, 8, 100), [], asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(hold(turns, f"greedy {number}", log, go, large=True))
            await asyncio.sleep(0.01)
            assert log == ["greedy 0"]
            with pytest.raises(Refused) as refused:
                await hold(turns, "greedy 5", log)
            assert refused.value.status == 429
            await hold(turns, "modest 0", log)
            assert log == ["greedy 0", "modest 0"]
            go.set()

    asyncio.run(try_all())


# Bodies


HOSTILE = {
    "unknown keys": lambda: "{" + ",".join(f'"{key}":0' for key in range(600_000)) + "}",
    "wrong numbers": lambda: '{"model":"tiny","labels":["a"],"examples":[[' + '"",' * 2_000_000 + "0]]}",
    "objects": lambda: '{"model":"tiny","labels":["a"],"examples":[' + '{"a":0},' * 800_000 + "[]]}",
    "too many points": lambda: (
        '{"model":"tiny","labels":["a"],"drawings":[[[' + ",".join(["[0,0]"] * 1_000_000) + "]]]}"
    ),
}


@pytest.mark.parametrize("kind", by_default(["wrong numbers"], HOSTILE))
def test_hostile_bodies_are_parsed_by_another_process(http, kind, monkeypatch):
    """Python parses without letting any other thread run: here, for seconds."""

    def parse(*_):
        raise AssertionError("the server parses it itself")

    monkeypatch.setattr("metaleo.serve.server.read_body", parse)
    answer = http.post("/api/adapt", content=HOSTILE[kind](), headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert len(answer.json()["detail"]) < 200


def test_nobody_waits_for_a_body_that_takes_long_to_parse():
    """The readers are stopped, as if they had much to do: everything else goes on, and small bodies are read."""
    with running({"tiny": tiny()}) as (http, service):
        processes = [reader.start() for reader in service.readers]
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        body = json.dumps({"model": "tiny", **examples()}) + " " * 2**20
        found = []

        def send():
            with httpx.Client(base_url=http.base_url, timeout=60) as other:
                found.append(other.post("/api/adapt", content=body, headers={"content-type": "application/json"}))

        thread = threading.Thread(target=send)
        thread.start()
        while not service.reading.running:
            time.sleep(0.01)
        assert http.get("/").status_code == 200
        assert http.post("/api/adapt", json={"model": "tiny", **examples()}).status_code == 200
        for process in processes:
            os.kill(process.pid, signal.SIGCONT)
        thread.join()
        assert found[0].status_code == 200


def post_chunks(http, host: bytes, body: bytes, afterwards: bytes = b"") -> bytes:
    """The answer to a request with a chunked body; what is sent afterwards must make the server hang up."""
    head = b"POST /api/adapt HTTP/1.1\r\nhost: %s\r\ntransfer-encoding: chunked\r\n\r\n" % host
    with socket.create_connection((http.base_url.host, http.base_url.port), timeout=20) as made:
        made.sendall(head + body)
        answer = made.recv(10_000)
        made.sendall(afterwards)
        while afterwards and made.recv(10_000):
            pass
        return answer


def test_a_body_in_tiny_chunks_is_refused(http):
    """A chunk of one byte takes as long as one of thousands: sixty such bodies kept everybody waiting for 22 s."""
    tiny_chunks, large_chunks = b"1\r\nx\r\n" * 90, (b"200\r\n" + b" " * 512 + b"\r\n") * 300
    assert post_chunks(http, b"localhost", tiny_chunks * 4).startswith(b"HTTP/1.1 400 ")
    assert post_chunks(http, b"localhost", tiny_chunks + large_chunks + b"0\r\n\r\n").startswith(b"HTTP/1.1 422 ")


def test_what_comes_after_an_answer_logs_no_traceback(http, caplog):
    """A request that is refused by its head, and whose body then is no HTTP."""
    assert post_chunks(http, b"evil.example", b"1\r\nx\r\n", b"zz\r\n").startswith(b"HTTP/1.1 403 ")
    assert not [record for record in caplog.records if record.exc_info]


def test_the_first_unknown_key_is_enough():
    with pytest.raises(BadInput, match=r"^'0' is no field of this request$"):
        read_body(Adapt, b'{"0": 1, "1": 2, "model": 3}')


def test_large_bodies_are_read_as_small_ones(reader):
    """By another process, which hands back arrays."""
    given = {"model": "tiny", **examples(4, 3)}
    same = reader.body(Adapt, json.dumps(given).encode())
    np.testing.assert_allclose(np.stack(same.examples), np.asarray(given["examples"]), rtol=1e-6)
    assert (same.labels, same.model, same.drawings) == (given["labels"], "tiny", None)
    drawings = [[[[0.1, 0.9], [0.2, 0.2]]], [[[0.9, 0.1]], [[0.5, 0.5], [0.6, 0.6]]]]
    drawn = reader.body(Adapt, json.dumps({"model": "pen", "labels": ["a", "b"], "drawings": drawings}).encode())
    assert [[stroke.tolist() for stroke in drawing] for drawing in drawn.drawings] == drawings
    for body, why in ((b"[", "not JSON"), (b"{}", "model: Field required"), (b'{"model": 1}', "model")):
        with pytest.raises(BadInput, match=why):
            reader.body(Adapt, body)


def test_large_requests_are_answered_as_small_ones(http):
    rows = np.random.default_rng(0).normal(size=(600, DIM)).round(4)
    body = {"model": "tiny", "examples": rows.tolist(), "labels": [str(index % 3) for index in range(600)]}
    text = json.dumps(body) + " " * 2**17
    made = http.post("/api/adapt", content=text, headers={"content-type": "application/json"}).raise_for_status()
    assert made.json()["examples"] == 600
    ragged = json.dumps({**body, "examples": [*body["examples"][:-1], [1.0]]}) + " " * 2**17
    answer = http.post("/api/adapt", content=ragged, headers={"content-type": "application/json"})
    assert answer.json()["detail"] == f"examples.599 has 1 numbers; tiny takes rows of {DIM}"


# Connections


def deaf(port: int, paths: list[str], address: str = "127.0.0.1") -> socket.socket:
    """A client that asks and never reads."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.bind((address, 0))
    made.connect(("127.0.0.1", port))
    made.sendall("".join(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n" for path in paths).encode())
    return made


def keep_asking(one: socket.socket, end: float) -> None:
    """Until the server has hung up."""
    while time.monotonic() < end:
        one.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        time.sleep(0.05)


def test_clients_that_never_read_are_cut_off(monkeypatch):
    monkeypatch.setattr("metaleo.serve.server.WRITE_SECONDS", 0.3)
    with running({"tiny": tiny()}) as (http, _):
        held = [deaf(http.base_url.port, ["/api/openapi.json"] * 400) for _ in range(5)]
        end = time.monotonic() + 30
        for one in held:
            one.settimeout(30)
            with pytest.raises((ConnectionResetError, BrokenPipeError)):
                keep_asking(one, end)
            one.close()
        assert http.get("/").status_code == 200


def test_one_address_has_so_many_connections():
    with running({"tiny": tiny()}, Limits(connections_each=4)) as (http, _):
        held = [socket.create_connection((http.base_url.host, http.base_url.port)) for _ in range(4)]
        more = socket.create_connection((http.base_url.host, http.base_url.port))
        more.settimeout(20)
        answer = b"".join(iter(lambda: more.recv(1000), b""))
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["detail"] == "too many connections of yours"
        more.close()
        for one in held:
            one.close()
        time.sleep(0.2)
        assert http.get("/").status_code == 200  # there is room again


def test_addresses():
    assert address_of("10.0.0.7") == "10.0.0.7"
    assert address_of("::ffff:10.0.0.7") == "10.0.0.7"
    assert address_of("2001:db8::1") == address_of("2001:db8::ffff:2") == "2001:db8::/64"
    assert address_of("fe80::1%eth0") == "fe80::/64"
    assert address_of("somebody") == "somebody"


# Other machines


@pytest.fixture(scope="module")
def guarded():
    """A server that other machines can reach: an application behind its guard, without a network."""
    hosts = (*own_names("0.0.0.0"), "lab.example")
    app = make_app({"tiny": tiny()}, QUICK, hosts, True, "secret-token")

    def ask(path="/api/models", host="192.168.1.5:8765", **headers):
        async def call():
            transport = httpx.ASGITransport(app, client=("192.168.1.9", 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as asking:
                return await asking.get(path, headers={"host": host, **headers})

        return asyncio.run(call())

    return ask


def test_other_machines_need_the_token(guarded):
    for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": "metaleo-80=wrong"}, {"cookie": "\x01=;;"},
                    {"authorization": "Basic " + base64.b64encode(b"secret-token").decode()}):  # fmt: skip
        for path in ("/", "/api/models", "/main.js", "/api/models?token=", "/api/models?token=%C3%A9"):
            refused = guarded(path, **headers)
            assert refused.status_code == 401
            assert "token" in refused.json()["detail"]
            assert "secret-token" not in refused.text
    assert guarded(authorization="Bearer secret-token").status_code == 200
    opened = guarded("/?token=secret-token")
    assert opened.status_code == 200
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert guarded(cookie=cookie.partition(";")[0]).status_code == 200


def test_names_of_other_sites_are_refused_there_too(guarded):
    """DNS rebinding needs a name; numbers and own names are all right."""
    token = {"authorization": "Bearer secret-token"}
    for host in ("evil.example", "evil.example:8765", "1.2.3.4.evil.example", ""):
        assert guarded(host=host, **token).status_code == 403
    for host in ("10.1.2.3:8765", "[fe80::1]:8765", "localhost", "lab.example", f"{socket.gethostname()}:1"):
        assert guarded(host=host, **token).status_code == 200


def status_of(app, host: str) -> int:
    """What somebody without a token gets."""

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as asking:
            return await asking.get("/", headers={"host": host})

    return asyncio.run(ask()).status_code


def test_what_is_exposed_is_said(monkeypatch):
    """On 0.0.0.0: a warning, and an address with a token; on loopback neither. Other names are answered on neither."""
    from metaleo.serve import server as module

    class Nothing:
        def run(self, _):
            pass

    monkeypatch.setattr(module, "load_served_models", lambda *_: {})
    apps = []
    monkeypatch.setattr(module, "make_server", lambda app, _: apps.append(app) or Nothing())
    monkeypatch.setattr(module, "listen", lambda host, port: socket.create_server(("127.0.0.1", 0)))
    monkeypatch.setattr(module.InferenceService, "warm_up", lambda _: None)
    for host, exposed in (("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)):
        said = []
        module.serve((), host, 0, Limits(), False, said.append)
        assert any("lets other machines in" in line for line in said) == exposed
        assert ("?token=" in said[-1]) == exposed
        assert [status_of(apps[-1], name) for name in ("127.0.0.1", "evil.example")] == [401 if exposed else 200, 403]


# Methods


def test_head_is_get_without_its_body(http):
    for path in ("/", "/style.css", "/api/models", "/api/openapi.json"):
        head, whole = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == whole.headers["content-length"]
    assert http.head("/nothing").status_code == 404
    assert http.head("/api/adapt").status_code == 405
    assert http.head("/", headers={"host": "evil.example"}).status_code == 403


def test_hosts_of_the_tests_are_those_of_loopback():
    assert set(HOSTS) <= set(own_names("127.0.0.1"))
