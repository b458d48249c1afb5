"""Write docs/api.md, the reference of what `from metaleo import …` offers, from the list in the package."""

import argparse
from pathlib import Path

import metaleo

TITLES = {
    "estimators": "Estimators",
    "data": "Data",
    "tasks": "Tasks",
    "nn": "Networks",
    "learners": "Learners",
    "training": "Meta-training",
    "evaluation": "Evaluation",
    "checkpoints": "Model files",
    "experiments": "Comparison",
    "engines": "Engines",
    "errors": "Errors",
}
INTRODUCTION = """# Python

Import all of this from `metaleo` itself. It is stable; everything else in the package is private. Annotations give the
shapes: `Float[Array, "query way"]` is an array of floats with a row per query and a column per class. [From the paper
to the code](paper-to-code.md) lists where each equation is. (`tools/make_api_page.py` writes this page.)
"""


def page() -> str:
    parts, before = [INTRODUCTION], None
    for module, names in metaleo.PUBLIC.items():
        room = module.split(".")[0]
        if room != before:
            parts.append(f"## {TITLES[room]}\n")
            before = room
        parts += [f"::: metaleo.{module}.{name}\n" for name in names]
    return "\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/api.md"))
    parser.parse_args().out.write_text(page(), encoding="utf-8")
