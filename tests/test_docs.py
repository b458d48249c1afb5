"""What the README and the pages show must run, and what they name must exist.

Blocks of ```python run. Blocks of ```sh are read: every `metaleo` line must be a command with flags that it knows; on
the pages in WHOLE they run too, in order with the Python. ```bash is read but never run. A block of ```text after
another is what that one prints; `...` stands for anything.
"""

import contextlib
import doctest
import importlib
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from helpers.marks import by_default
from metaleo.checkpoints import builtin_model_path
from metaleo.cli import CLASSES, command_class
from metaleo.cli.common import registry
from metaleo.cli.parsing import STYLE
from metaleo.config.presets import PRESETS
from metaleo.features.recipes import ARCHITECTURES, RECIPES
from metaleo.learners.registry import LEARNERS

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]}
WHOLE = tuple(
    f"docs/{page}.md" for page in ("getting-started", "guides/own-data", "guides/export", "guides/serve", "guides/text")
)
"""Pages that also need their commands, or minutes."""
SERVER = "http://127.0.0.1:8765"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    """The language and the text of each block of a page, and what it is to print, or None."""
    text = page.read_text("utf-8")
    found = list(BLOCK.finditer(text))
    for match, after in itertools.zip_longest(found, found[1:]):
        shown = after is not None and after[2] == "text" and not text[match.end() : after.start()].strip()
        yield match[2], match[3], after[3] if shown else None


def with_python(page):
    return any(language == "python" for language, _, _ in blocks(page))


def check_output(printed, shown):
    rules = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(shown, printed, rules), (
        f"the page shows:\n{shown}\nit prints:\n{printed}"
    )


def run_python(text, page, names):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(text, str(page), "exec"), names)
    return printed.getvalue()


def run_page(name, folder, monkeypatch):
    """What the Python blocks of a page leave behind, and print."""
    monkeypatch.chdir(folder)
    page, names, everything = PAGES[name], {}, ""
    for language, text, shown in blocks(page):
        if language == "python":
            printed = run_python(text, page, names)
            everything += printed
            if shown is not None:
                check_output(printed, shown)
    return names, everything


@pytest.mark.usefixtures("loose_dtypes")
@pytest.mark.parametrize(
    "name", by_default(["README.md"], [name for name, page in PAGES.items() if with_python(page) and name not in WHOLE])
)
def test_python_runs(name, tmp_path, monkeypatch):
    names, printed = run_page(name, tmp_path, monkeypatch)
    special = {
        "README.md": check_readme,
        "docs/guides/functions.md": check_functions,
        "docs/guides/networks.md": check_networks,
    }
    if name in special:
        special[name](names, printed)


def check_readme(names, printed):
    assert names["rows"].shape == (300, 640)
    assert float(printed) > 0.7


def check_functions(names, _):
    assert names["mean"].shape == names["std"].shape == (2,)
    assert names["functions"].shape == (2, 5)


def check_networks(names, _):
    """Validation loss falls, the adapted model is a function of one input, and all of it is twenty lines."""
    losses = [-float(score) for score in names["scores"]]
    assert losses[-1] < 0.8 * losses[0]
    assert names["head"](names["jnp"].array([2.5])).shape == (1,)
    code = next(text for language, text, _ in blocks(PAGES["docs/guides/networks.md"]) if language == "python")
    assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= 20


# Commands


def commands(text):
    """The arguments of each call of `metaleo` in a shell script; of a loop, its first round."""
    variables = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = substituted(line, variables)
        for name, value in re.findall(r"\bfor (\w+) in ([^\s;]+)", line):
            variables[name] = value
        for name, value in re.findall(r"(?:^|[;\s])(\w+)=(\"[^\"]*\"|[^\s;]+)", line):
            variables[name] = substituted(value.strip('"'), variables)
        lexer = shlex.shlex(substituted(line, variables), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        calls = [[]]
        for word in lexer:
            calls[-1].append(word)
            if set(word) <= set(";&|()<>"):
                calls[-1].pop()
                calls.append([])
        yield from (call[call.index("metaleo") + 1 :] for call in calls if "metaleo" in call)


def substituted(text, variables):
    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda match: variables.get(match[1] or match[2], match[0]), text)


def is_known(arguments):
    """Whether the command line can be parsed; a word in capitals may stand for anything, or for nothing."""
    if arguments == ["--version"]:
        return True
    if arguments[0] not in CLASSES:
        return False
    for words in (arguments[1:], [word for word in arguments[1:] if not word.isupper()]):
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            with contextlib.redirect_stdout(io.StringIO()):
                tyro.cli(command_class(arguments[0]), args=words, config=STYLE, registry=registry)
            return True
    return False


def test_commands_are_found_in_scripts():
    script = (
        'C="--shot 5 --steps 9"\npip install . && metaleo train $C \\\n  --out "a b"  # metaleo not\n'
        "for i in 1 2; do metaleo info r-${i}.npz > $i.txt; done"
    )
    assert list(commands(script)) == [["train", "--shot", "5", "--steps", "9", "--out", "a b"], ["info", "r-1.npz"]]
    assert is_known(["train", "--shot", "5"])
    assert is_known(["pretrain", "--images", "photos/", "SETTINGS"])
    assert not is_known(["train", "--shots", "5"])
    assert not is_known(["train", "--shot", "five"])
    assert not is_known(["trian"])


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_known(name):
    calls = [call for language, text, _ in blocks(PAGES[name]) if language in ("sh", "bash") for call in commands(text)]
    unknown = [shlex.join(["metaleo", *call]) for call in calls if not is_known(call)]
    assert not unknown


def test_paper_to_code_names_what_exists():
    known = {*LEARNERS, *PRESETS, *RECIPES, *ARCHITECTURES}
    rows = [line for line in PAGES["docs/paper-to-code.md"].read_text("utf-8").splitlines() if line.startswith("| ")]
    named = [word for row in rows for word in re.findall(r"`([^`]+)`", row.split(" | ")[-1])]
    assert len(named) > 100
    missing = [word for word in named if not (word in known or exists(word))]
    assert not missing


def exists(word):
    if word.startswith("metaleo "):
        arguments = shlex.split(word)[1:]
        return is_known(arguments) or is_known([*arguments, "RUN"])
    parts = f"metaleo.{word}".split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError, AttributeError):
            thing = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                thing = getattr(thing, part)
            return True
    return False


# Whole pages, the site


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Run a script in an empty folder, in which `metaleo` is this checkout's and `pip` does nothing; all it prints."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, does in {"metaleo": f'exec "{sys.executable}" -m metaleo.cli "$@"', "pip": "exit 0"}.items():
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    own = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": ""}

    def run(script):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout

    return run


@pytest.fixture
def server():
    """The address of `metaleo serve`, on a port that is free."""
    command = [sys.executable, "-m", "metaleo.cli", "serve", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        found = next((match[0] for match in (re.search(r"http://[\d.:]+", line) for line in lines) if match), None)
        assert found is not None
        yield found
        process.terminate()


@pytest.mark.slow
@pytest.mark.usefixtures("loose_dtypes")
@pytest.mark.parametrize("name", WHOLE)
def test_whole_page_runs(name, shell, request):
    page, names = PAGES[name], {}
    address = request.getfixturevalue("server") if name.endswith("serve.md") else SERVER
    if name.endswith("export.md"):  # the page begins with a run that is there
        Path("runs/leo-5way-1shot").mkdir(parents=True)
        shutil.copy(builtin_model_path("miniimagenet-leo"), "runs/leo-5way-1shot/model.safetensors")
    ran = 0
    for language, text, shown in blocks(page):
        if language not in ("python", "sh"):
            continue
        text = text.replace(SERVER, address)
        printed = run_python(text, page, names) if language == "python" else shell(text)
        ran += 1
        if shown is not None:
            check_output(printed, shown)
    assert ran


@pytest.mark.slow
def test_site_builds(tmp_path):
    """Without a complaint, and without anything that a reader's browser would fetch from elsewhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.glob("**/*.html"))
    assert len(pages) > 20
    source, sheet = r"<(script|img|iframe)[^>]*\ssrc=", r"<link[^>]*rel=[\"']?stylesheet[^>]*href="
    fetched = rf"({source}|{sheet})[\"']?(https?:)?//"
    assert not [page.name for page in pages if re.search(fetched, page.read_text("utf-8"))]
