"""Memory that `metaleo train` takes on a feature file of many gigabytes.

    python benchmarks/memory.py                  # 10 GB, rows left in the file and fetched by each meta-step
    python benchmarks/memory.py --place default  # 10 GB, rows where `metaleo train` puts them on this machine
    python benchmarks/memory.py --learner maml   # flags of `metaleo train` are handed on

Prints JSON. The file (float32, classes of as many images as ImageNet's, real bytes) is written to a temporary folder
and removed. Anonymous memory is what the process itself has taken; resident memory also counts the pages of the mapped
file that happen to be in memory, which the system takes back when it needs them. Linux only.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

DIM = 640
IN_FILE = "from metaleo._jax import devices; devices.memory_bytes = lambda: 0; "
"""As on a device whose memory the rows would fill."""


def write(path: Path, gigabytes: float, images: int, seed: int) -> dict[str, Any]:
    """Normal numbers around a mean of each class, a class at a time."""
    classes = max(50, round(gigabytes * 1e9 / (4 * DIM * images)))  # a tenth is for validation, on five at once
    splits = ["val" if number % 10 == 0 else "test" if number % 10 == 1 else "train" for number in range(classes)]
    layout = {"dtype": "F32", "shape": [classes, images, DIM], "data_offsets": [0, 4 * classes * images * DIM]}
    names = [f"class {number}" for number in range(classes)]
    strings = {"class_names": json.dumps(names), "split": json.dumps(splits)}
    header = json.dumps({"__metadata__": strings, "features": layout}).encode()
    header += b" " * (-len(header) % 8)
    chance = np.random.default_rng(seed)
    noise = chance.standard_normal((2 * images, DIM), np.float32)  # drawn once: numbers cost more than writing
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _ in range(classes):
            start = chance.integers(images)
            file.write((noise[start : start + images] + chance.standard_normal(DIM, np.float32)).tobytes())
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "classes": classes, "images_per_class": images, "dim": DIM, "seed": seed}


def watch(command: list[str], out: Path) -> dict[str, Any]:
    """Run a command; the peaks of its memory, and seconds until the run folder, the first report and the end."""
    begin, seconds, anonymous, mapped = time.perf_counter(), {}, 0, 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    while process.poll() is None:
        sizes = memory(process.pid)
        anonymous, mapped = max(anonymous, sizes.get("RssAnon", 0)), max(mapped, sizes.get("RssFile", 0))
        now = round(time.perf_counter() - begin, 1)
        if (out / "config.json").exists():  # written once the data are read and placed
            seconds.setdefault("to_open_and_place", now)
        if metrics.exists() and metrics.stat().st_size:
            seconds.setdefault("to_first_report", now)
        time.sleep(0.1)
    seconds["in_all"] = round(time.perf_counter() - begin, 1)
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read())
    return {
        "peak_anonymous_bytes": anonymous,
        "peak_mapped_bytes": mapped,
        "peak_resident_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        "seconds": seconds,
    }


def memory(pid: int) -> dict[str, int]:
    """Bytes by the names in /proc; nothing once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith(("Rss", "VmRSS"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--images", type=int, default=1300, help="of each class")
    parser.add_argument("--place", choices=["file", "default"], default="file")
    parser.add_argument("--shot", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where there is room for the file")
    flags, others = parser.parse_known_args()  # the others are for `metaleo train`
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        path, out = Path(folder, "features.safetensors"), Path(folder, "run")
        file = write(path, flags.gigabytes, flags.images, flags.seed)
        own = f"train --data {path} --shot {flags.shot} --steps {flags.steps} --seed {flags.seed} --out {out}"
        words = " ".join([own, *others])
        program = (IN_FILE if flags.place == "file" else "") + "from metaleo.cli import main; main()"
        result = watch([sys.executable, "-c", program, *words.split()], out)
        rows = "in the file" if flags.place == "file" else "where `metaleo train` puts them"
        print(json.dumps({
            "file": file, "rows": rows, "command": words.replace(folder, "."), "cores": len(os.sched_getaffinity(0)),
            "machine_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "python": platform.python_version(), **result,
        }, indent=2))  # fmt: skip


if __name__ == "__main__":
    main()
