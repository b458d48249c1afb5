"""Compiled programs are kept for the next process: where, whose, and that they are read back."""

import os
import stat
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from metaleo._jax.devices import enable_compilation_cache
from metaleo.cli import main

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


def folder() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


@pytest.fixture(autouse=True)
def as_a_user(tmp_path, monkeypatch):
    """Without the cache that all tests share, and with a temporary home."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    for name in SETTINGS:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    compilation_cache.reset_cache()
    with warnings.catch_warnings():
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def events():
    """What happens to kept programs."""
    heard = []

    def listen(event, **_):
        heard.append(event.removeprefix("/jax/compilation_cache/"))

    jax.monitoring.register_event_listener(listen)
    yield heard
    jax.monitoring.unregister_event_listener(listen)


def test_in_the_home_and_for_its_owner_alone(tmp_path):
    enable_compilation_cache()
    kept = tmp_path / "home/.cache/metaleo/compiled"
    assert folder() == str(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert jax.config.values["jax_compilation_cache_max_size"] == 2**30


def test_where_the_user_keeps_such_things(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    enable_compilation_cache()
    assert folder() == str(tmp_path / "elsewhere/metaleo/compiled")
    assert not (tmp_path / "home").exists()


def test_settings_of_the_user_win(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    enable_compilation_cache()
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 7
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    enable_compilation_cache()
    assert folder() == str(tmp_path / "mine")


def test_switched_off(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    enable_compilation_cache()
    assert folder() is None
    assert not (tmp_path / "home").exists()


def test_importing_changes_nothing():
    program = "import jax, metaleo.cli; print(jax.config.values['jax_compilation_cache_dir'])"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "None"


def test_every_command_keeps_its_programs(tmp_path):
    main(["info", "miniimagenet"])
    assert folder() == str(tmp_path / "home/.cache/metaleo/compiled")


def not_a_folder(home):
    home.write_text("a file")


def open_to_others(home):
    kept = home / ".cache/metaleo/compiled"
    kept.mkdir(parents=True)
    kept.chmod(0o770)


@pytest.mark.parametrize("spoil", [not_a_folder, open_to_others])
def test_without_such_a_folder_nothing_is_kept(tmp_path, spoil):
    spoil(tmp_path / "home")
    enable_compilation_cache()
    assert folder() is None


def test_nothing_is_kept_in_a_folder_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    enable_compilation_cache()
    assert folder() is None


def test_nothing_is_kept_in_the_folder_of_another(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    enable_compilation_cache()
    assert folder() is None


def test_a_kept_program_is_read_back(tmp_path, events):
    enable_compilation_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    kept = tmp_path / "home/.cache/metaleo/compiled"

    def compute():
        return jax.jit(lambda x: jnp.sin(x) @ x)(jnp.eye(3))[0, 0]

    first = compute()
    assert len(list(kept.glob("*lambda*-cache"))) == 1
    assert "cache_misses" in events
    assert "cache_hits" not in events
    assert compute() == first
    assert events.count("cache_hits") >= 1


def test_a_half_written_program_is_forgotten(tmp_path):
    """JAX writes the time of use last. Without it, it could write nothing more, and warned at each program."""
    kept = tmp_path / "home/.cache/metaleo/compiled"
    kept.mkdir(parents=True, mode=0o700)
    for name in ("half-cache", "whole-cache", "whole-atime"):
        (kept / name).write_bytes(bytes(8))
    enable_compilation_cache()
    assert sorted(path.name for path in kept.iterdir()) == ["whole-atime", "whole-cache"]


def test_a_damaged_program_is_compiled_again_without_a_word(tmp_path):
    enable_compilation_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    def compute():
        return jax.jit(lambda x: jnp.cos(x) @ x)(jnp.eye(3))[0, 0]

    first = compute()
    for path in (tmp_path / "home/.cache/metaleo/compiled").glob("*-cache"):
        path.write_bytes(b"nonsense")
    assert compute() == first  # a warning is an error in tests
