"""Commands that are killed at any moment, interrupted, run twice at once or short of disk end as if left in peace.

    python tests/chaos/run.py --kills 100 --seed 0 --json

Each command first runs undisturbed, twice, which must give the same bits. Then a fresh attempt is disturbed once or
several times, run again as a user would, and must end with those bits too. One process imports everything and forks
all others, before JAX starts its threads; compiled programs are shared. A fault hits at the n-th time that a process
opens, creates, renames or removes a file of its own (an audit hook of Python's sees all of them), or after a time.
"""

import argparse
import collections
import contextlib
import dataclasses
import errno
import hashlib
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}
SMALLEST = 4096
"""Bytes of the smallest limit on the size of files: what a command says must fit."""
LONGEST = 300
"""Seconds after which a process counts as hanging."""
TRAIN = (
    "train", "--learner", "meta-sgd", "--way", "3", "--query", "4", "--steps", "40", "--meta-batch", "3",
    "--validate-every", "10", "--validation-tasks", "10", "--finetune-steps", "1", "--out", "out",
)  # fmt: skip
SEARCH = (
    "search", "--learner", "meta-sgd", "--way", "3", "--trials", "4", "--steps", "8", "--halvings", "1",
    "--validate-every", "4", "--validation-tasks", "8", "--out", "out",
)  # fmt: skip
REPRODUCE = (
    "reproduce", "sample", "--rows", "meta-sgd", "--quick", "--trials", "2", "--search-steps", "4", "--final-steps",
    "4", "--seeds", "1", "--tasks", "8", "--out", "out",
)  # fmt: skip
PRETRAIN = (
    "pretrain", "--backbone", "conv-4", "--recipe", "omniglot", "--width", "4", "--side", "16", "--batch", "16",
    "--reports", "2", "--hold-out", "0.1", "--steps", "8", "--out", "out",
)  # fmt: skip
NEEDS = (("train", "model.safetensors", ("adapt", "export")), ("pretrain", "network.safetensors", ("embed",)))
"""A command, the file of its run, and the commands that start from that."""


class Failed(Exception):
    """What must not happen."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a process: `kill`, `full` or `read-only` at its n-th file event; `kill` or `interrupt` later.

    A disk may also be `full` as soon as a file is larger than `size`, which stops SQLite and safetensors too.
    """

    kind: str
    event: int | None = None
    after: float | None = None
    size: int | None = None


@dataclasses.dataclass
class Ended:
    code: int
    said: str
    events: int
    seconds: float

    @property
    def traceback(self) -> bool:
        return "Traceback" in self.said or "Exception ignored" in self.said


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A command, and what to type after it was disturbed."""

    first: tuple[str, ...]
    resume: tuple[str, ...] | None = None
    """If the first one left a configuration; None: the same again."""
    target: str | None = None
    """The one file that it writes, if it does; once it is there, it must be complete."""

    def again(self, folder: Path) -> tuple[str, ...]:
        return self.resume if self.resume and (folder / "out/config.json").is_file() else self.first


def scenarios(inputs: Path) -> dict[str, Scenario]:
    features, images, support = (str(inputs / name) for name in ("features.npz", "images.safetensors", "support.csv"))
    model, network = str(inputs / "model.safetensors"), str(inputs / "network.safetensors")
    return {
        "train": Scenario((*TRAIN, "--data", features), ("train", "--resume", "--out", "out")),
        "search": Scenario((*SEARCH, "--data", features)),
        "reproduce": Scenario((*REPRODUCE, "--data", features)),
        "pretrain": Scenario((*PRETRAIN, "--images", images), ("pretrain", "--resume", "--out", "out")),
        "embed": Scenario(
            ("embed", network, "--images", images, "--out", "made.safetensors"), target="made.safetensors"
        ),
        "adapt": Scenario(("adapt", model, support, "--out", "task.safetensors"), target="task.safetensors"),
        "export": Scenario(("export", model, "--out", "model.onnx"), target="model.onnx"),
        "split": Scenario(("split", features, "--again", "--out", "split.safetensors"), target="split.safetensors"),
    }


# Processes


def import_everything() -> None:
    """All that a child will need, so that it starts in no time."""
    cli = importlib.import_module("metaleo.cli")
    for name in ("train", "search", "reproduce", "pretrain", "embed", "adapt", "export", "split"):
        cli.command_class(name)
    for name in (
        "cli.parsing", "experiments.reproduce", "features.pretrain_run", "features.embed", "features.datasets",
        "estimators.classifier", "estimators.examples", "export", "data.tables",
    ):  # fmt: skip
        importlib.import_module(f"metaleo.{name}")
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized(), "a child of a process with threads may hang"


def start(words: tuple[str, ...], folder: Path, fault: Fault | None = None) -> int:
    """Fork a process that runs a command in a folder; returns its number."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(action="ignore"):  # JAX's warning about fork
        number = os.fork()
    if number:
        return number
    code = 1
    try:
        said = os.open(folder.with_suffix(".said"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(folder)
        watch_files(folder, fault)
        if fault is not None and fault.size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.size, fault.size))
        save_often()
        sys.argv = ["metaleo", *words]
        importlib.import_module("metaleo.cli").main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def save_often() -> None:
    """Make even the shortest runs report and save several times on their way."""
    for module, name, value in (
        ("features.embed", "SLAB", 40), ("features.pretrain_run", "LOOK", 2), ("training.run", "SAVE_SECONDS", 0.0),
        ("training.run", "report_every", lambda: 5), ("search.random_search", "SAVE_SECONDS", 0.0),
        ("search.random_search", "report_every", lambda: 2),
    ):  # fmt: skip
        setattr(importlib.import_module(f"metaleo.{module}"), name, value)


def watch_files(folder: Path, fault: Fault | None) -> None:
    """Count what this process does to files below a folder, into FOLDER.events; strike at the right moment."""
    inside, seen = f"{folder}{os.sep}", 0
    counter = os.open(folder.with_suffix(".events"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in FILE_EVENTS or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        if not os.path.abspath(os.fsdecode(arguments[0])).startswith(inside):
            return
        seen += 1
        os.pwrite(counter, str(seen).encode(), 0)
        if fault is None or fault.event is None or seen < fault.event:
            return
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "read-only" or (fault.kind == "full" and event in ("open", "os.mkdir")):
            number = errno.EROFS if fault.kind == "read-only" else errno.ENOSPC
            raise OSError(number, os.strerror(number), os.fsdecode(arguments[0]))

    sys.addaudithook(hook)


def wait(number: int, folder: Path, fault: Fault | None = None) -> Ended:
    """Wait for a process, and strike if the time has come."""
    begin, struck = time.monotonic(), False
    while True:
        done, status = os.waitpid(number, os.WNOHANG)
        elapsed = time.monotonic() - begin
        if done:
            said = folder.with_suffix(".said").read_text(errors="replace")
            events = int(folder.with_suffix(".events").read_text() or 0)
            return Ended(os.waitstatus_to_exitcode(status), said, events, elapsed)
        if fault is not None and fault.after is not None and not struck and elapsed >= fault.after:
            os.kill(number, signal.SIGKILL if fault.kind == "kill" else signal.SIGINT)
            struck = True
        if elapsed > LONGEST:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
            raise Failed(f"still running after {LONGEST} seconds")
        time.sleep(0.01)


def run(words: tuple[str, ...], folder: Path, fault: Fault | None = None) -> Ended:
    return wait(start(words, folder, fault), folder, fault)


# Results


def outcome(folder: Path) -> dict[str, str]:
    """A checksum of each file that counts: not locks, databases, figures, times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or re.search(r"\.(png|tmp|lock|db.*)$|/(worker|times\.json|\.lock)$|\.parts/", name):
            continue
        content = path.read_bytes()
        if path.suffix == ".safetensors":  # the length of a header, the header with spaces behind it, numbers
            end = 8 + int.from_bytes(content[:8], "little")
            content = content[8:end].rstrip() + content[end:]
        content = re.sub(rb'\\?"images_per_second\\?": \d+', b"", content)
        found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def check_same(folder: Path, whole: dict[str, str]) -> None:
    found = outcome(folder)
    if found != whole:
        other = sorted(name for name in found.keys() | whole.keys() if found.get(name) != whole.get(name))
        raise Failed(f"these differ from the run that was left in peace: {', '.join(other)}")


def check_ended(ended: Ended, *codes: int) -> None:
    if ended.traceback or ended.code not in codes:
        raise Failed(f"ended with {ended.code}, not {codes}:\n{ended.said.strip()[-3000:]}")


class Chaos:
    """Attempts of one scenario."""

    def __init__(self, name: str, scenario: Scenario, work: Path):
        self.name, self.scenario, self.work = name, scenario, work / name
        self.count = 0
        check_ended(run(scenario.first, self.work / "whole"), 0)
        self.whole = outcome(self.work / "whole")
        self.calm = run(scenario.first, self.work / "calm")  # everything is compiled now
        check_ended(self.calm, 0)
        check_same(self.work / "calm", self.whole)
        self.largest = max(path.stat().st_size for path in (self.work / "whole").rglob("*"))

    def fresh(self) -> Path:
        self.count += 1
        return self.work / f"attempt-{self.count}"

    def finish(self, folder: Path) -> None:
        """Run the command to its end, and look at what it leaves."""
        if self.scenario.target is None or not (folder / self.scenario.target).exists():
            check_ended(run(self.scenario.again(folder), folder), 0)
        check_same(folder, self.whole)
        shared = folder / "out" if self.scenario.first[0] == "reproduce" else None  # several processes may: for an hour
        if left := [path.name for path in (folder / "out").rglob(".*.tmp") if path.parent != shared]:
            raise Failed(f"half-written files are left: {', '.join(left)}")
        shutil.rmtree(folder)

    def moment(self, dice: random.Random) -> dict[str, Any]:
        if dice.random() < 0.6:
            return {"event": dice.randint(1, self.calm.events)}
        return {"after": dice.uniform(0, self.calm.seconds)}

    def kill(self, dice: random.Random, most: int) -> tuple[int, list[Fault]]:
        """One attempt, killed up to three times; returns how often it was."""
        folder, faults, kills = self.fresh(), [], 0
        for _ in range(dice.randint(1, min(3, most))):
            fault = Fault("kill", **self.moment(dice))
            faults.append(fault)
            ended = run(self.scenario.again(folder), folder, fault)
            check_ended(ended, 0, -signal.SIGKILL)
            kills += ended.code != 0
            if ended.code == 0 or (self.scenario.target and (folder / self.scenario.target).exists()):
                break
        self.finish(folder)
        return kills, faults

    def disturb(self, dice: random.Random, kind: str) -> list[Fault]:
        """One attempt with another fault than a kill."""
        folder = self.fresh()
        if kind == "two at once":
            pair = [folder, folder.with_name(f"{folder.name}-other")]
            pair[1].symlink_to(folder)  # the same folder, with an output of its own
            folder.mkdir(parents=True)
            numbers = [start(self.scenario.first, each) for each in pair]
            ends = [wait(number, each) for number, each in zip(numbers, pair, strict=True)]
            pair[1].unlink()
            for end in ends:
                check_ended(end, 0, 2)
            if all(end.code == 2 for end in ends):
                raise Failed("each gave way to the other")
            self.finish(folder)
            return []
        fault = Fault(kind, **({"event": 1} if kind == "read-only" else self.moment(dice)))
        if kind == "interrupt":
            fault = Fault(kind, after=dice.uniform(0, self.calm.seconds))
        elif kind == "full" and self.largest > SMALLEST and dice.random() < 0.5:
            fault = Fault(kind, size=dice.randint(SMALLEST, self.largest))
        elif fault.event is None:
            fault = Fault(kind, event=dice.randint(1, self.calm.events))
        ended = run(self.scenario.first, folder, fault)
        check_ended(ended, *{"interrupt": (0, 130, -signal.SIGINT), "read-only": (2,)}.get(kind, (0, 2)))
        if ended.code == 2 and not re.search(r"metaleo: .*", ended.said.strip().splitlines()[-1]):
            raise Failed(f"the last line does not say what is wrong:\n{ended.said}")
        self.finish(folder)
        return [fault]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prepare(inputs: Path) -> None:
    """Data for all scenarios, made in a process of its own because making them starts JAX."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            from helpers.images import make_images
            from helpers.small import make_metaset
            from metaleo.data import save_data
            from metaleo.features.images import pack

            save_data(make_metaset(images=20), inputs / "features.npz")
            pack(make_images(), inputs / "images.safetensors", lambda done: None)
            dice = random.Random(0)
            rows = [["abc"[i % 3], *(f"{dice.gauss(i % 3, 1):.3f}" for _ in range(8))] for i in range(9)]
            lines = [["label", *(f"x{i}" for i in range(8))], *rows]
            (inputs / "support.csv").write_text("".join(",".join(line) + "\n" for line in lines))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]):
        raise Failed("no data")


def chaos(kills: int, others: int, seed: int, only: list[str], work: Path) -> dict[str, Any]:
    """Disturb the commands in turn: `kills` times by a kill, then `others` times otherwise."""
    begin, dice = time.monotonic(), random.Random(seed)
    inputs = work / "inputs"
    inputs.mkdir()
    prepare(inputs)
    plan = scenarios(inputs)
    made: dict[str, Chaos] = {}
    names = only or list(plan)
    done, failures = collections.Counter(), []

    def prepared(name: str) -> Chaos:
        """A scenario, after the one whose result it starts from."""
        if name not in made:
            for needed, file, by in NEEDS:
                if name in by:
                    shutil.copy(prepared(needed).work / "whole/out" / file, inputs)
            made[name] = Chaos(name, plan[name], work)
            say(f"{name}: {made[name].calm.events} file events in {made[name].calm.seconds:.1f} s")
        return made[name]

    def attempt(name: str, what: str, action: Callable[[Chaos], Any]) -> Any:
        one = prepared(name)
        say(f"{name}: {what}")
        try:
            return action(one)
        except Failed as failure:
            failures.append({"command": name, "fault": what, "why": str(failure), "attempt": one.count})
            say(f"FAILED: {failure}")
            return None

    number = 0
    while done["kill"] < kills and number < 4 * kills:
        name, left = names[number % len(names)], kills - done["kill"]
        number += 1
        found = attempt(name, "kill", lambda one, left=left: one.kill(dice, left))
        counted = 1 if found is None else found[0]
        done["kill"] += counted
        done[f"kill {name}"] += counted
    for number in range(others):
        kind = ("interrupt", "full", "read-only", "two at once")[number % 4]
        name = names[(number // 4) % len(names)]
        attempt(name, kind, lambda one, kind=kind: one.disturb(dice, kind))
        done[kind] += 1
    return {
        "seed": seed,
        "done": dict(done),
        "failures": failures,
        "file_events": {name: one.calm.events for name, one in made.items()},
        "seconds": round(time.monotonic() - begin, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--others", type=int, help="other faults; by default a third of the kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="commands to disturb")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder for all files, to look at")
    flags = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parents[1])]  # for helpers
    with contextlib.ExitStack() as stack:
        work = flags.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metaleo-chaos-")))
        work.mkdir(parents=True, exist_ok=True)
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PLATFORMS": "cpu",
        }
        import_everything()
        others = flags.kills // 3 if flags.others is None else flags.others
        found = chaos(flags.kills, others, flags.seed, flags.only, work.resolve())
    shown = ", ".join(f"{count} {what}" for what, count in found["done"].items())
    print(json.dumps(found, indent=2) if flags.json else f"{shown}: {len(found['failures'])} failures")
    sys.exit(bool(found["failures"]))


if __name__ == "__main__":
    main()
