"""Seconds from the start of a process to help, to an import, and to the first report of a training run.

    python benchmarks/startup.py              # 1-shot and 5-shot at the paper's shapes, without and with kept programs
    python benchmarks/startup.py --shots 1 --learner meta-sgd   # flags of `metaleo train` are handed on

Prints JSON. Every figure is of a fresh process. "cold" begins with an empty folder of compiled programs, "warm" with
what "cold" left in it; both are in a temporary folder. A report is the first line of metrics.jsonl, `steps` meta-steps
of work after compilation.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METALEO = [sys.executable, "-m", "metaleo.cli"]
DEVICE = "import jax; print(jax.__version__, jax.devices()[0].device_kind, sep='\\n')"
PATIENCE = 300


def seconds(command: list[str], repeats: int) -> float:
    """Median seconds of a whole process."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times), 2)


def first_report(words: list[str], cache: Path) -> dict[str, Any]:
    """Train until metrics.jsonl has a line, then stop the run."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    with tempfile.TemporaryDirectory() as folder:
        metrics, told = Path(folder, "run/metrics.jsonl"), Path(folder, "stderr")
        begin = time.perf_counter()
        with open(told, "w") as stderr:
            environment = own | {"XDG_CACHE_HOME": str(cache)}
            command = [*METALEO, "train", *words, "--out", str(metrics.parent)]
            process = subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr)
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll() is not None or time.perf_counter() - begin > PATIENCE:
                process.kill()
                raise SystemExit(f"no report:\n{told.read_text()}")
            time.sleep(0.01)
        took = time.perf_counter() - begin
        process.send_signal(signal.SIGINT)
        process.wait()
        steps = json.loads(metrics.read_text().splitlines()[0])["step"]
    return {"seconds": round(took, 2), "steps": steps}


def measure(words: list[str], repeats: int) -> dict[str, Any]:
    """Medians of several pairs of a cold and a warm start."""
    pairs, kept = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            pairs.append([first_report(words, Path(cache)) for _ in ("cold", "warm")])
            kept = [path.stat().st_size for path in Path(cache).rglob("*-cache")]
    cold, warm = (round(statistics.median(run["seconds"] for run in runs), 2) for runs in zip(*pairs, strict=True))
    return {
        "command": " ".join(["metaleo train", *words]), "cold_seconds": cold, "warm_seconds": warm,
        "steps": pairs[0][0]["steps"], "kept_programs": len(kept), "kept_bytes": sum(kept),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--repeats", type=int, default=3)
    flags, others = parser.parse_known_args()  # the others are for `metaleo train`
    told = subprocess.check_output([sys.executable, "-c", DEVICE], text=True)  # not here: a GPU serves one process
    jax_version, device = told.splitlines()
    result = {
        "device": device, "cores": len(os.sched_getaffinity(0)), "jax": jax_version,
        "python": platform.python_version(), "repeats": flags.repeats,
        "help_seconds": seconds([*METALEO, "--help"], flags.repeats),
        "import_seconds": seconds([sys.executable, "-c", "import metaleo.training.run"], flags.repeats),
        "first_report": [measure(["--shot", str(shot), *others], flags.repeats) for shot in flags.shots],
    }  # fmt: skip
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
