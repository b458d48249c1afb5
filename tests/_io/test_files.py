"""Files are replaced whole or not at all, and leave nothing behind."""

import os
import stat
import time

import pytest

from helpers.small import message
from metaleo._io import files
from metaleo._io.files import atomic_write, write_text
from metaleo.errors import BadInput


def test_temporary_names_cannot_be_guessed(tmp_path):
    names = []
    for _ in range(2):
        with atomic_write(tmp_path / "a.json") as temporary:
            assert temporary.is_file()  # it is ours from the start: nobody else can put a link there
            names.append(temporary.name)
    assert len(set(names)) == 2
    assert str(os.getpid()) not in names[0].split(".")


def test_a_file_has_the_mode_that_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


def test_temporary_files_of_killed_writers_are_removed(tmp_path):
    old, older, young = (tmp_path / f".a.txt.{middle}.tmp" for middle in ("0123456789abcdef", "4711", "f" * 16))
    others = [tmp_path / name for name in (".b.txt.0123456789abcdef.tmp", ".a.txt.mine.tmp", "a.txt.tmp")]
    for path in (old, older, young, *others):
        path.write_text("half")
        if path is not young:
            os.utime(path, (time.time() - 2 * files.STALE,) * 2)
    write_text(tmp_path / "a.txt", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", young.name, *(path.name for path in others)}


def test_windows_refuses_while_a_file_is_mapped(tmp_path, monkeypatch):
    calls = []

    def refuse(_from, _to, real=os.replace):
        calls.append(1)
        if len(calls) < 3:
            raise PermissionError(13, "Access is denied")
        real(_from, _to)

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(files.time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "replace", refuse)
    write_text(tmp_path / "a.txt", "x")
    assert (tmp_path / "a.txt").read_text() == "x"
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Access is denied")))
    assert "another program has it open" in message(lambda: write_text(tmp_path / "a.txt", "y"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_failure_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "a.txt", "before")
    with pytest.raises(BadInput, match="what was saved before is intact"), atomic_write(tmp_path / "a.txt"):
        raise OSError(28, "No space left on device")
    assert (tmp_path / "a.txt").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1
