"""What the README and the guides show must run."""

import re
from pathlib import Path

import pytest

from metaleo.cli import main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


def run_examples(page):
    """What the Python blocks of a page leave behind."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names = [{} for _ in blocks]
    for block, own in zip(blocks, names, strict=True):
        exec(compile(block, str(page), "exec"), own)
    return names


def test_python_examples_run(capsys):
    run_examples(README)
    assert capsys.readouterr().out.startswith("[")


def test_regression_from_python():
    (names,) = run_examples(ROOT / "docs/regression.md")
    assert names["mean"].shape == names["std"].shape == (2,)
    assert names["functions"].shape == (2, 5)


@pytest.mark.usefixtures("loose_dtypes")
def test_a_network_of_your_own_learns():
    """The guide's example, as it stands: validation loss falls, and the adapted model is a function of one input."""
    (names,) = run_examples(ROOT / "docs/networks.md")
    losses = [-float(merit) for merit in names["merits"]]
    assert losses[-1] < 0.8 * losses[0]
    prediction = names["head"](names["jnp"].array([2.5]))
    assert prediction.shape == (1,)
    code = (ROOT / "docs/networks.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 20


def test_commands_are_known(capsys):
    commands = set(re.findall(r"^metaleo ([\w-]+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert commands
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
    assert "metaleo train" in capsys.readouterr().out
