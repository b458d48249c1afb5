"""What the site needs beyond the pages: files of the repository that they link to, and examples in docstrings."""

import os
import re
from pathlib import Path, PurePosixPath

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
REPOSITORY = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "src/metaleo/assets/data/README.md",
    "src/metaleo/assets/drawings/README.md",
    "src/metaleo/assets/models/README.md",
)
"""Files outside docs/ that become pages, under `repository/`."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)(?=[)#])")


def place_of(page: str) -> str:
    """Where a page of the site is in the repository."""
    return page.removeprefix("repository/") if page.startswith("repository/") else f"docs/{page}"


def page_of(place: str) -> str:
    """The page that a file of the repository becomes; itself where it becomes none, which strict building refuses."""
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    return f"repository/{place}" if place in REPOSITORY else place


def on_config(config):
    """Every decision has a page, by the order of their numbers."""
    explanation = next(part["Explanation"] for part in config.nav if "Explanation" in part)
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"))
    explanation.append({"Decisions": [f"decisions/{path.name}" for path in decisions]})
    return config


def on_files(files, config):
    for name in REPOSITORY:
        files.append(File.generated(config, f"repository/{name}", content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown, page, **_):
    """Links that are right in the repository, made right on the site; a number and its interval stay on one line."""
    here = page.file.src_uri

    def turned(match: re.Match[str]) -> str:
        place = os.path.normpath(PurePosixPath(place_of(here)).parent / match[1])
        return os.path.relpath(page_of(place), PurePosixPath(here).parent)

    return re.sub(r"(?<=\d) ± (?=\d)", "\u00a0±\u00a0", LINK.sub(turned, markdown))


class Examples(griffe.Extension):
    """`>>>` in a docstring is code, and lines like `name: meaning` are a list, also those of `Args (of …)`."""

    def on_instance(self, *, obj, **_):
        if obj.docstring is None:
            return
        parts = re.split(r"\n\n(?=\S)", obj.docstring.value)
        obj.docstring.value = "\n\n".join(map(self.shaped, parts))

    def shaped(self, part: str) -> str:
        if part.startswith(">>> "):
            return f"```pycon\n{part}\n```"
        if part.startswith("Args (of "):
            title, *lines = part.splitlines()
            listed = [re.sub(r"^    ([\w, ]+): ", r"- *\1*: ", line) for line in lines]
            return "\n".join([f"**Parameters of {title[9:-2]}:**", "", *listed])
        if re.match(r"\w+: ", part) and part.count("\n"):
            return re.sub(r"^(\w+): ", r"- `\1`: ", part, flags=re.MULTILINE)
        return part
