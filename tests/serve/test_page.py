"""The page in a real browser: with a mouse, with the keyboard alone, light and dark, wide and narrow."""

import csv
import json
import random
import re
import shutil
from pathlib import Path

import pytest

from helpers.serving import DIM, QUICK, examples, running, tiny
from metaleo.serve.models import load_served_models

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
pytestmark = pytest.mark.slow

STROKES = Path(__file__).parents[1] / "data" / "held-out-strokes.json"


@pytest.fixture(scope="module")
def address():
    with running(load_served_models() | {"tiny": tiny()}, QUICK) as (client, service):
        service.warm_up()
        yield str(client.base_url).rstrip("/")


@pytest.fixture(scope="module")
def browser():
    own = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=own, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser: {error}")
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, address):
    """Opens a tab of the page; in the end, nothing went wrong in it and nothing was asked of another origin."""
    contexts, asked, problems = [], [], []

    def open_page(tab: str = "", **settings):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 2000}, **settings})
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{address}/#{tab}")
        return page

    open_page.problems = problems
    yield open_page
    for context in contexts:
        context.close()
    assert asked
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []
    assert problems == []


def click_plane(page, x: float, y: float, **how) -> None:
    box = page.locator("#plane").bounding_box()
    position = {"x": (x + 5) / 10 * box["width"], "y": (6 - y) / 12 * box["height"]}
    page.locator("#plane").click(position=position, **how)


def place(page, pad, point) -> tuple[float, float]:
    box = pad.bounding_box()
    return box["x"] + point[0] * box["width"], box["y"] + point[1] * box["height"]


def draw(page, pad, strokes) -> None:
    """Moves the mouse as the pen went, with a margin around."""
    box = pad.bounding_box()
    for stroke in strokes:
        kept = [*stroke[: -1 : 3 if len(stroke) > 12 else 1], stroke[-1]]
        for index, (x, y) in enumerate(kept):
            page.mouse.move(box["x"] + box["width"] * (0.1 + 0.8 * x), box["y"] + box["height"] * (0.1 + 0.8 * y))
            if index == 0:
                page.mouse.down()
        page.mouse.up()


def settled(page) -> None:
    page.wait_for_selector("#bars[aria-busy=false]", state="attached")


# Functions


def test_five_clicks_make_functions(visit):
    page = visit("functions")
    for x, y in ((-4, 2), (-2, -2), (0, -1), (1.5, 2), (3, 0)):
        click_plane(page, x, y)
    expect(page.locator("#functions-status")).to_have_text(re.compile("^5 points"))
    assert page.locator("#plane .point").count() == 5
    assert page.locator("#plane .function").count() == 24
    assert page.locator("#plane .band").count() == 1
    before = page.locator("#plane .mean").get_attribute("d")
    page.locator("#stage").fill("0")
    expect(page.locator("#plane .mean")).not_to_have_attribute("d", before)
    assert page.locator("#stage-name").inner_text() == "before any latent step"
    page.locator("#play").click()
    expect(page.locator("#stage")).to_have_value(page.locator("#stage").get_attribute("max"), timeout=15_000)
    assert "latent steps" in page.locator("#stage-name").inner_text()


def test_points_are_moved_and_removed(visit):
    page = visit("functions")
    click_plane(page, 1, 1)
    click_plane(page, -2, 0)
    first = page.locator("#plane .point").first
    old = first.get_attribute("cx")
    box = page.locator("#plane").bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 5 / 12 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 5 / 12 * box["height"], steps=5)
    page.mouse.up()
    assert float(page.locator("#plane .point").first.get_attribute("cx")) > float(old) + 50
    assert page.locator("#plane .point").count() == 2
    click_plane(page, 3, 1, click_count=2)
    assert page.locator("#plane .point").count() == 1
    page.keyboard.press("Delete")
    page.locator("#clear-points").click()
    assert page.locator("#plane .point").count() == 0
    assert page.locator("#plane .function").count() == 0
    for name in ("sine", "line", "both"):
        page.locator(f"[data-example={name}]").click()
        page.wait_for_selector("#plane .mean", state="attached")
        assert page.locator("#plane .point").count() == 5


def test_functions_by_keyboard_alone(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "tab-functions"
    for key, expected in (("ArrowRight", "draw"), ("End", "data"), ("ArrowRight", "functions"), ("ArrowLeft", "data"),
                          ("Home", "functions")):  # fmt: skip
        page.keyboard.press(key)
        assert page.evaluate("location.hash") == f"#{expected}"
        assert page.locator(f"#{expected}").is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "plane"
    for keys in (["Enter"], ["Shift+ArrowRight", "ArrowUp", "Enter"], ["Shift+ArrowLeft"] * 3 + ["Enter"]):
        for key in keys:
            page.keyboard.press(key)
    expect(page.locator("#functions-status")).to_have_text(re.compile("^3 points"))
    page.keyboard.press("Delete")
    assert page.locator("#plane .point").count() == 2
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "play"
    page.keyboard.press("Tab")
    page.keyboard.press("Home")
    assert page.locator("#stage-name").inner_text() == "before any latent step"


def test_motion_is_left_out_where_it_is_not_wanted(visit):
    page = visit("functions", reduced_motion="reduce")
    page.locator("[data-example=sine]").click()
    page.wait_for_selector("#plane .mean", state="attached")
    moved = page.evaluate("""() => {
        const slider = document.getElementById('stage');
        const mean = () => document.querySelector('#plane .mean').getAttribute('d');
        const before = mean();
        slider.value = 0;
        slider.dispatchEvent(new Event('input'));
        return before !== mean();  // at once, in the same turn of the loop
    }""")
    assert moved


# Draw


def test_held_out_characters_are_recognised(visit):
    """Ten tasks of five characters that the model has never seen: one drawing of each, and two questions."""
    characters = json.loads(STROKES.read_text(encoding="utf-8"))
    chance, right, asked = random.Random(0), 0, 0
    page = visit("draw")
    for _ in range(2):
        page.locator("#add-symbol").click()
    pads = page.locator("#symbols canvas.pad").all()
    wipes = page.locator("#symbols .pad-box button:not(.keep)").all()
    question, clear = page.locator("#question-pad canvas"), page.locator("#question-pad button")
    for _ in range(10):
        chosen = chance.sample(sorted(characters), 5)
        drawings = {name: chance.sample(characters[name], 2) for name in chosen}
        for pad, wipe, name in zip(pads, wipes, chosen, strict=True):
            wipe.click()
            draw(page, pad, drawings[name][0])
        for answer in chance.sample(range(5), 2):
            clear.click()
            draw(page, question, drawings[chosen[answer]][1])
            settled(page)
            assert page.locator("#draw-error").is_hidden()
            labels = page.locator(".answer-row.best .label").all_inner_texts()
            right += labels == [f"symbol {answer + 1}"]
            asked += 1
    assert right >= 0.9 * asked, f"{right} of {asked}"


def test_symbols_are_added_renamed_kept_and_removed(visit):
    page = visit("draw")
    assert page.locator(".symbol").count() == 3
    for _ in range(7):
        page.locator("#add-symbol").click()
    assert page.locator(".symbol").count() == 10
    assert page.locator("#add-symbol").is_disabled()
    for _ in range(8):
        page.locator(".symbol .remove").last.click()
    assert page.locator(".symbol").count() == 2
    assert page.locator(".symbol .remove").first.is_disabled()
    page.locator(".symbol input").first.fill("slash")
    pads = page.locator("#symbols canvas.pad").all()
    draw(page, pads[0], [[[0.9, 0.1], [0.1, 0.9]]])
    page.locator(".symbol .keep").first.click()
    assert page.locator(".symbol").first.locator(".example").count() == 1
    draw(page, pads[1], [[[0.5, 0.1], [0.9, 0.5], [0.5, 0.9], [0.1, 0.5], [0.5, 0.1]]])
    question = page.locator("#question-pad canvas")
    draw(page, question, [[[0.8, 0.2], [0.2, 0.8]]])
    settled(page)
    assert page.locator(".answer-row.best .label").inner_text() == "slash"
    assert re.fullmatch(r"(This is|Perhaps) slash, \d+ %\.", page.locator("#draw-status").inner_text())
    page.locator(".symbol .example button").first.click()
    settled(page)
    assert "at least two" in page.locator("#draw-status").inner_text()
    page.locator("#example-symbols").click()
    settled(page)
    assert page.locator(".answer-row .label").all_inner_texts() == ["ring", "triangle", "cross"]
    page.locator("#clear-symbols").click()
    assert page.locator(".symbol").count() == 3


def test_symbols_by_keyboard_alone(visit):
    """A line across and a line down, and one of them again."""
    page = visit("draw")
    page.locator("#tab-draw").focus()
    ways = iter(["ArrowRight", "ArrowDown", None])
    for _ in range(40):
        page.keyboard.press("Tab")
        label = page.evaluate("document.activeElement.getAttribute('aria-label') ?? ''")
        if "Arrow keys move a pen" not in label:
            continue
        way = "ArrowDown" if label.startswith("What is this?") else next(ways)
        if way is None:
            continue
        page.keyboard.press(" ")
        for _ in range(5):
            page.keyboard.press(f"Shift+{way}")
        page.keyboard.press(" ")
        if label.startswith("What is this?"):
            break
    settled(page)
    assert page.locator(".answer-row.best .label").inner_text() == "symbol 2"
    page.keyboard.press("Delete")
    settled(page)
    assert page.locator(".answer-row.best").count() == 0


def test_a_task_that_the_server_forgot_is_made_again(visit, address):
    page = visit("draw")
    page.locator("#example-symbols").click()
    question = page.locator("#question-pad canvas")
    draw(page, question, [[[0.5, 0.1], [0.9, 0.9], [0.1, 0.9], [0.5, 0.1]]])
    settled(page)
    assert page.locator(".answer-row.best .label").inner_text() == "triangle"
    page.route("**/api/predict", lambda route: route.fulfill(status=404, json={"detail": "forgotten"}), times=1)
    page.locator("#question-pad button").click()
    draw(page, question, [[[0.1, 0.1], [0.9, 0.9]], [[0.9, 0.1], [0.1, 0.9]]])
    settled(page)
    assert page.locator(".answer-row.best .label").inner_text() == "cross"
    assert page.locator("#draw-error").is_hidden()
    visit.problems[:] = [one for one in visit.problems if "404" not in one]


# Your data


def drop_file(page, name: str, content: str) -> None:
    transfer = page.evaluate_handle(
        """([name, content]) => {
            const data = new DataTransfer();
            data.items.add(new File([content], name));
            return data;
        }""",
        [name, content],
    )
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})


def rows_of(unlabelled: int) -> str:
    given = examples(2, 2)
    rows = [*given["examples"], *[given["examples"][0]] * unlabelled]
    labels = [*given["labels"], *[""] * unlabelled]
    lines = [",".join([label, *map(str, row)]) for label, row in zip(labels, rows, strict=True)]
    return "\n".join(["label," + ",".join(f"x{index}" for index in range(DIM)), *lines])


def test_a_dropped_table_is_named(visit):
    page = visit("data")
    page.locator("#data-model").select_option("tiny")
    drop_file(page, "mine.csv", rows_of(250))
    page.wait_for_selector("#found:not([hidden])")
    assert page.locator("#classes li").all_inner_texts() == ["class 0 · 2", "class 1 · 2"]
    assert page.locator("#predictions tbody tr").count() == 200
    assert "named 250 others" in page.locator("#data-status").inner_text()
    with page.expect_download() as download:
        page.locator("#download").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 251
    assert lines[0] == 'row,class,probability,unsure,"p(class 0)","p(class 1)"'
    assert lines[1].startswith("5,")


def test_no_cell_of_the_download_begins_a_formula(visit):
    """As `metaleo predict` writes it: text, not numbers."""
    given = examples(2, 2)
    names = [("=1+1", "@sum"), ("", "-x"), ("-1", "+a"), ("", "-3")]
    rows = zip(names, given["examples"], strict=True)
    lines = [f"{label},{said},{','.join(map(str, row))}" for (label, said), row in rows]
    page = visit("data")
    page.locator("#data-model").select_option("tiny")
    head = ",".join(["label", "=said", *(f"x{index}" for index in range(DIM))])
    drop_file(page, "mine.csv", "\n".join([head, *lines]))
    page.wait_for_selector("#found:not([hidden])")
    with page.expect_download() as download:
        page.locator("#download").click()
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        cells = list(csv.reader(file))
    assert cells[0][:3] == ["row", "'=said", "class"]
    assert [row[1] for row in cells[1:]] == ["'-x", "-3"]
    assert {row[2] for row in cells[1:]} <= {"'=1+1", "-1"}
    assert len({row[2] for row in cells[1:]}) == 2


def test_the_example_table_can_be_chosen(visit, tmp_path):
    page = visit("data")
    page.locator("#data-model").select_option("miniimagenet")
    with page.expect_download() as download:
        page.locator("#example-file").click()
    download.value.save_as(tmp_path / "example.csv")
    page.locator("#file").set_input_files(tmp_path / "example.csv")
    page.wait_for_selector("#found:not([hidden])")
    assert page.locator("#predictions tbody tr").count() == 10


def test_the_column_of_labels_is_chosen_and_sentences_are_shown(visit):
    given = examples(2, 2)
    rows = [("greeting", "hello", given["examples"][0]), ("", "hi, you", given["examples"][1]),
            ("parting", "bye", given["examples"][2])]  # fmt: skip
    lines = [f'{label},"{said}",{",".join(map(str, row))}' for label, said, row in rows]
    page = visit("data")
    page.locator("#data-model").select_option("tiny")
    head = ",".join(["intent", "sentence", *(f"x{index}" for index in range(DIM))])
    drop_file(page, "mine.csv", "\n".join([head, *lines]))
    expect(page.locator("#data-status")).to_have_text("Which column holds the labels?")
    page.locator("#data-label").select_option("intent")
    page.wait_for_selector("#found:not([hidden])")
    assert page.locator("#predictions th").all_inner_texts()[:3] == ["Row", "sentence", "Class"]
    assert page.locator("#predictions tbody td").all_inner_texts()[:2] == ["2", "hi, you"]
    with page.expect_download() as download:
        page.locator("#download").click()
    assert Path(download.value.path()).read_text().splitlines()[1].startswith('2,"hi, you","')


def test_a_table_that_cannot_be_used_is_one_clear_line(visit):
    page = visit("data")
    page.locator("#data-model").select_option("tiny")
    drop_file(page, "mine.csv", "label,a\nx,1\ny,2\n")
    page.wait_for_selector("#data-error:not([hidden])")
    assert page.locator("#data-error").inner_text() == "rows have 1 numbers; the model was trained on rows of 8"
    assert page.locator("#found").is_hidden()
    visit.problems[:] = [one for one in visit.problems if "422" not in one]  # the browser's own note


# Looks


def luminance(colour: str) -> float:
    channels = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tab", ["functions", "draw", "data"])
def test_texts_can_be_read_in_light_and_dark(visit, scheme, tab):
    page = visit(tab, color_scheme=scheme)
    paper = luminance(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    assert (paper > 0.5) == (scheme == "light")
    for selector in ("body", ".status", "header p", "a", "button", ".tabs button"):
        style = page.locator(f"{selector}:visible").first.evaluate("element => getComputedStyle(element).color")
        lighter, darker = sorted((luminance(style), paper), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, selector


def test_a_phone_shows_the_same_as_a_desktop(visit):
    """The same points, the same functions in a plane of the same shape; only the words are its own."""
    told, shapes = [], []
    for settings in ({}, {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}):
        page = visit("functions", **settings)
        assert page.locator("#plane-hint").inner_text().split()[0] == ("Tap" if settings else "Click")
        assert page.locator("#functions .lead").inner_text().split()[0] == ("Tap" if settings else "Click")
        page.locator("[data-example=both]").click()
        expect(page.locator("#functions-status")).to_have_text(re.compile("^5 points"))
        told.append(page.locator("#functions-status").inner_text())
        box = page.locator("#plane").bounding_box()
        shapes.append(box["width"] / box["height"])
        assert re.fullmatch(r"M[\d. -]+(C[\d. -]+){100}", page.locator("#plane .mean").get_attribute("d"))  # smooth
    assert told[0] == told[1]
    assert shapes[0] == pytest.approx(shapes[1], rel=0.01)


@pytest.mark.parametrize("width", [390, 1280])
def test_pads_are_as_large_as_their_boxes(visit, width):
    page = visit("draw", viewport={"width": width, "height": 800})
    for box in page.locator(".pad-box").all():
        pad = box.locator("canvas.pad").bounding_box()
        assert pad["width"] == pytest.approx(box.bounding_box()["width"], abs=1)
        assert pad["width"] == pytest.approx(pad["height"], abs=1)
        assert pad["width"] >= 250


def test_help_is_one_link_away(visit):
    page = visit("data")
    page.locator("footer a", has_text="Help").click()
    assert page.locator("h2#data").is_visible()


@pytest.mark.parametrize("width", [360, 390, 768])
@pytest.mark.parametrize("tab", ["functions", "draw", "data"])
def test_nothing_sticks_out_of_a_narrow_window(visit, tab, width):
    page = visit(tab, viewport={"width": width, "height": 800}, has_touch=True)
    if tab == "functions":
        page.locator("[data-example=sine]").tap()
        page.wait_for_selector("#plane .mean", state="attached")
    if tab == "draw":
        page.locator("#example-symbols").tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for pad in page.locator("canvas.pad, #plane").all():
        assert pad.evaluate("element => getComputedStyle(element).touchAction") == "none"


def test_the_description_of_the_api_is_shown(visit, address):
    page = visit()
    page.goto(f"{address}/api/docs")
    page.wait_for_selector(".route")
    assert page.locator(".route h2").first.inner_text() == "GET /api/models"
    assert page.locator(".route").count() == 8
