"""Who may import whom: one direction, no cycles, and the maths knows nothing of how it is computed."""

import ast
import graphlib
from pathlib import Path

import metaleo

PACKAGE = Path(metaleo.__file__).parent
ROOMS = (
    "errors", "_jax", "_io", "data", "features", "tasks", "losses", "inner_loop", "nn", "learners", "engines", "config",
    "checkpoints", "evaluation", "analysis", "plotting", "training", "search", "reporting", "estimators", "export",
    "experiments", "serve", "cli",
)  # fmt: skip
"""In one direction: a room imports itself and those before it, also inside functions and for types alone."""
MATHS = ("nn", "losses", "inner_loop", "learners", "tasks")
SPEED = ("engines", "_jax.devices", "training", "evaluation")


def name_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path):
    """The modules of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "metaleo":
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found |= {name for name in names if name.removeprefix("metaleo.") in MODULES or name == node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "metaleo"}
    return {name.removeprefix("metaleo.") for name in found if name != "metaleo"}


def inside(name, room):
    return name == room or name.startswith(f"{room}.")


def in_room(room):
    return [path for name, path in MODULES.items() if inside(name, room)]


def test_every_room_is_known():
    rooms = {name.split(".")[0] for name in MODULES} - {""}
    assert rooms == set(ROOMS)
    assert len(rooms | {"assets"}) <= 25


def test_imports_have_one_direction():
    for name, path in MODULES.items():
        if name:
            allowed = ROOMS[: ROOMS.index(name.split(".")[0]) + 1]
            wrong = [other for other in imported(path) if other.split(".")[0] not in allowed]
            assert not wrong, f"{name} imports {wrong}"


def test_no_cycles():
    """Not even of imports inside functions. What a package gathers from its own modules is no cycle."""
    graph = {
        name: {other for other in imported(path) if other in MODULES and not name.startswith(f"{other}.")}
        for name, path in MODULES.items()
        if name
    }
    for name in graph:  # a package stands for what it gathers, which its own modules import from each other directly
        graph[name].discard(name)
    list(graphlib.TopologicalSorter(graph).static_order())


def test_maths_imports_nothing_of_speed():
    for room in MATHS:
        for path in in_room(room):
            wrong = [name for name in imported(path) if any(inside(name, other) for other in SPEED)]
            assert not wrong, f"{path.relative_to(PACKAGE)} imports {wrong}"


def test_data_needs_no_jax():
    for path in in_room("data"):
        assert "import jax\n" not in path.read_text(encoding="utf-8"), path


def test_the_walk_sees_imports():
    """Or else the tests above could not fail."""
    assert any(inside(name, "engines") for name in imported(MODULES["training.meta_train"]))
    assert any(inside(name, "learners") for name in imported(MODULES["engines.closed_form"]))
    assert "training.run" in imported(MODULES["cli.train"])


def test_leo_fits_on_a_page():
    assert len(MODULES["learners.leo"].read_text(encoding="utf-8").splitlines()) < 150


def test_no_native_code_in_the_package():
    assert not [path for path in PACKAGE.rglob("*") if path.suffix in {".cu", ".cuh", ".cpp", ".h", ".so"}]
