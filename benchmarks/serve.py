"""How fast `metaleo serve` answers many clients at once, and whether its memory stays bounded.

    python benchmarks/serve.py                   # 16 clients, 1,000 pairs of adapt and predict, 5-way 1-shot
    python benchmarks/serve.py --memory          # 10,000 tasks one after another; resident memory after every 1,000
    python benchmarks/serve.py --memory --mixed  # the same with 2 to 100 classes: new programs all the time

Prints JSON. The server is a child process, the clients are threads of this one, on the same machine.
"""

import argparse
import contextlib
import http.client
import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from metaleo.data import load_data

JSON = {"content-type": "application/json"}
FAST = ("--rate", "100000")
"""All clients share an address here, which may ask as often as it can."""


@contextlib.contextmanager
def server(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port."""
    command = [sys.executable, "-m", "metaleo.cli", "serve", "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        found = next((match for line in lines if (match := re.search(r"http://[^:]+:(\d+)/", line))), None)
        if found is None:
            raise SystemExit("the server did not start")
        try:
            yield process, int(found[1])
        finally:
            process.send_signal(signal.SIGINT)


def draw_task(chance: random.Random, classes: np.ndarray, way: int, shot: int) -> tuple[bytes, list[list[float]]]:
    """The body of an adapt request, and rows to ask about."""
    chosen = chance.choices(range(len(classes)), k=way)  # a class may come twice, under two names
    rows = [classes[one, chance.randrange(classes.shape[1])] for one in chosen for _ in range(shot)]
    labels = [str(label) for label in range(way) for _ in range(shot)]
    examples = [[round(float(value), 4) for value in row] for row in rows]
    return json.dumps({"model": "miniimagenet", "examples": examples, "labels": labels}).encode(), examples[:1]


def ask(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[int, bytes]:
    connection.request("POST", path, body, JSON)
    response = connection.getresponse()
    return response.status, response.read()


def pair(connection: http.client.HTTPConnection, task: tuple[bytes, list[list[float]]]) -> tuple[float, float]:
    """Milliseconds of adapting, and of predicting."""
    body, rows = task
    begin = time.perf_counter()
    status, answer = ask(connection, "/api/adapt", body)
    between = time.perf_counter()
    if status != 200:
        raise RuntimeError(answer[:200])
    question = json.dumps({"task": json.loads(answer)["task"], "examples": rows}).encode()
    middle = time.perf_counter()
    status, answer = ask(connection, "/api/predict", question)
    if status != 200:
        raise RuntimeError(answer[:200])
    return 1000 * (between - begin), 1000 * (time.perf_counter() - middle)


def percentiles(milliseconds: list[float]) -> dict[str, float]:
    p50, p99, most = np.percentile(milliseconds, [50, 99, 100]).round(2).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": most}


def measure_speed(clients: int, pairs: int, way: int, shot: int, seed: int) -> dict[str, Any]:
    classes, chance = sample_rows(), random.Random(seed)
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(pairs):
        tasks.put(draw_task(chance, classes, way, shot))
    adapting, predicting, errors = [], [], []

    def work(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.suppress(queue.Empty):
            while True:
                task = tasks.get_nowait()
                try:
                    times = pair(connection, task)
                except (OSError, RuntimeError, http.client.HTTPException) as error:
                    errors.append(repr(error))
                    connection.close()
                else:
                    adapting.append(times[0])
                    predicting.append(times[1])
        connection.close()

    with server(*FAST) as (_, port):
        threads = [threading.Thread(target=work, args=(port,)) for _ in range(clients)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
    return {
        "clients": clients, "pairs": pairs, "way": way, "shot": shot, "seed": seed, "cores": os.cpu_count(),
        "errors": len(errors), "first_errors": errors[:3], "seconds": round(seconds, 2),
        "requests_per_second": round(2 * pairs / seconds, 1),
        "adapt": percentiles(adapting), "predict": percentiles(predicting),
    }  # fmt: skip


def measure_memory(tasks: int, mixed: bool, seed: int) -> dict[str, Any]:
    classes, chance = sample_rows(), random.Random(seed)
    readings, begin, every = [], time.perf_counter(), max(1, tasks // 10)
    with server(*FAST) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for done in range(tasks + 1):
            if done % every == 0:
                seconds = round(time.perf_counter() - begin, 1)
                readings.append({"tasks": done, "seconds": seconds, "rss_mb": resident_megabytes(process.pid)})
            way = chance.randint(2, 100) if mixed else 5
            pair(connection, draw_task(chance, classes, way, 1))
        connection.close()
    return {"tasks": tasks, "mixed": mixed, "seed": seed, "readings": readings}


def sample_rows() -> np.ndarray:
    """Real rows of unseen classes: [class, image, dim]."""
    unseen = load_data("sample").subset("test")
    return unseen.read(unseen.rows).reshape(len(unseen.counts), -1, unseen.dim)


def resident_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError("no VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--way", type=int, default=5)
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    if flags.memory:
        result = measure_memory(flags.tasks, flags.mixed, flags.seed)
    else:
        result = measure_speed(flags.clients, flags.pairs, flags.way, flags.shot, flags.seed)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
