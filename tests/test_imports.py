"""Who may import whom: the maths knows nothing of how it is computed."""

import ast
from pathlib import Path

import metaleo

PACKAGE = Path(metaleo.__file__).parent
MATHS = ("model", "losses", "inner_loop", "learners", "tasks")
SPEED = ("engines", "devices", "compiling", "population", "outer_loop", "evaluation")


def imported(path):
    """The modules of this package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "metaleo":
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "metaleo"}
    return {name.removeprefix("metaleo.") for name in found if name != "metaleo"}


def files(room):
    return sorted(PACKAGE.glob(f"{room}/**/*.py")) or [PACKAGE / f"{room}.py"]


def inside(name, room):
    return name == room or name.startswith(f"{room}.")


def test_maths_imports_nothing_of_speed():
    for room in MATHS:
        for path in files(room):
            wrong = [name for name in imported(path) if any(inside(name, other) for other in SPEED)]
            assert not wrong, f"{path.relative_to(PACKAGE)} imports {wrong}"


def test_the_walk_sees_imports():
    """Or else the test above could not fail."""
    assert any(inside(name, "engines") for name in imported(PACKAGE / "outer_loop.py"))
    assert any(inside(name, "learners") for name in imported(PACKAGE / "engines/closed_form.py"))


def test_leo_fits_on_a_page():
    assert len((PACKAGE / "learners/leo.py").read_text(encoding="utf-8").splitlines()) < 150


def test_no_native_code_in_the_package():
    assert not [path for path in PACKAGE.rglob("*") if path.suffix in {".cu", ".cuh", ".cpp", ".h", ".so"}]
