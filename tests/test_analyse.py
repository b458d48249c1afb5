"""`metaleo analyse` and `metaleo report` as a user meets them."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from helpers.commands import fails, told
from helpers.runs import make_run
from helpers.small import DIM, make_metaset
from metaleo import data
from metaleo._io.progress import Progress
from metaleo.checkpoints import load_candidates, load_model, save_model
from metaleo.cli import main
from metaleo.config.presets import SINES
from metaleo.evaluation.evaluate import TaskSuite
from metaleo.learners.registry import Structure
from metaleo.plotting.figures import as_label
from metaleo.reporting.findings import AnalysisSettings
from metaleo.reporting.page import results_section, runs_section

SMALL = Structure(dim=DIM, way=3, latent=4, latent_steps=2, finetune_steps=2, latent_step_size=0.5)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data.save_data(make_metaset(), "features.npz")
    make_run(tmp_path / "leo", SMALL, seeds=(0, 1))
    make_run(tmp_path / "generator", dataclasses.replace(SMALL, learner="leo-generator-finetuned"))
    make_run(tmp_path / "sgd", dataclasses.replace(SMALL, learner="meta-sgd"))
    make_run(tmp_path / "nets", dataclasses.replace(SMALL, learner="prototypical"))
    return tmp_path


def is_figure(path):
    with Image.open(path) as image:
        assert min(image.size) > 300
    return True


def test_codes(here, capsys):
    result = told(capsys, "analyse", "codes", "leo", "--tasks", "25", "--seed", "3", "--out", "a/codes.png")
    assert is_figure("a/codes.png")
    (model,) = result["models"]
    assert (result["split"], result["tasks"], result["seed"], result["way"]) == ("val", 25, 3, 3)
    assert (model["model"], model["codes"], model["classes"]) == ("leo/model-0.safetensors", 75, 5)
    assert model["before"]["silhouette"] != model["after"]["silhouette"]


@pytest.mark.slow
def test_codes_of_one_model(here, capsys):
    places = "leo", "leo/model-0.safetensors", "leo/model-1.safetensors"
    both, first, second = (
        told(capsys, "analyse", "codes", place, "--tasks", "25", "--seed", "3", "--overwrite") for place in places
    )
    assert first["models"] == both["models"]
    assert second["models"][0]["moved"] != first["models"][0]["moved"]


@pytest.mark.slow
def test_curvature_and_coverage(here, capsys):
    runs = ("leo", "generator", "sgd")
    curvature = told(capsys, "analyse", "curvature", *runs, "--tasks", "7", "--out", "c.svg")
    assert "<svg" in (here / "c.svg").read_text()
    leo, generator, sgd = curvature["models"]
    assert [leo["name"], generator["name"], sgd["name"]] == ["LEO", "generator + fine-tuning", "Meta-SGD"]
    assert leo["numbers"] == {"z": 12, "theta": 3 * DIM}
    assert sgd["numbers"] == {"theta": 3 * DIM}
    assert "z before" not in sgd
    assert generator["z before"] == generator["z after"] == leo["z before"] != leo["z after"]  # the same weights
    coverage = told(capsys, "analyse", "coverage", *runs, "--tasks", "7", "--out", "c.pdf")
    assert (here / "c.pdf").read_bytes().startswith(b"%PDF")
    assert {name for name in coverage["models"][2] if name.startswith("steps")} == {"steps theta"}
    assert {name for name in coverage["models"][0] if name.startswith("steps")} == {
        "steps z", "steps decoded", "steps theta"
    }  # fmt: skip


@pytest.mark.slow
def test_uncertainty_is_of_the_tasks_that_evaluate_tests(here, capsys):
    found = told(capsys, "analyse", "uncertainty", "leo", "sgd", "--tasks", "9", "--samples", "5", "--seed", "2")
    assert is_figure("uncertainty.png")
    leo, sgd = found["models"]
    assert set(leo) - {"name", "model"} == {"means", "samples"}
    assert set(sgd) - {"name", "model"} == {"means"}
    assert 0 < leo["samples"]["disagreement"]["mean"] < 1
    for name, own in (("leo/model-0.safetensors", leo), ("sgd", sgd)):
        tested = told(capsys, "evaluate", name, "--tasks", "9", "--seed", "2")
        assert own["means"]["accuracy"] == pytest.approx(tested["models"][0]["accuracy"], abs=1e-6)


def test_one_task_has_no_interval(here, capsys):
    found = told(capsys, "analyse", "uncertainty", "sgd", "--tasks", "1", "--query", "1")
    assert found["models"][0]["means"]["accuracy_interval"] is None


@pytest.mark.slow
def test_functions(here, capsys):
    small = dataclasses.replace(SINES, latent=4, latent_steps=2, finetune_steps=1, hidden=3, max_grad_norm=1.0)
    make_run(here / "sines", small, data="sines-and-lines", shot=4)
    codes = told(capsys, "analyse", "codes", "sines", "--tasks", "30")
    assert (codes["models"][0]["classes"], codes["models"][0]["codes"]) == (2, 30)
    assert is_figure("codes.png")
    curvature = told(capsys, "analyse", "curvature", "sines", "--tasks", "6")
    assert curvature["models"][0]["numbers"] == {"z": 4, "theta": 3 * 2 + 3 * 4 + 4}
    coverage = told(capsys, "analyse", "coverage", "sines", "--tasks", "6")
    assert coverage["models"][0]["singular values"]["greatest"] > 0
    asked = told(capsys, "analyse", "uncertainty", "sines", "--tasks", "6", "--samples", "4")
    assert len(asked["models"][0]["coverage"]) == 19
    main(["report", "sines", "--tasks", "25", "--out", "sines.html"])
    page = (here / "sines.html").read_text()
    assert page.count("data:image/png") == 6
    assert "Left out" not in page


class Page(HTMLParser):
    """What a page holds."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.addresses, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text += f"{text}\n"


@pytest.mark.slow
def test_report_is_one_page_that_needs_nothing_else(here, capsys):
    result = told(capsys, "report", "leo", "sgd", "--tasks", "25", "--test-tasks", "40")
    assert result["page"] == "report.html"
    assert result["sections"] == [
        "Runs",
        "Learning curves",
        "Results",
        "Certainty",
        "Codes of LEO",
        "Curvature",
        "Coverage",
    ]
    page = Page((here / "report.html").read_text())
    assert page.open == []
    assert not {"script", "link", "iframe"} & set(page.seen)
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.addresses)
    assert page.seen.count("img") == 5
    assert "url(" not in (here / "report.html").read_text()
    (tested,) = [model for model in told(capsys, "evaluate", "leo", "--tasks", "40")["models"] if model["seed"] == 1]
    assert f"{100 * tested['accuracy']:.2f} ± {100 * tested['accuracy_interval']:.2f} %" in page.text
    assert "metaleo report leo sgd --tasks 25 --test-tasks 40" in page.text
    assert '"encoder_penalty"' in page.text
    assert "0.55 ± 0.07" not in page.text  # accuracies are in per cent
    assert "55.00 ± 7.07 %" in page.text
    assert str(here) not in page.text


def test_a_report_has_likelihood_with_the_temperature_and_without(here, capsys):
    """The same numbers as `evaluate`, in the same order; models without a temperature have only the latter."""
    model = load_model("leo/model-0.safetensors")
    header = {**model.header, "temperatures": [[1, 0.5], [5, 0.7]]}
    save_model(here / "leo/model-0.safetensors", model.learner, model.structure, header)
    candidates = load_candidates([Path("leo"), Path("sgd")])
    settings = AnalysisSettings(TaskSuite(candidates), "test", 0, 40, Progress())
    section = results_section(candidates, {one.source: one.source.name for one in candidates}, settings)
    tested = told(capsys, "evaluate", "leo/model-0.safetensors", "--tasks", "40")["models"][0]
    own, other, _, sgd, *baselines = section.rows
    assert [row[0] for row in baselines] == ["nearest-centroid", "logistic-regression"]
    assert all(0 < float(row[2].split()[0]) <= 100 for row in baselines)
    nll, error, plain_nll, plain_error = own[3:]
    assert nll == f"{tested['calibrated_nll']:.3f} ± {tested['calibrated_nll_interval']:.3f}"
    assert error == f"{100 * tested['calibrated_error']:.1f} %"
    assert plain_nll == f"{tested['nll']:.3f} ± {tested['nll_interval']:.3f}"
    assert plain_error == f"{100 * tested['calibration_error']:.1f} %"
    assert nll != plain_nll
    assert other[5:] == sgd[5:] == ("–", "–")
    assert {len(row) for row in (section.headings, *section.rows)} == {7}
    assert section.headings[5:] == ("likelihood before temperature", "error before temperature")
    without = results_section(candidates[1:], {one.source: one.source.name for one in candidates}, settings)
    assert {len(row) for row in (without.headings, *without.rows)} == {5}


def test_a_model_that_says_little_of_its_training(here, capsys):
    """Its seed and score are not needed; its configuration is."""
    model = load_model("leo/model-0.safetensors")
    kept = {"config": model.header["config"]}
    save_model(here / "bare.safetensors", model.learner, model.structure, kept)
    (tested,) = told(capsys, "evaluate", "bare.safetensors", "--tasks", "5")["models"]
    assert tested["seed"] is None
    candidates = load_candidates([Path("bare.safetensors")])
    names = {one.source: "bare" for one in candidates}
    assert runs_section(candidates, names).rows[0][-2:] == ("–", "–")
    section = results_section(candidates, names, AnalysisSettings(TaskSuite(candidates), "test", 0, 5, Progress()))
    assert section.rows[0][:2] == ("bare", "–")
    save_model(here / "mute.safetensors", model.learner, model.structure, {})
    for words in ("evaluate", "report", "export --out x.onnx", "plot-functions", "analyse codes"):
        said = fails(capsys, *words.split(), "mute.safetensors")
        assert "does not say with which" in said, words


@pytest.mark.slow
def test_names_cannot_change_the_page(here, capsys):
    (here / "leo").rename("<b>&amp;x")
    main(["report", "<b>&amp;x", "--tasks", "25", "--test-tasks", "5"])
    text = (here / "report.html").read_text()
    assert "<b>" not in text
    assert "<b>&amp;x" in Page(text).text


@pytest.mark.slow
def test_a_report_says_what_it_leaves_out(here, capsys):
    data.save_data(make_metaset(classes=(8, 2, 5)), "features.npz")
    main(["report", "leo/model-0.safetensors", "--tasks", "25", "--test-tasks", "5"])
    text = Page((here / "report.html").read_text()).text
    assert "Left out: 3-way tasks need 3 classes; the val split has 2." in text
    assert "Learning curves" not in text  # a model file has none


@pytest.mark.slow
def test_names_that_figures_could_misread(here, capsys):
    (here / "leo").rename("_a $x_{$")
    (here / "sgd").rename("$")
    runs = ("_a $x_{$", "$", "generator")
    main(["report", *runs, "--tasks", "25", "--test-tasks", "5"])
    assert "Left out" not in (here / "report.html").read_text()
    for name in runs:
        assert as_label(name).replace("\\$", "$").removeprefix("\u200b") == name
    main(["analyse", "coverage", *runs, "--tasks", "5", "--out", "x.png"])


@pytest.mark.slow
@pytest.mark.parametrize("runs", [("leo", "leo/model-0.safetensors"), ("leo/model-0.safetensors", "leo")])
def test_a_run_and_one_of_its_models(here, capsys, runs):
    result = told(capsys, "report", *runs, "--tasks", "25", "--test-tasks", "5")
    assert "Codes of LEO" in result["sections"]


def test_without_an_encoder_all_codes_start_at_one_point(here, capsys):
    make_run(here / "prior", dataclasses.replace(SMALL, learner="leo-random-prior"))
    (model,) = told(capsys, "analyse", "codes", "prior", "--tasks", "20", "--seed", "1")["models"]
    assert model["before"] == {"silhouette": None, "purity": None, "spread": 0.0}
    assert model["after"]["spread"] > 0


def test_bad_input(here, capsys):
    codes = ("analyse", "codes")
    assert "sgd/model.safetensors is a model of meta-sgd, which has no codes" in fails(capsys, *codes, "sgd")
    assert "takes no steps on its codes" in fails(capsys, *codes, "generator")
    assert "nets/model.safetensors (prototypical) takes no gradient steps" in fails(
        capsys, "analyse", "curvature", "leo", "nets"
    )
    assert "takes no gradient steps" in fails(capsys, "analyse", "coverage", "nets")
    (here / "empty").mkdir()
    for words in ((*codes, "empty"), ("analyse", "uncertainty", "empty"), ("report", "empty")):
        assert "empty has no model yet" in fails(capsys, *words)
    assert "nowhere does not exist" in fails(capsys, "analyse", "coverage", "leo", "nowhere")
    assert "6-way tasks need 6 classes; the val split has 5" in fails(capsys, *codes, "leo", "--way", "6")
    assert "--tasks 5 must be at least 20" in fails(capsys, *codes, "leo", "--tasks", "5")
    assert "--tasks 0 must be at least 1" in fails(capsys, "analyse", "curvature", "leo", "--tasks", "0")
    assert "1000 queries need 1002 examples" in fails(capsys, "analyse", "uncertainty", "leo", "--query", "1000")
    assert "--samples 1 must be at least 2" in fails(capsys, "analyse", "uncertainty", "leo", "--samples", "1")
    assert "ends in .png, .pdf, .svg; x.jpg does not" in fails(capsys, *codes, "leo", "--out", "x.jpg")
    assert "x.pdf: the file's name must end in .html or .htm" in fails(capsys, "report", "leo", "--out", "x.pdf")
    assert "no class 'cat' to highlight; there are class8, class9" in fails(
        capsys, *codes, "leo", "--tasks", "20", "--highlight", "cat"
    )
    assert "--split means nothing to sines-and-lines" in fails(capsys, *codes, "sines-and-lines", "--split", "test")
    assert "--query means nothing" in fails(capsys, "analyse", "uncertainty", "sines-and-lines", "--query", "3")
    assert "--highlight means nothing" in fails(capsys, *codes, "sines-and-lines", "--highlight", "sine")
    (here / "file").write_text("")
    assert "cannot write file/x.png" in fails(capsys, *codes, "leo", "--out", "file/x.png")
    assert "cannot write file/x.html" in fails(capsys, "report", "leo", "--out", "file/x.html")
    assert "numbers per example" in fails(capsys, "report", "leo", "--data", "sample")
    assert "different problems" in fails(capsys, "report", "leo", "sines-and-lines")
    assert "give a run folder or a model file" in fails(capsys, "analyse", "curvature")


@pytest.mark.slow
def test_a_model_that_diverges(here, capsys):
    path = here / "leo/model-0.safetensors"
    model = load_model(path)
    save_model(path, jax.tree.map(lambda leaf: leaf * jnp.nan, model.learner), model.structure, model.header)
    for what in ("codes", "curvature", "coverage", "uncertainty"):
        with pytest.raises(SystemExit, match="2"):
            main(["analyse", what, "leo", "--tasks", "20"])
        *_, said = capsys.readouterr().err.strip().splitlines()  # after the bar
        assert "metaleo: adaptation leads to NaN or Inf within the first 20 tasks" in said


def test_help_has_examples(capsys):
    for words in ([], ["codes"], ["curvature"], ["coverage"], ["uncertainty"]):
        with pytest.raises(SystemExit, match="0"):
            main(["analyse", *words, "--help"])
        assert re.search(r"metaleo analyse \w+ \w+", capsys.readouterr().out)


def test_class_names_are_words():
    from metaleo.data.class_names import READABLE, readable_name

    assert set(READABLE) == set(data.load_data("sample").class_names)
    assert readable_name("n02174001") == "rhinoceros beetle"
    assert readable_name("Balinese/character01") == "Balinese/character01"
    assert np.unique(list(READABLE.values())).size == 100


def test_what_tells_subjects_apart(here):
    (here / "other").mkdir()
    make_run(here / "other/leo", SMALL)

    def names(*places, **options):
        return [one.name for one in load_candidates([Path(place) for place in places], **options)]

    assert names("leo") == ["seed 0", "seed 1"]
    assert names("leo", "sgd") == ["leo seed 0", "leo seed 1", "sgd seed 0"]
    assert names("leo", "sgd", every_seed=False) == ["LEO", "Meta-SGD"]
    assert names("leo", "leo/model-1.safetensors", every_seed=False) == ["leo seed 0", "leo seed 1"]
    twins = ["leo/model-0.safetensors", "other/leo/model.safetensors"]
    assert names("leo", "other/leo", every_seed=False) == twins
    assert names("leo/model-0.safetensors", "sgd") == ["leo seed 0", "sgd seed 0"]
    assert names("leo", "leo/model-0.safetensors") == ["seed 0", "seed 1"]  # once
