"""Which tests run by default, and which with `-m slow`."""

from collections.abc import Iterable
from typing import Any

import pytest

slow = pytest.mark.slow


def by_default(always: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases of one argument for `parametrize`: those in `always` run by default, all others are slow tests."""
    always, cases = list(always), list(cases)
    assert all(case in cases for case in always), "not among the cases"
    return [case if case in always else pytest.param(case, marks=slow) for case in cases]
