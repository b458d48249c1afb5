"""The page of `metaleo report`: what is put on it cannot change it."""

from html.parser import HTMLParser

import numpy as np

from helpers.small import make_candidate, make_structure
from metaleo._io.progress import SILENT
from metaleo.evaluation.evaluate import CalibrationCounts, Score, TaskSuite
from metaleo.reporting import page
from metaleo.reporting.findings import AnalysisSettings
from metaleo.reporting.page import Section, results_section, write_page

NASTY = """<script>alert("it's")</script>&amp;"""


class Seen(HTMLParser):
    """The tags of a page, and its text as it is read."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.texts += [value for name, value in attrs if name == "alt"]

    def handle_data(self, data):
        self.texts.append(data)


def test_everything_on_the_page_is_escaped(tmp_path):
    candidate, suite = make_candidate(tmp_path, make_structure())
    part = Section(NASTY, NASTY, NASTY, (NASTY,), [(NASTY,)], b"a picture")
    seen = Seen(write_page([part, Section("Plain")], [candidate], suite, NASTY))
    assert "script" not in seen.tags
    assert seen.texts.count(NASTY) == 8  # command, contents, heading, tasks, figure, column, cell, note
    assert seen.tags.count("section") == 3
    assert seen.tags.count("table") == seen.tags.count("img") == 1
    assert any('"encoder_penalty"' in text for text in seen.texts)


def test_results_have_the_temperature_first(tmp_path, monkeypatch):
    candidate, suite = make_candidate(tmp_path, make_structure())
    candidate.model.header["temperatures"] = [[1, 0.5]]
    counts = np.array([[1.0], [1.0]])
    sure, doubtful = (CalibrationCounts(counts, 0.5 * counts, share * counts) for share in (0.9, 0.6))
    score = Score(np.array([0.4, 0.6]), np.array([2.0, 2.0]), sure, np.array([1.0, 1.0]), doubtful)
    monkeypatch.setattr(page, "score_learner", lambda *_, **options: score)
    monkeypatch.setattr(TaskSuite, "baselines", lambda suite: [])
    found = results_section([candidate], {candidate.source: "mine"}, AnalysisSettings(suite, "test", 0, 2, SILENT))
    assert found.headings[3:] == ("negative log-likelihood", "calibration error", "likelihood before temperature",
                                  "error before temperature")  # fmt: skip
    assert found.rows[0][3:] == ("1.000 ± 0.000", "10.0 %", "2.000 ± 0.000", "40.0 %")
