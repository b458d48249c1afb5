"""What `from metaleo import …` offers: documented, with examples that run, and all that pages and examples use."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import metaleo

ROOT = Path(__file__).parent.parent
NAMES = sorted(metaleo.__all__)


def test_names_are_sorted_and_known():
    assert sorted(metaleo.MODULE_OF) == NAMES
    assert all(hasattr(metaleo, name) for name in NAMES)
    assert set(NAMES) <= set(dir(metaleo))
    with pytest.raises(AttributeError, match="no attribute 'LEOO'"):
        metaleo.LEOO  # noqa: B018


def parameters(thing):
    """What a caller may hand over, beside what a run makes of it."""
    if not inspect.isclass(thing):
        return list(inspect.signature(thing).parameters)
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "args", "kwargs")]


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_are_whole(name):
    thing = getattr(metaleo, name)
    text = inspect.getdoc(thing)
    assert "Examples:" in text
    if inspect.isclass(thing):
        has_none = name in (
            "BadInput",
            "Learner",
            "Tasks",
            "Episodes",
            "Network",
            "HyperParams",  # its fields have docstrings of their own, which `metaleo train --help` shows
        )  # nothing to hand over; others make them
        assert has_none or re.search(r"^(Args|Attributes)\b.*:$", text, re.MULTILINE)
    else:
        assert "Args:" in text
        assert all(re.search(rf"^\s+{parameter}: ", text, re.MULTILINE) for parameter in parameters(thing))
        assert "Returns:" in text or inspect.signature(thing).return_annotation in (None, "None")


@pytest.mark.usefixtures("loose_dtypes")
@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name):
    thing = getattr(metaleo, name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs={})
    assert test.examples
    runner.run(test)
    assert not runner.failures


def test_pages_and_examples_use_nothing_else():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md"), *ROOT.glob("examples/*.py")]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        private = re.findall(r"^\s*(?:from|import) metaleo\.\S+", text, re.MULTILINE)
        assert not private, f"{page.name}: {private}"
        lines = re.findall(r"^from metaleo import ([\w, ]+)", text, re.MULTILINE)
        assert {name.strip() for line in lines for name in line.split(",")} <= set(NAMES), page.name


@pytest.mark.parametrize("name", ["api", "cli"])
def test_reference_pages_are_up_to_date(name):
    tool = importlib.util.spec_from_file_location(f"make_{name}_page", ROOT / f"tools/make_{name}_page.py")
    module = importlib.util.module_from_spec(tool)
    tool.loader.exec_module(module)
    assert (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") == module.page()


def test_importing_it_is_cheap():
    """Nothing of ours, and no library, comes with `import metaleo`."""
    costly = "('jax', 'numpy', 'metaleo')"
    program = f"import sys, metaleo; print(*(name for name in sys.modules if name.split('.')[0] in {costly}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["metaleo"]
