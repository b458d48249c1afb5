"""A few hundred damaged files; `python tests/fuzz/run.py --cases 20000` reads more."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.mutations import OTHERS, mutate_value


def fuzz(folder, *flags):
    command = [sys.executable, str(Path(__file__).with_name("run.py")), "--json", "--failures", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def check(found):
    assert not found["failures"], json.dumps(found["failures"], indent=2)
    assert found["accepted"] + found["refused"] == found["cases"]
    assert found["accepted"] > 0.05 * found["cases"]
    assert found["peak_memory_mib"] < 1024


def test_a_case_leaves_nothing_behind():
    """Parts that are put in are copies: none can end up within itself, or be another one in the next case."""
    before = repr(OTHERS)
    for seed in range(2000):
        json.dumps(mutate_value({"a": {"b": [1, 2]}, "c": [0]}, random.Random(seed)))
        assert repr(OTHERS) == before


def test_damaged_files_are_read_or_refused_in_one_line(tmp_path):
    check(fuzz(tmp_path, "--cases", "300", "--seed", "0"))


@pytest.mark.slow
def test_thousands(tmp_path):
    check(fuzz(tmp_path, "--cases", "1500", "--seed", "1"))
