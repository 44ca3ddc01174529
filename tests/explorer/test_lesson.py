"""The lesson in a real browser: the tour by keyboard in every mode, what captions say, questions, notes, presenting."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tilewise.explorer import ExplorerServer, chapter_names, exported_page

# One browser for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

TOUR = (
    "memory", "naive", "tiled-matmul", "softmax-resists", "online-softmax", "fa1", "fa2", "causal", "recompute", "fa3",
    "split-decoding", "pages",
)  # fmt: skip
BENCHES = ("tiles", "softmax", "traffic", "matmul", "backward", "paging", "problem")
SIGNED = r"[−-]?\d+(?:\.\d+)?(?:e[−-]\d+)?"


def go(page: Page, place: str) -> None:
    page.evaluate(f"location.hash = '{place}'")
    expect(page.locator("#places [aria-current=page], #parts [aria-current=page]").last).to_have_attribute(
        "href", re.compile(f"#{place.split('?')[0]}")
    )


def seek(page: Page, at: int) -> None:
    page.locator(".player-scrub input").fill(str(at))


def steps(page: Page) -> int:
    return int(page.locator(".player-scrub input").get_attribute("max") or 0)


def numbers(text: str) -> list[float]:
    return [float(found.replace("−", "-")) for found in re.findall(SIGNED, text.replace(",", ""))]


def svg_text(page: Page, selector: str) -> list[str]:
    return page.locator(f".scene {selector}").all_text_contents()


# Goes through the steps and collects what an expression says at each, in one call: a thousand of them take seconds.
WALK = """(expression) => {
  const slider = document.querySelector(".player-scrub input");
  const look = new Function(`return ${expression}`);
  return Array.from({length: Number(slider.max) + 1}, (_, at) => {
    slider.value = String(at);
    slider.dispatchEvent(new Event("input"));
    return look();
  });
}"""


def walk(page: Page, expression: str) -> list[Any]:
    found: list[Any] = page.evaluate(WALK, expression)
    return found


def caption(page: Page) -> str:
    return page.locator(".chapter .caption").inner_text()


# --- the tour


MODES: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "small": {"width": 320, "reduced_motion": "reduce"},
    "print": {"width": 794, "color_scheme": "dark"},
    "forced": {"forced_colors": "active"},
}


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.exhaustive if m == "forced" else ()) for m in MODES]
)
def test_the_whole_tour_by_keyboard(open_page: Any, mode: str) -> None:
    page: Page = open_page(**MODES[mode])
    for place, name in enumerate(TOUR):
        article = page.locator(f'article[data-chapter="{name}"]')
        expect(article).to_be_visible()
        assert page.title() == f"{article.locator('h2').inner_text()} · tilewise explorer"
        before = caption(page)
        page.keyboard.press("ArrowRight")
        after = caption(page)
        assert before != after
        page.keyboard.press("End")
        expect(page.locator(".step-counter")).to_have_text(f"step {steps(page)} of {steps(page)}")
        agreed = page.locator("[data-check]").inner_text()
        assert agreed.startswith(("Same", "The order of work changes nothing"))
        assert numbers(agreed.rstrip("."))[-1] < 1e-12
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        page.locator(".scene svg").wait_for()
        # What a screen reader is told is what the picture says.
        for shown in svg_text(page, ".traffic"):
            assert numbers(page.locator(".scene svg").get_attribute("aria-label") or "")[-2:] == numbers(shown)[:2]
        assert page.locator(".scene svg").bounding_box() is not None
        if mode == "print":
            page.emulate_media(media="print")
            assert not page.locator(".player").is_visible()
            assert not page.locator(".tour").is_visible()
            assert page.locator(".scene svg").is_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            page.emulate_media(media="screen")
        if place + 1 == len(TOUR):
            break
        if mode == "light":
            # From the picture on, Tab alone leads to the next chapter.
            page.locator(".player-scrub input").focus()
            for _ in range(40):
                page.keyboard.press("Tab")
                if page.evaluate("document.activeElement.rel === 'next'"):
                    break
        else:
            page.locator("[rel=next]").focus()
        page.keyboard.press("Enter")
        expect(page.locator(f'article[data-chapter="{TOUR[place + 1]}"] h2')).to_be_focused()
    assert sorted(TOUR) == sorted(chapter_names())


def test_back_stays_in_the_page_and_keeps_the_step(open_page: Any, server: ExplorerServer) -> None:
    page: Page = open_page("fa1", base=server.url)
    seek(page, 5)
    expect(page).to_have_url(re.compile(r"#fa1\?step=5$"))
    page.locator("[rel=next]").click()
    expect(page.locator("article")).to_have_attribute("data-chapter", "fa2")
    page.locator("[data-bench]").click()
    expect(page.get_by_role("heading", name="The score matrix, tile by tile")).to_be_visible()
    page.go_back()
    expect(page.locator("article")).to_have_attribute("data-chapter", "fa2")
    page.go_back()
    expect(page.locator("article")).to_have_attribute("data-chapter", "fa1")
    expect(page.locator(".step-counter")).to_have_text("step 5 of 27")


# --- the picture moves, and fits


def test_figure_memory_and_steps_are_on_one_screen(open_page: Any) -> None:
    width, height = 1024, 768
    page: Page = open_page(width=width)
    page.set_viewport_size({"width": width, "height": height})
    bottom = "one => one.getBoundingClientRect().bottom"
    for name in TOUR:
        go(page, name)
        for part in (".scene", ".player"):
            assert page.locator(part).evaluate(bottom) <= height, (name, part)
    go(page, "tiles")
    assert not page.locator("details.folded").evaluate("one => one.open")
    for part in (".panel canvas", ".box.sram .chips"):
        assert page.locator(part).first.evaluate(bottom) <= height, part


def test_presenting_goes_on_by_arrow_keys(open_page: Any) -> None:
    page: Page = open_page("softmax-resists?step=4")
    small = page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)")
    page.get_by_role("button", name="Present").click()
    assert page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)") >= 1.2 * small
    expect(page.locator("#places")).to_be_hidden()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".step-counter")).to_have_text("step 5 of 5")
    page.keyboard.press("ArrowRight")
    expect(page.locator("article")).to_have_attribute("data-chapter", "online-softmax")
    page.keyboard.press("PageDown")
    expect(page.locator("article")).to_have_attribute("data-chapter", "fa1")
    page.keyboard.press("PageUp")
    expect(page.locator("article")).to_have_attribute("data-chapter", "online-softmax")
    page.keyboard.press("Escape")
    expect(page.locator("#places")).to_be_visible()


def test_a_tile_that_does_not_fit_says_so(open_page: Any) -> None:
    page: Page = open_page("fa2?block=6")
    expect(page.locator(".scene")).to_contain_text("it does not fit")
    go(page, "fa2?block=3")
    expect(page.locator(".scene")).not_to_contain_text("does not fit")
    for device, fits in (("v100", False), ("h100", True)):
        go(page, f"tiles?n=128&bm=128&bn=64&d=64&device={device}")
        text = page.locator("[data-capacity]").inner_text()
        assert ("they fit" in text) == fits, text


def test_hovering_a_cell_explains_its_score(open_page: Any) -> None:
    page: Page = open_page("fa2?step=1")
    page.locator(".scene .pair").first.hover()
    expect(page.locator(".tip")).to_contain_text(re.compile(r"Query 0, key 0: q·k = .* weight in the row's softmax"))
    go(page, "tiles?step=1")
    box = page.locator("canvas").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.7)
    expect(page.locator(".tip")).to_contain_text("q·k =")


# --- words


# Letters of the text itself: named where they stand, or ordinary words.
OWN = {"a", "e", "s", "t", "x", "A", "B", "C"}
SYMBOL = re.compile(r"(?<![\w^])(?:[A-Za-z]|d[A-Z]|lse|HBM|SRAM|TMA|FP8|KV cache)(?![\w])")


def test_every_chapter_lights_its_lines_explains_its_symbols_and_answers_its_questions(open_page: Any) -> None:
    page: Page = open_page()
    for name in TOUR:
        go(page, name)
        found = walk(page, "Array.from(document.querySelectorAll('.code .lit'), (line) => line.textContent)")
        assert all(found[1:]), name
        lit = set(itertools.chain(*found))
        assert len(lit) >= 3 or name == "tiled-matmul", (name, lit)
        symbols = set(SYMBOL.findall(page.locator(".chapter-text").inner_text())) - OWN
        words = page.locator(".chapter-text .explained").evaluate_all("all => all.map((one) => one.firstChild.data)")
        assert symbols <= set(words), (name, symbols - set(words))
        boxes = page.locator(".question").all()
        assert boxes, name
        for box in boxes:
            expect(box.locator(".answer-text")).to_be_hidden()
            box.locator("input").first.check()
            box.get_by_role("button").click()
            expect(box.locator(".answer-text")).to_have_text(re.compile(r"^(Right|Not quite)\. .{30,}"))
    page.locator(".chapter-text .explained").first.focus()
    expect(page.locator(".tip")).to_be_visible()


def test_the_teachers_page_has_every_chapter_and_prints(open_page: Any) -> None:
    page: Page = open_page("teacher")
    for name in TOUR:
        notes = page.locator(f'[data-notes="{name}"]')
        assert notes.locator("dt").all_inner_texts()[:4] == ["Goal", "Script", "Question", "Answer"]
        assert all(len(text) > 20 for text in notes.locator("dl > dd").all_inner_texts()[:4])
    articles = page.get_by_role("region", name="Numbers of the articles", exact=True).last.inner_text()
    for fact in (
        "l = 1.0034, factor 0.368, l = 1.5069",
        "17,301,504 / 4,456,448 = 3.9",
        "16 reserved, 9 used, 7 wasted",
    ):
        assert fact in articles
    saved = int(re.findall(r"pages saved, (\d+) %", articles)[0])
    assert 30 <= saved <= 50
    assert page.locator("[data-notes]").count() == len(TOUR)
    page.emulate_media(media="print")
    assert not page.get_by_role("button", name="Print these notes").is_visible()
    assert page.locator("[data-notes]").first.is_visible()
    page.emulate_media(media="screen")
    go(page, "teacher?chapter=fa3")
    assert page.locator("[data-notes]").count() == 1


def test_one_chapter_in_a_file_of_its_own(open_page: Any, tmp_path: Path) -> None:
    target = tmp_path / "chapter.html"
    target.write_text(exported_page("online-softmax"), encoding="utf-8")
    page: Page = open_page(base=target.as_uri(), offline=True)
    expect(page.locator("article")).to_have_attribute("data-chapter", "online-softmax")
    page.keyboard.press("End")
    expect(page.locator("[data-check]")).to_contain_text("Same result")
    expect(page.locator("#places")).to_be_hidden()
    page.locator("[data-bench]").click()
    expect(page.get_by_role("heading", name="Softmax without")).to_be_visible()
    page.get_by_role("link", name="Teacher's page").click()
    assert page.locator("[data-notes]").count() == 1


# --- paint, contrast, imposed colours


# A chapter, a bench, a form and the notes; every place takes a minute.
AXE = [
    pytest.param("light", ("fa2", "tiles", "problem", "teacher"), id="light"),
    pytest.param("dark", ("online-softmax", "traffic"), id="dark"),
    pytest.param("light", (*TOUR, *BENCHES), id="everything", marks=pytest.mark.exhaustive),
    pytest.param("dark", (*TOUR, *BENCHES), id="everything, dark", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("scheme", "places"), AXE)
def test_axe_finds_nothing_serious(open_page: Any, scheme: str, places: tuple[str, ...]) -> None:
    reason = "axe-playwright-python is not installed: pip install tilewise[dev]"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason).Axe()
    page: Page = open_page(color_scheme=scheme)
    for place in places:
        go(page, place)
        if page.locator(".player-scrub input").count():
            seek(page, 2)
        rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
        found = axe.run(page, options=rules).response["violations"]
        serious = [
            (one["id"], node["target"], node["failureSummary"])
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"][:3]
        ]
        assert serious == [], place
