"""Figures, as PNG files that say what they show."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from metaleo.files import replacing
from metaleo.runs import Record

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito: told apart by every eye


def plot_curves(path: Path, runs: Mapping[str, Sequence[Record]], title: str) -> None:
    """Accuracy over meta-steps of one or several runs: thin on training tasks, thick on validation tasks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150, layout="constrained")
    for (name, records), colour in zip(runs.items(), COLOURS, strict=False):
        for index, seed in enumerate(sorted({record["seed"] for record in records})):
            own = [record for record in records if record["seed"] == seed]
            for field, style in (
                ("query_accuracy", {"alpha": 0.35, "linewidth": 1}),
                ("validation_accuracy", {"marker": "o", "markersize": 3, "linewidth": 1.6}),
            ):
                points = [(r["step"], 100 * r[field]) for r in own if r.get(field) is not None]
                what = "training tasks (dropout on)" if field == "query_accuracy" else "validation tasks"
                label = f"{name}, {what}" if index == 0 else None
                axes.plot(*zip(*points, strict=True) if points else ([], []), color=colour, label=label, **style)
    axes.set(xlabel="meta-steps", ylabel="accuracy on query examples (%)", title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    plt.close(figure)
