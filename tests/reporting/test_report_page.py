"""The page of `metaleo report`: what is put on it cannot change it."""

from html.parser import HTMLParser

from helpers.small import make_candidate, make_structure
from metaleo.reporting.page import Section, write_page

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
