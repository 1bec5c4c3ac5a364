"""The page of a run in headless Chromium: it sorts, filters, colours and compares, with no error and no request."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pytest
from pyarrow import parquet

from tests.train.report.random_run import make_run
from tests.train.report.test_page import data_of
from train.report.page import render
from train.report.runs import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
try:
    from playwright.sync_api import Locator, Page, expect, sync_playwright
except ImportError:
    pytest.skip("the package playwright is not installed; run `make test-report`", allow_module_level=True)
if CHROMIUM is None:
    pytest.skip("no Chromium was found; run `make test-report`", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with sync_playwright() as playwright:
        # Root, as whom containers run, has no sandbox.
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def opened(browser, pages) -> Iterator[SimpleNamespace]:
    """`opened.at(name, "#view")`: a page; the test fails if it says anything in the console, or asks for anything."""
    tab, said, requests = browser.new_page(viewport={"width": 1300, "height": 900}), [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))

    def at(name: str, view: str = "", path: Path | None = None) -> Page:
        tab.goto((path or pages[name]).as_uri() + view)
        return tab

    yield SimpleNamespace(at=at)
    assert said == []
    assert all(url.startswith("file:") for url in requests)
    tab.close()


def changed(page: Path, folder: Path, change: Callable[[dict], object]) -> Path:
    """A copy of a page whose data are changed."""
    text = page.read_text()
    data = data_of(text)
    change(data)
    path = folder / "changed.html"
    before, _, rest = text.partition('id="data">')
    path.write_text(f'{before}id="data">{json.dumps(data)}</script>{rest.partition("</script>")[2]}')
    return path


def panel_of(tab: Page, title: str) -> Locator:
    return tab.locator(".panel", has=tab.locator("h3", has_text=re.compile(f"^{title}")))


def step_at(panel: Locator, share: float) -> int:
    """The step that a panel reads under the pointer, at a share of its width."""
    area = panel.locator(".area")
    box = area.bounding_box()
    area.hover(position={"x": min(share * box["width"], box["width"] - 1), "y": 60})
    return int(panel.locator(".legend").inner_text().split()[1])


def drag(panel: Locator, first: float, last: float) -> None:
    """Drags the pointer from one share of the width of a panel to another."""
    box, mouse = panel.locator(".area").bounding_box(), panel.page.mouse
    mouse.move(box["x"] + first * box["width"], box["y"] + 50)
    mouse.down()
    mouse.move(box["x"] + last * box["width"], box["y"] + 60, steps=4)
    mouse.up()


def column(tab: Page, name: str) -> list[str]:
    """The cells of a column of the table."""
    titles = [title.strip() for title in tab.locator(".rollouts thead tr:first-child th").all_inner_texts()]
    index = next(i for i, title in enumerate(titles) if title.rstrip(" ▲▼") == name)
    return [cell.inner_text() for cell in tab.locator(f".rollouts tbody td:nth-child({index + 1})").all()]


def test_curves_are_drawn_and_read_by_keyboard(opened):
    tab = opened.at("one")
    panel = tab.locator(".panel", has_text="Held-out accuracy")
    expect(panel.locator("canvas")).to_have_count(1)
    chart = panel.locator(".canvas")
    assert re.match("Held-out accuracy, %. sampled: 1 points, first ", chart.get_attribute("aria-label"))
    reward = tab.locator(".panel", has_text="Reward").first
    reward.locator(".canvas").focus()
    tab.keyboard.press("Home")
    expect(reward.locator(".legend")).to_contain_text("step 1")
    tab.keyboard.press("ArrowRight")
    expect(reward.locator(".legend")).to_contain_text("step 2")
    for label, choice in (("Smoothing", "off"), ("Axis", "log")):
        tab.get_by_label(label).first.select_option(label=choice)
    expect(reward.locator("canvas")).to_have_count(1)


def test_pointer_reads_the_step_in_every_chart(opened):
    tab = opened.at("both")
    reward, accuracy = panel_of(tab, "Reward"), panel_of(tab, "Held-out accuracy")
    assert step_at(reward, 0.4) == 3
    expect(reward.locator(".legend b")).to_have_text([re.compile(r"\d")] * 2)
    expect(accuracy.locator(".legend")).to_contain_text("step 0")
    expect(accuracy.locator(".cursor-x")).to_be_visible()
    tab.mouse.move(1, 1)
    expect(reward.locator(".legend")).to_have_text("a: rewardb: reward")
    expect(accuracy.locator(".cursor-x")).to_be_hidden()


def test_drag_zooms_every_chart_also_those_drawn_later(opened, pages, tmp_path):
    def lengthen(data):
        (run,) = data["runs"]
        for series in run["metrics"]["train"].values():
            series["steps"] = list(range(1, 1001))
            series["values"] = [float(step % 7) for step in series["steps"]]

    tab = opened.at("long", path=changed(pages["one"], tmp_path, lengthen))
    reward = panel_of(tab, "Reward")
    assert (step_at(reward, 0), step_at(reward, 1)) == (1, pytest.approx(1000, abs=4))
    drag(reward, 0.9, 0.5)
    for panel in (reward, panel_of(tab, "Clip fraction"), panel_of(tab, "train: skipped_updates")):
        if panel.count() == 0:
            tab.get_by_text("other metrics").click()
        panel.scroll_into_view_if_needed()
        assert (step_at(panel, 0), step_at(panel, 1)) == (pytest.approx(500, abs=9), pytest.approx(900, abs=9))
    reward.locator(".area").dblclick(position={"x": 60, "y": 60})
    assert step_at(reward, 1) == pytest.approx(1000, abs=4)
    drag(reward, 0.2, 0.6)
    assert step_at(reward, 1) == pytest.approx(600, abs=9)
    tab.get_by_role("button", name="Show all steps").click()
    assert step_at(reward, 1) == pytest.approx(1000, abs=4)
    chart = reward.locator(".canvas")
    for key in ("End", "+", "+"):
        chart.press(key)
    assert 600 < step_at(reward, 0) < 700
    chart.press("0")
    assert step_at(reward, 0) == 1


def test_finger_reads_and_zooms(browser, pages):
    with browser.new_context(has_touch=True) as context:
        tab = context.new_page()
        tab.goto(pages["one"].as_uri())
        panel = panel_of(tab, "Reward")
        panel.locator(".area").tap(position={"x": 1, "y": 60})
        expect(panel.locator(".legend")).to_contain_text("step 1")
        box, touch = panel.locator(".area").bounding_box(), context.new_cdp_session(tab)
        places = [{"x": box["x"] + share * box["width"], "y": box["y"] + 60} for share in (0.55, 0.7, 0.8, 0.95)]
        for kind, points in zip(("touchStart", "touchMove", "touchMove", "touchMove"), places, strict=True):
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [points]})
        expect(panel.locator(".selected")).to_be_visible()
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        expect(panel.locator(".selected")).to_be_hidden()
        assert step_at(panel, 0) == 4


def test_no_spike_among_many_steps_is_lost(opened, pages, tmp_path):
    def spike(data):
        steps = list(range(1, 20_001))
        values = [1000.0 if step == 12_345 else step % 2 / 10 for step in steps]
        data["runs"][0]["metrics"]["train"]["entropy"] |= {"steps": steps, "values": values}

    tab = opened.at("long", path=changed(pages["one"], tmp_path, spike))
    panel = panel_of(tab, "Entropy")
    panel.get_by_label("Axis").select_option(label="linear")
    # The columns of pixels with something coloured in the middle of the height, where no grid lies.
    columns = panel.locator("canvas").evaluate(
        """canvas => {
          const { width, data } = canvas.getContext("2d").getImageData(0, 85, canvas.width, 1);
          return [...Array(width).keys()].filter((x) => data[4 * x + 2] > data[4 * x] + 40 && data[4 * x + 3] > 9);
        }"""
    )
    width = panel.locator("canvas").evaluate("canvas => canvas.width")
    assert columns
    assert all(x == pytest.approx(64 + 12_345 / 20_000 * (width - 89), abs=2) for x in columns)


RECORD_TEXTS = """() => {
  window.texts = [];
  CanvasRenderingContext2D.prototype.fillText = (text) => window.texts.push(text);
}"""


@pytest.mark.parametrize(
    ("axis", "values", "labels"),
    [
        ("linear", [0.0, 0.3, 1.0], ["0", "0.25", "0.5", "0.75", "1"]),
        ("linear", [1000.0, 1000.04, 1000.1], ["1000", "1000.025", "1000.05", "1000.075", "1000.1"]),
        ("log", [1e-7, 1e-3, 5.0], ["1e-7", "1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1", "1"]),
        ("log", [0.3, 2.0, 4.0], ["0.5", "1", "2", "5"]),
        ("log", [-1.0, 0.0, 3.0], ["2", "3", "4", "5", "6"]),
    ],
)
def test_axes_have_round_numbers_that_differ(opened, pages, tmp_path, *, axis, values, labels):
    def change(data):
        data["runs"][0]["metrics"]["train"]["entropy"] |= {"steps": [998, 1000, 1004], "values": values}

    path = changed(pages["one"], tmp_path, change)
    tab = opened.at("changed", path=path)
    panel = panel_of(tab, "Entropy")
    expect(panel.locator("canvas")).not_to_have_attribute("width", "0")
    tab.evaluate(RECORD_TEXTS)
    panel.get_by_label("Axis").select_option(label="robust")
    tab.evaluate("texts.length = 0")
    panel.get_by_label("Axis").select_option(label=axis)
    assert tab.evaluate("texts") == [*(f"{step:,}" for step in range(998, 1005, 2)), *labels]


def test_charts_follow_the_window_and_the_theme(opened):
    tab = opened.at("one")
    canvas = panel_of(tab, "Reward").locator("canvas")
    look = "canvas => [canvas.width === canvas.clientWidth, canvas.toDataURL()]"
    fits, light = canvas.evaluate(look)
    assert fits
    tab.get_by_label("Theme").select_option(label="dark")
    fits, dark = canvas.evaluate(look)
    assert fits
    assert dark != light
    # A view that is not shown follows when it is.
    tab.get_by_role("link", name="Config").click()
    tab.get_by_label("Theme").select_option(label="light")
    tab.get_by_role("link", name="Curves").click()
    tab.wait_for_function("() => document.querySelector('.panel canvas').width > 0")
    assert canvas.evaluate(look) == [True, light]
    tab.set_viewport_size({"width": 500, "height": 900})
    tab.wait_for_function("() => [...document.querySelectorAll('.panel canvas')][0].width < 460")
    assert canvas.evaluate("canvas => canvas.width === canvas.clientWidth")


def test_single_point_stands_in_the_middle(opened):
    chart = opened.at("one").locator(".panel", has_text="Held-out accuracy").locator(".canvas")
    chart.focus()
    chart.press("Home")
    cursor, area = chart.locator(".cursor-x").bounding_box(), chart.locator(".area").bounding_box()
    assert cursor["x"] - area["x"] == pytest.approx(area["width"] / 2, abs=2)


def test_legend_has_the_dashes_of_the_lines(opened):
    panel = opened.at("one").locator(".panel", has_text="KL to the reference").first
    dashes = [line.get_attribute("stroke-dasharray") for line in panel.locator(".legend line").all()]
    assert len(dashes) == len(set(dashes)) == 3


def test_log_axis_leaves_out_values_of_rounding(opened):
    panel = opened.at("one").locator(".panel", has_text="KL to the reference").first
    expect(panel.locator(".beyond")).to_have_text("▼ beyond the axis")


def test_log_axis_from_an_uneven_number_is_drawn(opened):
    panel = opened.at("one").locator(".panel", has_text="Largest KL of a token")
    expect(panel.locator("canvas")).to_have_count(1)


def test_unknown_rollouts_are_named(opened):
    for view in ("#rollout=12345", "#group=0.1.77", "#side=1,12345"):
        tab = opened.at("one", view)
        tab.reload()
        expect(tab.locator("main")).to_contain_text("such rollout")


def test_curves_have_the_meaning_of_their_metrics(opened):
    panel = opened.at("one").locator(".panel", has_text="Gradient norm")
    meaning = panel.locator("dd")
    expect(meaning).to_be_hidden()
    panel.get_by_text("Meaning").press("Enter")
    expect(meaning).to_contain_text("Healthy: settles within a factor of 10")
    expect(meaning.locator("code")).to_contain_text(["optim.max_grad_norm", "reward"])


def test_table_sorts_both_ways_and_back(opened):
    tab = opened.at("one", "#rollouts")
    expect(tab.locator("caption")).to_have_text("96 recorded rollouts")
    heading = tab.get_by_role("columnheader", name="Mean entropy")
    orders = {}
    for direction in ("descending", "ascending", "none"):
        heading.get_by_role("button").click()
        expect(heading).to_have_attribute("aria-sort", direction)
        orders[direction] = [float(cell) for cell in column(tab, "Mean entropy")]
    assert orders["descending"] == sorted(orders["descending"], reverse=True)
    assert orders["ascending"] == sorted(orders["ascending"])
    assert orders["descending"][0] > orders["ascending"][-1]
    assert orders["none"] != orders["ascending"]


def test_table_filters_numbers_and_words(opened):
    tab = opened.at("one", "#rollouts")
    tab.get_by_label("Filter Step").fill("2..3")
    expect(tab.locator("caption")).to_have_text("32 of 96 recorded rollouts")
    assert set(column(tab, "Step")) == {"2", "3"}
    tab.get_by_label("Filter Reward, such").fill(">0.5")
    assert set(column(tab, "Reward")) == {"1"}
    tab.get_by_label("Filter Reward, such").fill("much")
    expect(tab.get_by_label("Filter Reward, such")).to_have_attribute("aria-invalid", "true")
    tab.get_by_label("Filter Reward, such").fill("")
    tab.get_by_label("Search prompts").fill("QUESTION 1 of step 3")
    expect(tab.locator("caption")).to_have_text("8 of 96 recorded rollouts")


def test_missing_numbers_stand_last_both_ways(opened, pages, tmp_path):
    def forget(data):
        for rollout in data["rollouts"][::3]:
            rollout["reward"] = rollout["finished"] = None

    tab = opened.at("forgotten", "#rollouts", changed(pages["one"], tmp_path, forget))
    tab.get_by_label("Filter Step").fill("1..2")
    for first in ("1", "0"):
        tab.get_by_role("columnheader", name="Reward").get_by_role("button").click()
        cells = column(tab, "Reward")
        assert cells[0] == first
        assert cells[-11:] == ["\N{EN DASH}"] * 11
    tab.get_by_label("Filter Finished").fill("s")
    assert set(column(tab, "Finished")) == {"yes"}


@pytest.mark.parametrize("text", ["1.2.3", "..5", "0.5.", "> .", "1-2", "e5"])
def test_filters_that_are_no_number_are_marked(opened, text):
    tab = opened.at("one", "#rollouts")
    tab.get_by_label("Filter Reward, such").fill(text)
    expect(tab.get_by_label("Filter Reward, such")).to_have_attribute("aria-invalid", "true")
    expect(tab.locator("caption")).to_have_text("96 recorded rollouts")


def test_rollout_shows_exact_numbers_of_coloured_tokens(opened):
    tab = opened.at("one", "#rollouts")
    tab.get_by_role("link", name="Open row 3 of step 1").click()
    expect(tab.get_by_role("heading", name="Rollout: step 1, row 3")).to_be_focused()
    tokens = tab.locator(".token:not(.prompt)")
    expect(tokens).to_have_count(12)
    colours = []
    for quantity in ("KL to the reference (k3)", "log-ratio, policy to reference", "policy version"):
        tab.get_by_label("Colour by").select_option(label=quantity)
        colours.append([token.evaluate("x => x.style.backgroundColor") for token in tokens.all()])
        expect(tab.locator(".largest h4")).to_have_text(f"Farthest from 0: {quantity}")
    assert all(len(set(row)) > 3 for row in colours[:2])
    assert any("--below" in colour for colour in colours[1])
    assert len(set(colours[2])) == 1
    tokens.nth(4).hover()
    numbers = tab.get_by_role("tooltip")
    expect(numbers).to_contain_text("5 of 12")
    tokens.first.focus()
    tab.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(numbers).to_contain_text("2 of 12")
    assert re.match(r"token 2, .*, policy version 0$", tokens.nth(1).get_attribute("aria-label"))
    shown = numbers.locator("tr", has_text="advantage").locator("td").inner_text()
    assert shown in ("1", "-1")
    tab.locator(".largest button").first.click()
    assert tab.evaluate("document.activeElement.classList.contains('token')")


def test_group_stands_side_by_side(opened):
    tab = opened.at("one", "#rollouts")
    tab.locator(".rollouts tbody a[href='#group=0.1.1']").first.click()
    expect(tab.get_by_role("heading", name="Group 1 of step 1")).to_be_focused()
    expect(tab.locator(".card")).to_have_count(8)
    expect(tab.locator(".text.shared")).to_have_count(1)


def test_two_runs_are_compared(opened):
    tab = opened.at("both")
    expect(tab.locator(".overview h2")).to_have_text(["a", "b"])
    legend = tab.locator(".panel", has_text="Reward").first.locator(".legend")
    expect(legend).to_contain_text("a: reward")
    expect(legend).to_contain_text("b: reward")
    tab.get_by_role("link", name="Config").click()
    difference = tab.locator(".config").first.locator("tbody tr")
    expect(difference).to_have_text(["nameab", "seed01"])
    tab.goto(tab.url.partition("#")[0] + "#rollout=0")
    tab.get_by_role("link", name="The same row in b").click()
    expect(tab.locator(".card h3")).to_have_text(["a, step 1, row 0", "b, step 1, row 0"])


def test_dumps_show_verdicts_and_causes(opened, dumps):
    tab = opened.at("dumps", path=dumps)
    row = tab.locator(".config tbody tr")
    expect(row).to_have_count(1)
    expect(row.locator("td").nth(0)).to_have_text("agrees")
    expect(row.locator("td").nth(1)).to_contain_text("differs by")
    expect(tab.locator(".card").nth(1).locator(".finding")).to_contain_text("Cause:")


def test_page_fits_a_narrow_window(opened):
    tab = opened.at("both")
    tab.set_viewport_size({"width": 400, "height": 800})
    for view in ("#curves", "#rollouts", "#rollout=1", "#distributions", "#config"):
        tab.evaluate(f"location.hash = {view!r}")
        tab.wait_for_timeout(50)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 400, view


def test_failures_are_named_and_counted(opened, tmp_path):
    run = make_run(tmp_path / "failures", rollouts=48, tokens=6)
    file = run / "rollouts" / "00000001.parquet"
    table = parquet.read_table(file)
    failures = [
        {"of": "world", "name": "exception", "text": "ValueError: <b>no</b> answer\n  in mine.py"},
        {"of": "policy", "name": "max_turns", "text": "not over"},
        {"of": "policy", "name": "max_turns", "text": "not over"},
    ]
    table = table.append_column("failure", pyarrow.array([*failures, *[None] * 13]))
    parquet.write_table(table.append_column("episode", pyarrow.array([-1, *range(1, 16)])), file)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"phase": "train", "step": 9, "episodes_failed_exception": 5}) + "\n")
    page = tmp_path / "page.html"
    page.write_text(render("failures", [read_run(run, rollouts=1000)]), encoding="utf-8")
    tab = opened.at("", "#rollouts", path=page)
    expect(tab.locator(".overview")).to_contain_text("5 exception")
    expect(tab.locator(".failures")).to_have_text("Episodes here that failed: 2 max_turns, 1 exception.")
    shown = ["exception: ValueError: <b>no</b> answer", "max_turns: not over", "max_turns: not over"]
    assert column(tab, "Failed")[:3] == shown
    tab.get_by_label("Filter Failed").fill("max_turns")
    expect(tab.locator("caption")).to_have_text("2 of 48 recorded rollouts")
    tab.goto(f"{page.as_uri()}#rollout=0")
    expect(tab.locator(".failure h4")).to_have_text("Failed: exception")
    expect(tab.locator(".failure")).to_contain_text("Of the world: the episode is left out")
    expect(tab.locator(".failure .text")).to_have_text("ValueError: <b>no</b> answer in mine.py")
    expect(tab.locator(".facts")).to_contain_text("left out")
    expect(tab.locator(".facts")).not_to_contain_text("no fork took")
    tab.goto(f"{page.as_uri()}#rollout=1")
    expect(tab.locator(".failure")).to_contain_text("Of the policy: the episode is trained")


def test_episode_is_shown_turn_by_turn(opened, tmp_path):
    run = make_run(tmp_path / "episodes", rollouts=48, tokens=6)
    file = run / "rollouts" / "00000001.parquet"
    table = parquet.read_table(file)
    masks = [[True, True, False, False, True, True], [False, False, True, True, True, True], [False] * 6]
    episodes = [0, 0, -1]
    columns = {"completion_mask": [*masks, *[[True] * 6] * 13], "episode": [*episodes, *range(3, 16)]}
    for name, values in columns.items():
        table = table.append_column(name, pyarrow.array(values))
    parquet.write_table(table, file)
    page = tmp_path / "page.html"
    page.write_text(render("episodes", [read_run(run, rollouts=1000)]), encoding="utf-8")
    titles = {
        0: ["Prompt, as the model saw it", "Policy, turn 1", "Environment", "Policy, turn 2"],
        1: ["Prompt, as the model saw it", "History, not trained here", "Policy, turn 1"],
        3: ["Prompt, as the model saw it", "Policy, turn 1"],
    }
    for row, expected in titles.items():
        tab = opened.at("", f"#rollout={row}", path=page)
        tab.reload()
        expect(tab.locator(".tokens h4")).to_have_text(expected)
    tab = opened.at("", "#rollout=0", path=page)
    tab.reload()
    expect(tab.locator(".token.observed")).to_have_count(2)
    shade = tab.locator(".token.observed").first.evaluate("span => getComputedStyle(span).backgroundColor")
    assert shade not in ("rgba(0, 0, 0, 0)", "transparent")
    assert tab.locator(".facts").inner_text().split("tokens\n")[1].startswith("4")
    facts = {1: "a fork of row 0", 2: "left out, or a row that no fork took"}
    for row, text in facts.items():
        tab = opened.at("", f"#rollout={row}", path=page)
        tab.reload()
        expect(tab.locator(".facts")).to_contain_text(text)
