"""The paper's protocol: all rows by one procedure, one report, the same whether or not it was interrupted."""

import json
import math

import numpy as np
import pytest
from scipy import stats

from helpers.small import make_metaset
from metaleo.cli import main
from metaleo.data import save_data
from metaleo.experiments import reproduce as protocol
from metaleo.experiments.reproduce import CLAIMS, PAPER, ROWS, ReproductionPlan, RowResult, difference, verdict
from metaleo.training.run import Interrupted

pytestmark = pytest.mark.usefixtures("loose_dtypes")
TINY = (
    "--data", "features.npz", "--quick", "--trials", "4", "--search-steps", "4", "--final-steps", "4", "--tasks", "30",
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with features that have the splits of miniImageNet."""
    monkeypatch.chdir(tmp_path)
    save_data(make_metaset((64, 16, 20), images=20), "features.npz")
    return tmp_path


def result(row, accuracy, seeds=(50.0, 51.0)):
    return RowResult(row, list(seeds), np.asarray(accuracy), 1.0, 0.1, [50.0], [10], {"keep_prob": 0.5}, 50.0)


def test_difference_pairs_tasks_and_counts_seeds():
    rng = np.random.default_rng(0)
    common = rng.normal(0.5, 0.1, 400)
    a = result("leo", common + 0.02 + 0.01 * rng.normal(size=400), (52.0, 53.0, 54.0))
    b = result("meta-sgd", common, (50.0, 50.5, 49.5))
    value, interval = difference(a, b)
    each = 100 * (a.tasks - b.tasks)
    assert value == pytest.approx(each.mean())
    over_seeds = stats.t.ppf(0.975, 4) * math.sqrt(1.0 / 3 + 0.25 / 3)
    assert interval == pytest.approx(math.hypot(1.96 * stats.sem(each), over_seeds))
    assert [verdict(*pair) for pair in ((2, 1), (-2, 1), (0.5, 1))] == ["holds", "does not hold", "undecided"]


def test_the_papers_table():
    """Spot checks against Table 2, and that every claim is about rows that there are."""
    assert dict(zip(ROWS, PAPER["miniimagenet", 5], strict=True))["leo-generator"] == (74.53, 0.11)
    assert dict(zip(ROWS, PAPER["tieredimagenet", 1], strict=True))["leo"] == (66.33, 0.05)
    assert ReproductionPlan("sample", "sample").paper(1)["meta-sgd"] == (54.24, 0.03)
    assert ReproductionPlan("miniimagenet", "x").paper(3) == {}
    assert all(a in ROWS and b in ROWS for _, a, b in CLAIMS)


@pytest.mark.slow
def test_report(here, capsys):
    command = ["reproduce", "miniimagenet", *TINY, "--rows", "leo-generator", "meta-sgd"]
    main([*command, "--json"])
    report = json.loads(capsys.readouterr().out)
    folder = here / "reproduce-miniimagenet"
    assert report == json.loads((folder / "report.json").read_text())
    rows = {row["row"]: row for row in report["shots"]["1"]["rows"]}
    assert list(rows) == ["meta-sgd", "leo-generator"]
    assert rows["meta-sgd"]["paper"] == [54.24, 0.03]
    scores = [np.load(folder / f"1shot/meta-sgd/final/test-{seed}.npz")["accuracy"] for seed in (0, 1)]
    assert rows["meta-sgd"]["accuracy"] == pytest.approx(100 * np.mean(scores), abs=2e-3)
    [claim] = report["shots"]["1"]["claims"]
    assert claim["difference"] == pytest.approx(
        rows["leo-generator"]["accuracy"] - rows["meta-sgd"]["accuracy"], abs=2e-3
    )
    text = (folder / "report.md").read_text()
    assert "metaleo reproduce miniimagenet --data features.npz --shot 1 --rows leo-generator meta-sgd --quick" in text
    assert "Conditional generator only" in text
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "curves-1shot.png").read_bytes().startswith(b"\x89PNG")
    final = json.loads((folder / "1shot/meta-sgd/final/config.json").read_text())
    assert final["train_on"] == "train+val"
    assert final["seeds"] == 2
    assert final["hyper"]["keep_prob"] == rows["meta-sgd"]["chosen"]["keep_prob"]

    before = (folder / "report.json").read_text()
    (folder / "1shot/meta-sgd/final/test-1.npz").unlink()  # as if killed before the last test
    main(command)
    assert (folder / "report.json").read_text() == before
    shown = capsys.readouterr().out
    assert f"Meta-SGD {rows['meta-sgd']['accuracy']:.2f} ± {rows['meta-sgd']['deviation']:.2f} 54.24 ± 0.03" in (
        " ".join(shown.split())
    )
    with pytest.raises(SystemExit):
        main([*command, "--tasks", "40"])
    assert "was made with tasks 30, not 40" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_between_stages(here, monkeypatch, capsys):
    command = ["reproduce", "miniimagenet", *TINY, "--rows", "meta-sgd"]
    main([*command, "--out", "whole"])
    with monkeypatch.context() as patch:
        patch.setattr(protocol, "score_seed", lambda *_: (_ for _ in ()).throw(Interrupted))
        with pytest.raises(SystemExit) as end:
            main([*command, "--out", "cut"])
        assert end.value.code == 130
    main([*command, "--out", "cut"])
    assert (here / "cut/report.json").read_text() == (here / "whole/report.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("miniimagenet",), "miniimagenet needs --data"),
        (
            ("miniimagenet", *TINY, "--rows", "leoo"),
            "unknown row 'leoo': did you mean leo? Known are all, meta-sgd",
        ),
        (("tieredimagenet", *TINY), "tieredimagenet has 351/97/160 train/val/test classes"),
        (("miniimagenet", *TINY, "--seeds", "0"), "--seeds 0 must be at least 1"),
        (("miniimagenet", *TINY, "--shot", "50"), "need 65 examples per class"),
    ],
    ids=str,
)
def test_mistakes(here, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(["reproduce", *arguments])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said.strip().splitlines()[-1]
    assert "Traceback" not in said
