"""A handful of the faults of `python tests/chaos/run.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.marks import by_default

COMMANDS = ("train", "search", "reproduce", "pretrain", "embed", "adapt", "export", "split")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
@pytest.mark.parametrize("command", by_default(["split"], COMMANDS))
def test_a_disturbed_command_ends_as_if_left_in_peace(command):
    """Killed, interrupted, out of disk, on a read-only disk, and beside another process."""
    script = Path(__file__).with_name("run.py")
    words = [sys.executable, str(script), "--kills", "2", "--others", "2", "--only", command, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert not found["failures"], found["failures"]
    assert found["done"]["kill"] >= 2
