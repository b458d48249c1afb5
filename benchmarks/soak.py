"""Whether `metaleo serve` keeps answering, within its memory, while hostile and slow clients try their worst.

    python benchmarks/soak.py --minutes 10 --json   # the whole; without --json, a few lines for people
    python benchmarks/soak.py --minutes 0.1         # a try

Starts a server of its own on 127.0.0.1, in a child process, and only that is asked. Honest clients (threads of this
process, address 127.0.0.1) do what the page does; hostile ones (another process, addresses from 127.0.0.2 on) send
bombs, garbage and bodies that dribble, hold connections without reading, and ask for the largest that is allowed. Tells
the honest clients' statuses and latency, and the memory of the server with the processes that parse for it. Linux only.
"""

import argparse
import contextlib
import http.client
import io
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from serve import JSON, draw_task, percentiles, sample_rows, server

P99_MS = 500.0
"""Honest clients are answered within this, all but one in a hundred."""
MEMORY_MB = 2500.0
"""The server and its readers together stay below this."""
PAUSE = 0.2
"""Seconds between two requests of a client: there are more clients than cores."""
TABLES = Path(__file__).parent.parent / "tests" / "data"


class Client:
    """A connection that is kept, from an address of its own."""

    def __init__(self, port: int, address: str):
        self.port, self.address = port, address
        self.connection = self.connect()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60, source_address=(self.address, 0))

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        for again in (True, False):
            try:
                self.connection.request(method, path, body, {**(JSON if body else {}), **headers})
                answer = self.connection.getresponse()
                return answer.status, answer.read()
            except (http.client.HTTPException, OSError):
                self.connection.close()  # the server closes connections that were idle for a while
                self.connection = self.connect()
                if not again:
                    raise
        raise AssertionError


# Honest clients


KINDS = ("page", "rows", "drawings", "functions", "file")


def honest(port: int, seed: int, end: float, log: list[tuple[str, float, int]]) -> None:
    """What a person does on the page, one thing after another, each kind once at least."""
    client, chance, classes = Client(port, "127.0.0.1"), random.Random(seed), sample_rows()
    table = client.ask("GET", "/api/example.csv?model=miniimagenet")[1]
    square = [[[0.1, 0.1], [0.9, 0.1], [0.9, 0.9], [0.1, 0.9], [0.1, 0.1]]]
    cross = [[[0.1, 0.1], [0.9, 0.9]], [[0.9, 0.1], [0.1, 0.9]]]

    def timed(kind: str, method: str, path: str, body: bytes | None = None) -> bytes:
        begin = time.perf_counter()
        try:
            status, answer = client.ask(method, path, body)
        except OSError:
            status, answer = 599, b""  # no answer at all
        log.append((kind, 1000 * (time.perf_counter() - begin), status))
        time.sleep(PAUSE)
        return answer

    def task_of(answer: bytes) -> str:
        with contextlib.suppress(ValueError, KeyError):
            return json.loads(answer)["task"]
        return "none"

    for count in itertools.count():
        if count >= len(KINDS) and time.monotonic() > end:
            return
        kind = KINDS[count] if count < len(KINDS) else chance.choice(KINDS)
        if kind == "page":
            timed("page", "GET", "/")
            timed("models", "GET", "/api/models")
        elif kind == "functions":
            points = [[round(chance.uniform(-5, 5), 2), round(chance.uniform(-3, 3), 2)] for _ in range(5)]
            timed("functions", "POST", "/api/functions", json.dumps({"points": points}).encode())
        elif kind == "file":
            timed("file", "POST", "/api/adapt-file?model=miniimagenet&name=mine.csv", table)
        elif kind == "rows":
            body, queries = draw_task(chance, classes, 5, 1)
            made = task_of(timed("adapt", "POST", "/api/adapt", body))
            timed("predict", "POST", "/api/predict", json.dumps({"task": made, "examples": queries}).encode())
        else:
            body = {"model": "omniglot", "drawings": [square, cross], "labels": ["square", "cross"]}
            made = task_of(timed("adapt drawings", "POST", "/api/adapt", json.dumps(body).encode()))
            body = {"task": made, "drawings": [cross]}
            timed("predict drawings", "POST", "/api/predict", json.dumps(body).encode())


# Hostile clients: each does one thing again and again, from an address of its own


def bombs(client: Client, _: random.Random) -> Iterator[int]:
    """Small files that unpack to gigabytes."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w", zipfile.ZIP_DEFLATED) as archive:
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (9000, 10**6)})
        archive.writestr("features.npy", head.getvalue() + bytes(60_000_000))
    files = {path.name: path.read_bytes() for path in TABLES.glob("fixed-width-*.parquet")}
    files |= {
        "zip.npz": zipped.getvalue(),
        "cells.csv": b"label,a\n" + b"x," * 4_000_000,
        "broken.parquet": b"PAR1" * 99,
    }
    while True:
        for name, body in files.items():
            yield client.ask("POST", f"/api/adapt-file?model=miniimagenet&name={name}", body)[0]


def bodies(client: Client, _: random.Random) -> Iterator[int]:
    """Bodies that take long to parse, or hold what cannot be."""
    made = [
        b"{" + b",".join(b'"%d":0' % key for key in range(700_000)) + b"}",
        b'{"model":"miniimagenet","labels":["a"],"examples":[[' + b'"",' * 2_500_000 + b"0]]}",
        b'{"model":"omniglot","labels":["a"],"drawings":[[[' + b"[0,0]," * 1_200_000 + b"[0,0]]]]}",
        b"[" * 8_000_000,
        b" " * 9_000_000,
        b'{"points": [[1, NaN]]}',
    ]
    while True:
        for body in made:
            yield client.ask("POST", "/api/adapt", body)[0]


def largest(client: Client, chance: random.Random) -> Iterator[int]:
    """The largest requests that are allowed."""
    rows = np.random.default_rng(0).integers(0, 999, (2000, 640)).tolist()
    many = {"model": "miniimagenet", "examples": rows, "labels": [str(index % 100) for index in range(2000)]}
    lines = [[[round(chance.random(), 2), round(chance.random(), 2)] for _ in range(90)] for _ in range(500)]
    drawn = {"model": "omniglot", "drawings": [[line] for line in lines], "labels": [str(i % 100) for i in range(500)]}
    made = [json.dumps(body, separators=(",", ":")).encode() for body in (many, drawn)]
    while True:
        for body in made:
            yield client.ask("POST", "/api/adapt", body)[0]


def shapes(client: Client, chance: random.Random) -> Iterator[int]:
    """Tasks of ever new shapes, each of which is compiled."""
    classes = sample_rows()
    while True:
        yield client.ask("POST", "/api/adapt", draw_task(chance, classes, chance.randint(2, 100), 1)[0])[0]
        time.sleep(1)


def flood(client: Client, _: random.Random) -> Iterator[int]:
    """Small requests as fast as they are answered, some of them to other names and paths."""
    while True:
        for path in ("/", "/api/models", "/../../etc/passwd", "/nothing", "/style.css"):
            yield client.ask("GET", path)[0]
        yield client.ask("GET", "/", host="evil.example")[0]
        time.sleep(0.02)


def deaf(client: Client, _: random.Random) -> Iterator[int]:
    """Connections that ask for much and never read."""
    request = b"GET /api/openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100
    while True:
        with contextlib.ExitStack() as held:
            for _ in range(150):
                with contextlib.suppress(OSError):
                    one = held.enter_context(socket.socket())
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                    one.bind((client.address, 0))
                    one.settimeout(1)
                    one.connect(("127.0.0.1", client.port))
                    one.sendall(request)
            time.sleep(15)
        yield 0


def dribble(client: Client, _: random.Random) -> Iterator[int]:
    """Heads and bodies that arrive a byte at a time."""
    head = b"POST /api/adapt HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n"
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            opened = [
                held.enter_context(
                    socket.create_connection(("127.0.0.1", client.port), source_address=(client.address, 0))
                )
                for _ in range(50)
            ]
            for index, one in enumerate(opened):
                one.sendall(head + b" " * 100_000 if index % 2 else head[:20])
            for _ in range(20):
                time.sleep(1)
                for one in opened:
                    one.send(b" ")
        yield 0


def garbage(client: Client, chance: random.Random) -> Iterator[int]:
    """What is not HTTP."""
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", client.port), 5) as one:
            one.sendall(chance.randbytes(5000))
            one.settimeout(2)
            one.recv(1000)
        yield 0
        time.sleep(0.1)


HOSTILE = (bombs, bodies, largest, shapes, flood, deaf, dribble, garbage)


def attack(port: int, seconds: float, seed: int, kinds: list[str]) -> dict[str, Any]:
    """Hostile clients of these kinds at once; how often each was answered, and how."""
    end, found = time.monotonic() + seconds, {kind: Counter() for kind in kinds}

    def work(number: int, kind: Callable[[Client, random.Random], Iterator[int]]) -> None:
        while time.monotonic() < end:
            try:
                for status in kind(Client(port, f"127.0.0.{2 + number}"), random.Random(seed)):
                    found[kind.__name__][str(status or "done")] += 1
                    if time.monotonic() > end:
                        return
            except (OSError, http.client.HTTPException) as error:
                found[kind.__name__][type(error).__name__] += 1
                time.sleep(PAUSE)

    chosen = [kind for kind in HOSTILE if kind.__name__ in kinds]
    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(chosen)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        time.sleep(0.2)
    return {name: dict(counts) for name, counts in found.items()}


# Measuring


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for file in children for child in file.read_text().split())]


def megabytes(pid: int, field: str = "VmRSS") -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 1024
    return 0.0  # it has just ended


def soak(minutes: float, clients: int, seed: int, kinds: list[str]) -> dict[str, Any]:
    log: list[tuple[str, float, int]] = []
    readings: list[tuple[float, float]] = []
    with server() as (process, port):
        honest(port, seed, 0.0, [])  # compiles what each kind needs, before the clock starts
        seconds, begin = 60 * minutes, time.monotonic()
        command = [sys.executable, __file__, "--attack", str(port), "--minutes", str(minutes), "--seed", str(seed)]
        command += ["--hostile", *kinds]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
            workers = [
                threading.Thread(target=honest, args=(port, seed + number, begin + seconds, log))
                for number in range(clients)
            ]
            for worker in workers:
                worker.start()
            while time.monotonic() < begin + seconds:
                readings.append((time.monotonic() - begin, sum(map(megabytes, family(process.pid)))))
                time.sleep(0.25)
            for worker in workers:
                worker.join()
            assert attacker.stdout is not None
            hostile = json.loads(attacker.stdout.read())
        peak = megabytes(process.pid, "VmHWM")
    statuses = Counter(status for _, _, status in log)
    kinds = {kind: [took for own, took, _ in log if own == kind] for kind in sorted({kind for kind, _, _ in log})}
    every = max(1, len(readings) // 60)
    half = [size for when, size in readings if when > seconds / 4]
    parts = [float(np.mean(part)) if len(part) else 0.0 for part in np.array_split(half, 2)]
    overall = percentiles([took for _, took, _ in log])
    largest_sum = max(size for _, size in readings)
    return {
        "minutes": minutes,
        "seed": seed,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "honest": {
            "clients": clients,
            "requests": len(log),
            "statuses": {str(status): count for status, count in sorted(statuses.items())},
            **overall,
            "by_kind": {kind: {"requests": len(took), **percentiles(took)} for kind, took in kinds.items()},
        },
        "hostile": hostile,
        "memory": {
            "peak_mb": round(largest_sum, 1),
            "server_alone_peak_mb": round(peak, 1),
            "mean_mb_of_second_and_last_part": [round(part, 1) for part in parts],
            "readings": [{"seconds": round(when, 1), "mb": round(size, 1)} for when, size in readings[::every]],
        },
        "bounds": {"p99_ms": P99_MS, "memory_mb": MEMORY_MB},
        "kept": {
            "no_5xx_to_honest_clients": not any(status >= 500 for status in statuses),
            "p99": overall["p99_ms"] < P99_MS,
            "memory": largest_sum < MEMORY_MB,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=3)
    names = [kind.__name__ for kind in HOSTILE]
    parser.add_argument(
        "--hostile", nargs="*", choices=names, default=names, help="which kinds; none, if none is named"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--attack", type=int, metavar="PORT", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if not 0 < flags.minutes <= 60:
        parser.error("--minutes must be above 0, and 60 at most")
    if flags.attack is not None:
        print(json.dumps(attack(flags.attack, 60 * flags.minutes, flags.seed, flags.hostile)))
        return
    found = soak(flags.minutes, flags.clients, flags.seed, flags.hostile)
    if flags.json:
        print(json.dumps(found, indent=2))
        return
    own, memory = found["honest"], found["memory"]
    print(f"{own['requests']} honest requests: p50 {own['p50_ms']} ms, p99 {own['p99_ms']} ms; {own['statuses']}")
    print(f"memory: peak {memory['peak_mb']} MB; {memory['mean_mb_of_second_and_last_part']} MB on average")
    print(", ".join(f"{name}: {'yes' if kept else 'NO'}" for name, kept in found["kept"].items()))


if __name__ == "__main__":
    main()
