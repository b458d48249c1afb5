"""What the README shows must run."""

import re
from pathlib import Path

import pytest

from metaleo.cli import main

README = Path(__file__).parent.parent / "README.md"


def test_python_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
    assert capsys.readouterr().out.startswith("[")


def test_commands_are_known(capsys):
    commands = set(re.findall(r"^metaleo (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE))
    assert commands
    for command in commands:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
    assert "metaleo train" in capsys.readouterr().out
