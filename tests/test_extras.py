"""The core needs none of the extras, and an extra that is missing is named in one line, with how to install it."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow as pa
import pytest

from helpers.commands import SMALL, fails
from helpers.small import make_metaset, message
from helpers.tables import write_dataset
from metaleo import BadInput
from metaleo.cli import main
from metaleo.data import save_data
from metaleo.errors import EXTRAS, needs_extra

ROOT = Path(__file__).parent.parent
PACKAGE = Path(sys.modules["metaleo"].__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = {
    "jax", "equinox", "optax", "jaxtyping", "numpy", "scipy", "scikit-learn", "safetensors", "tyro", "rich",
    "matplotlib", "pillow", "filelock",
}  # fmt: skip
FOR_DEVELOPERS = {"all", "bench", "docs", "test", "dev"}
AT_THE_TOP = ("experiments.reproduce", "reporting.page", "search.random_search", "search.run_search", "serve.server")
"""Modules that cannot be imported without an extra; whoever imports them says which."""


def names(requirements):
    return [re.match(r"[\w-]+", one).group() for one in requirements]


def hide(monkeypatch, *modules):
    """As if these were not installed."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    for name in AT_THE_TOP:
        monkeypatch.delitem(sys.modules, f"metaleo.{name}", raising=False)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a file of features and tables of every kind."""
    monkeypatch.chdir(tmp_path)
    save_data(make_metaset(images=20), "features.npz")
    Path("mine.csv").write_text("label,a,b\nant,1,2\nbee,3,4\n")
    write_dataset(tmp_path / "folder", pa.table({"a": [1.0, 2.0], "label": ["ant", "bee"]}))
    return tmp_path


# What pyproject.toml says.


def test_the_core_is_lean():
    assert set(names(PROJECT["dependencies"])) == CORE


def test_extras_are_those_that_name_themselves():
    extras = PROJECT["optional-dependencies"]
    assert extras.keys() - FOR_DEVELOPERS == EXTRAS.keys()
    for extra, (_, modules) in EXTRAS.items():
        assert tuple(names(extras[extra])) == modules  # each is imported by the name that it is installed by
    assert extras["all"] == [f"metaleo[{','.join(EXTRAS)}]"]


# What is missing is named.


@pytest.mark.parametrize(
    ("module", "extra", "command", "what"),
    [
        ("pyarrow", "tables", "train --data mine.csv", "mine.csv: reading .csv, .tsv and .parquet"),
        ("pyarrow", "tables", "adapt nearest-centroid mine.csv", "mine.csv: reading .csv, .tsv and .parquet"),
        ("datasets", "huggingface", "train --data folder", "folder: reading a Hugging Face folder"),
        ("optuna", "search", "search", "searching"),
        ("optuna", "search", "reproduce sample", "searching"),
        ("sqlalchemy", "search", "search", "searching"),
        ("fastapi", "serve", "serve", "serving"),
        ("cachetools", "serve", "serve", "serving"),
        ("jinja2", "report", "report miniimagenet", "writing a report"),
        ("onnx", "onnx", "export miniimagenet --out leo.onnx", "exporting to ONNX"),
    ],
)
def test_a_missing_extra_is_named(here, monkeypatch, capsys, module, extra, command, what):
    hide(monkeypatch, module)
    expected = f"metaleo: {what} needs {module}, which is not installed: pip install 'metaleo[{extra}]'"
    assert fails(capsys, *command.split()) == expected


def test_a_missing_driver_is_named(here, monkeypatch, capsys):
    """After the search has said what it is about to do."""
    hide(monkeypatch, "psycopg")
    with pytest.raises(SystemExit, match="2"):
        main(["search", "--data", "features.npz", "--way", "3", "--storage", "postgresql://me@127.0.0.1:9/studies"])
    assert capsys.readouterr().err.strip().splitlines()[-1] == (
        "metaleo: a PostgreSQL database needs psycopg, which is not installed: pip install 'metaleo[postgres]'"
    )


def test_uploads_too(monkeypatch):
    from metaleo.serve.uploads import read_upload

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("mine.csv", "mine.parquet"):
        said = message(lambda name=name: read_upload(b"label,a\nant,1\n", name, 1000))
        assert said.startswith(f"{name}: reading .csv, .tsv and .parquet needs pyarrow")


def test_other_errors_stay_what_they_are():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needs_extra("search"):
        import no_such_module  # noqa: F401
    with pytest.raises(ImportError, match="no_such_name"), needs_extra("tables"):
        from pyarrow import no_such_name  # noqa: F401
    with pytest.raises(BadInput, match="mine"), needs_extra("tables"):
        raise BadInput("mine")


# What needs none of them.


def test_who_imports_extras():
    """Anything else might do so on a path that the core has to walk alone."""
    modules = {module for _, own in EXTRAS.values() for module in own}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if modules.intersection(name.split(".")[0] for name in imported):
                found.add(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    search, serve = ("random_search", "run_search", "study"), ("api", "reader", "server", "uploads")
    inside = {"data.tables", "export", "reporting.page"}
    assert found == inside | {f"search.{name}" for name in search} | {f"serve.{name}" for name in serve}


ALONE = f"""
import importlib.abc, pkgutil, sys
from importlib import import_module

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
import metaleo
from metaleo.cli import main

main(["--help"])
main(["list"])
main(["train", "--data", "features.npz", "--out", "run", *{SMALL!r}])
main(["evaluate", "run", "--tasks", "5"])
few = metaleo.load_data("features.npz").subset("test")
labels = [row // 2 for row in range(6)]
assert metaleo.LEOClassifier("run").fit(few.read(few.rows[:6]), labels).predict(few.read(few.rows[:3])).shape == (3,)
for module in pkgutil.walk_packages(metaleo.__path__, "metaleo."):
    name = module.name.removeprefix("metaleo.")
    if not name.startswith(("search.", "serve.", "cli.__main__")) and name not in {AT_THE_TOP!r}:
        import_module(module.name)
"""


def test_the_core_alone(here):
    """With every extra hidden: commands, the classifier, and every module that is not of an extra."""
    modules = ",".join(module for _, own in EXTRAS.values() for module in own)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", ALONE, modules], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout
    assert (here / "run" / "model.safetensors").is_file()
