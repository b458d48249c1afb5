"""This checkout's speed beside that of an earlier commit: benchmarks/speed.py of both, in turn, on the same machine.

    python benchmarks/before_and_after.py --before 74fc346

Prints JSON: medians over the rounds, and their ratios. What is unknown here goes to both (`--steps 50 --shots 1`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent.parent
RATES = "meta_steps_per_second", "evaluation_tasks_per_second"


def run(checkout: Path, options: list[str]) -> list[dict[str, float]]:
    command = [sys.executable, "benchmarks/speed.py", *options]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    options, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        earlier = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", earlier, options.before], cwd=HERE, check=True)
        try:
            rounds = [(run(earlier, others), run(HERE, others)) for _ in range(options.rounds)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", earlier], cwd=HERE, check=True)
    table = []
    for place, shot in enumerate(one["shot"] for one in rounds[0][0]):
        row: dict[str, float] = {"shot": shot}
        for rate in RATES:
            before, after = (statistics.median(one[side][place][rate] for one in rounds) for side in (0, 1))
            row |= {f"{rate}_before": before, rate: after, f"{rate}_ratio": round(after / before, 2)}
        table.append(row)
    print(json.dumps({"before": options.before, "rounds": options.rounds, "runs": table}, indent=2))


if __name__ == "__main__":
    main()
