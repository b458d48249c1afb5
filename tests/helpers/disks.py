"""Disks that fail."""

import contextlib

import pytest


@contextlib.contextmanager
def files_no_larger_than(size: int):
    """A disk that is soon full."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
