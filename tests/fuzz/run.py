"""Damage files in thousands of ways, read each, and count what happens.

    python tests/fuzz/run.py --cases 20000 --seed 0 --json
    python tests/fuzz/run.py --case 1234 --seed 0      # one case again, in this process

Each reading must end with the data, or with one line of `BadInput`. Readers work in child processes, which are ended
after SECONDS of computing or with MEMORY more than they began with. A file that led to anything else is saved in
--failures with its number.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SECONDS = 5.0
"""Of computing, per case; programs that share the processor do not count."""
MEMORY = 2**30
FRESH = 2000
"""Cases after which a child is replaced: compiled programs add up."""


def damaged_file(readers: dict[str, Any], seed: int, case: int) -> tuple[str, str, str, bytes]:
    """The reader, file name, mutation and content of a case."""
    rng = random.Random(f"{seed}-{case}")
    name = rng.choice(list(readers))
    file = rng.choice(list(readers[name].seeds))
    mutation = rng.choice(readers[name].mutations)
    return name, file, mutation.__name__, mutation(readers[name].seeds[file], rng)


def read_case(readers: dict[str, Any], folder: Path, seed: int, case: int) -> dict[str, Any]:
    from metaleo.errors import BadInput

    name, file, mutation, content = damaged_file(readers, seed, case)
    path = folder / file
    path.write_bytes(content)
    outcome, why = "accepted", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a warning of NumPy or Python is no line of `BadInput`
            warnings.simplefilter("ignore", UserWarning)  # ours: a column that looks like an id
            readers[name].read(path)
    except BadInput as error:
        outcome, why = ("tracebacks", f"two lines: {error!r}") if "\n" in str(error) else ("refused", str(error))
    except Exception:
        outcome, why = "tracebacks", traceback.format_exc()
    finally:
        path.unlink(missing_ok=True)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"reader": name, "file": file, "mutation": mutation, "outcome": outcome, "why": why, "most": most}


def prepare(folder: Path) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from fuzz.readers import make_readers

    readers = make_readers(folder)
    for (
        name,
        reader,
    ) in readers.items():  # whole files are accepted, or nothing is tested; and compiled programs are there
        for file, content in reader.seeds.items():
            (folder / file).write_bytes(content)
            try:
                reader.read(folder / file)
            except Exception as error:
                raise SystemExit(f"{name} refuses the whole file {file}: {error}") from error
    return readers


def work(pipe: Connection, seed: int) -> None:
    """Read the cases whose numbers arrive."""
    with tempfile.TemporaryDirectory() as place:
        readers = prepare(Path(place))
        pipe.send("ready")
        while (case := pipe.recv()) is not None:
            pipe.send(read_case(readers, Path(place), seed, case))


class Child:
    """A process that reads cases, watched."""

    def __init__(self, seed: int):
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=work, args=(theirs, seed), daemon=True)
        self.process.start()
        theirs.close()
        if self.pipe.recv() != "ready":
            raise SystemExit("a child could not begin")
        self.base, self.done = self.memory(), 0

    def memory(self) -> int:
        text = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def read(self, case: int) -> tuple[dict[str, Any], int]:
        """What came of a case, and the most memory that was seen."""
        self.done += 1
        self.pipe.send(case)
        began, clock, most = self.seconds(), time.monotonic(), 0
        while not self.pipe.poll(0.02):
            try:
                most = max(most, self.memory() - self.base)
                slow = self.seconds() - began > SECONDS or time.monotonic() - clock > 20 * SECONDS
            except OSError:
                break
            if slow or most > MEMORY:
                self.process.kill()
                why = f"more than {SECONDS} s" if slow else f"{most / 2**20:.0f} MiB"
                return {"outcome": "hangs" if slow else "crashes", "why": why}, most
        try:
            found = self.pipe.recv()
            return found, max(most, found.pop("most") - self.base)
        except (EOFError, OSError):
            self.process.join()
            return {"outcome": "crashes", "why": f"the process ended with {self.process.exitcode}"}, most

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def fuzz(seed: int, cases: range, failures: Path) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    per_reader: dict[str, Counter[str]] = {}
    child, peak = Child(seed), 0
    broken = []
    for case in cases:
        found, most = child.read(case)
        counts[found["outcome"]] += 1
        per_reader.setdefault(found.get("reader", "?"), Counter())[found["outcome"]] += 1
        peak = max(peak, most)
        if found["outcome"] not in ("accepted", "refused"):
            broken.append({"case": case, **found})
            failures.mkdir(parents=True, exist_ok=True)
            (failures / f"{seed}-{case}.json").write_text(json.dumps(broken[-1], indent=2))
        if child.done >= FRESH or found["outcome"] in ("hangs", "crashes"):
            child.end()
            child = Child(seed)
    child.end()
    names = ("accepted", "refused", "tracebacks", "hangs", "crashes")
    return {
        "seed": seed, "cases": len(cases), **{name: counts[name] for name in names},
        "peak_memory_mib": round(peak / 2**20),
        "readers": {name: dict(own) for name, own in sorted(per_reader.items())},
        "failures": [{name: one[name] for name in one if name != "why"} | {"why": one["why"].strip()[-300:]}
                     for one in broken[:50]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="read this one alone, here, and show what happens")
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()) / "metaleo-fuzz")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    chosen = parser.parse_args()
    if chosen.case is not None:
        with tempfile.TemporaryDirectory() as place:
            readers = prepare(Path(place))
            kept = chosen.failures / f"{chosen.seed}-{chosen.case}"
            name, file, mutation, content = damaged_file(readers, chosen.seed, chosen.case)
            kept.mkdir(parents=True, exist_ok=True)
            (kept / file).write_bytes(content)
            print(f"{name} of {kept / file}, after {mutation}")
            print(read_case(readers, Path(place), chosen.seed, chosen.case)["why"] or "accepted")
        return
    found = fuzz(chosen.seed, range(chosen.start, chosen.start + chosen.cases), chosen.failures)
    print(json.dumps(found, indent=2) if chosen.json else {name: found[name] for name in list(found)[:8]})
    raise SystemExit(1 if found["failures"] else 0)


if __name__ == "__main__":
    main()
