"""The lesson in a real browser: the tour by keyboard in every mode, what captions say, questions, notes, presenting."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pipeline_model import Pipeline, busy_share, timeline
from playwright.sync_api import Page, expect

from tilewise.explorer import chapter_names, exported_page
from tilewise.simulator import Workload, counts_after_each, schedule, simulate
from tilewise.simulator.events import Algorithm, Trace
from tilewise.simulator.online import online_softmax

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


def rows_of(panel: str) -> str:
    """The caption and the state of the rows of a panel of Tiles."""
    return f"""(() => {{
      const panel = document.querySelector('section[aria-label="{panel}"]');
      const rows = Array.from(panel.querySelectorAll(".rows-table tbody tr"), (row) =>
        Array.from(row.children, (cell) => cell.textContent));
      return {{text: panel.querySelector(".caption").textContent, rows}};
    }})()"""


def caption(page: Page) -> str:
    return page.locator(".chapter .caption").inner_text()


# --- the tour


MODES: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "forced": {"forced_colors": "active"},
    "phone": {"width": 375},
    "small": {"width": 320, "reduced_motion": "reduce"},
    "print": {"width": 794},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_tour_by_keyboard(open_page: Any, exported: Path, mode: str) -> None:
    page: Page = open_page("", base=exported.as_uri(), **MODES[mode])
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


def test_back_stays_in_the_page_and_keeps_the_step(open_page: Any) -> None:
    page: Page = open_page("fa1")
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


def test_an_unknown_address_opens_the_first_chapter(open_page: Any) -> None:
    page: Page = open_page("chapter-99?step=3")
    expect(page.locator("article")).to_have_attribute("data-chapter", "memory")
    expect(page.locator(".step-counter")).to_have_text("step 0 of 4")


def test_the_theme_is_remembered(open_page: Any, exported: Path) -> None:
    page: Page = open_page("", base=exported.as_uri(), color_scheme="light")
    page.locator("#theme-button").click()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_there_is_a_main_landmark_and_no_letter_is_a_command(open_page: Any) -> None:
    page: Page = open_page("tiles")
    expect(page.get_by_role("main")).to_be_visible()
    for key in "123456789abz":
        page.keyboard.press(key)
    expect(page.locator("#places [aria-current=page]")).to_have_text("Tiles")


# --- what captions say


def counted(trace: Trace, stops: int) -> tuple[int, int]:
    """Reads and writes after so many stops: the page's stops are steps and passes over rows."""
    done, last = 0, -1
    place: tuple[object, ...] | None = None
    for index, event in enumerate(trace.events):
        here = (event.phase, event.m_block, event.n_block, event.part)
        alone = event.phase in ("delta", "round", "merge")
        is_stop = alone or (None not in here[1:3] and event.phase not in ("setup", "finish", "skip"))
        if is_stop and here != place:
            done += 1
        if done > stops:
            break
        leads = event.phase in ("setup", "skip") or (not is_stop and event.phase != "finish" and event.kind != "free")
        if done == stops and leads and trace.algorithm != "naive":
            break
        place, last = here, index
    if stops == 0 or last < 0:
        return 0, 0
    traffic = list(counts_after_each(trace))[last].traffic
    return traffic.reads, traffic.writes


FULL = Workload(6, 6, 2, 2, block_m=2, block_n=2)
PICTURES: tuple[tuple[str, Algorithm, Workload], ...] = (
    ("fa1", "fa1", FULL),
    ("fa2", "fa2", FULL),
    ("fa2?block=3", "fa2", Workload(6, 6, 2, 2, block_m=3, block_n=3)),
    ("causal", "fa2", Workload(8, 8, 2, 2, block_m=2, block_n=2, right=0)),
    ("recompute", "backward", FULL),
    ("tiled-matmul", "matmul", Workload(4, 4, 4, 4, block_m=2, block_n=2, block_k=2)),
    ("tiled-matmul?how=naive", "matmul_naive", Workload(4, 4, 4, 4, block_m=2, block_n=2, block_k=2)),
)


def test_pictures_count_what_the_simulator_counts(open_page: Any, exported: Path) -> None:
    page: Page = open_page("", base=exported.as_uri())
    for place, algorithm, work in PICTURES:
        go(page, place)
        trace = schedule(algorithm, work)
        for at in (0, 1, 2, 3, 7, steps(page)):
            seek(page, at)
            shown = [int(n) for n in numbers(svg_text(page, ".traffic")[0])[:2]]
            assert tuple(shown) == counted(trace, at), (place, at)
            # What a screen reader is told is what the picture says.
            spoken = numbers(page.locator(".scene svg").get_attribute("aria-label") or "")
            assert spoken[-2:] == shown, (place, at)


def test_naive_ends_with_the_simulators_traffic(open_page: Any, exported: Path) -> None:
    page: Page = open_page("naive", base=exported.as_uri())
    page.keyboard.press("End")
    traffic = list(counts_after_each(schedule("naive", FULL)))[-1].traffic
    assert numbers(svg_text(page, ".traffic")[0]) == [traffic.reads, traffic.writes]
    # S and P are 2 x 36 of the numbers written.
    assert f"Of {traffic.writes} numbers written so far, 72 belong to S and P." in caption(page)


def test_the_bars_of_a_race_end_at_the_totals(open_page: Any, exported: Path) -> None:
    page: Page = open_page("fa2", base=exported.as_uri())
    page.keyboard.press("End")
    for algorithm in ("naive", "fa1", "fa2"):
        elements = list(counts_after_each(schedule(algorithm, FULL)))[-1].traffic.elements
        expect(page.locator(f'[data-race="{algorithm}"]')).to_have_text(f"{elements} of {elements}")


def test_fa1_says_by_what_l_and_o_are_multiplied(open_page: Any) -> None:
    page: Page = open_page("tiles")
    seen = 0
    for found in walk(page, rows_of("FA-1 order")):
        text, rows = found["text"], found["rows"]
        if "first keys these rows see" in text:
            # Nothing to correct, and no factor beside it.
            assert [(row[2], row[4]) for row in rows] == [("–", "–")] * 2
        if "rises from" not in text:
            continue
        seen += 1
        row, old, new, *_, alpha, old_sum, together = numbers(text.replace("e^", ""))
        assert alpha == pytest.approx(math.exp(old - new), abs=2e-3)
        assert together == pytest.approx(old_sum * alpha, abs=2e-3)
        shown = next(cells for cells in rows if int(cells[0]) == row)
        assert (shown[2], shown[4]) == (f"×{alpha:.3f}", f"×{together:.3f}")
    assert seen > 0


def test_o_changes_by_the_factor_that_is_shown(open_page: Any) -> None:
    page: Page = open_page("tiles?step=1")
    for panel in ("FA-1 order", "FA-2 order"):
        checked = 0
        states = [found["rows"] for found in walk(page, rows_of(panel))]
        for before, after in itertools.pairwise(states):
            for old, cells in zip(before, after, strict=True):
                if not cells[4].startswith("×"):
                    continue
                factor = numbers(cells[4])[0]
                for one, other in zip(numbers(old[5]), numbers(cells[5]), strict=True):
                    assert other == pytest.approx(one * factor, abs=0.02 * max(1, factor))
                checked += 1
        assert checked > 3


def test_online_softmax_shows_only_states_that_exist(open_page: Any) -> None:
    page: Page = open_page("softmax")
    row, block = [2.0, 8, 1, 9, 3, 7], 3
    states = online_softmax(row, block).states
    pairs = {(-math.inf, 0.0)}
    for state, before in zip(states, (None, *states), strict=False):
        pairs.add((state.row_max, round(state.row_sum, 4)))
        if before is not None:
            pairs.add((state.row_max, round(before.row_sum * state.correction, 4)))
    bars = "all => all.map((one) => parseFloat(one.style.height))"
    heights = None
    for at in range(steps(page) + 1):
        seek(page, at)
        largest, total = (page.locator(f'[data-counter="softmax-{one}"]').inner_text() for one in "ml")
        assert (-math.inf if largest == "−∞" else float(largest), float(total)) in pairs, at
        now = page.locator(".bar.now").evaluate_all(bars)
        if page.locator('[data-counter="softmax-correction"]').inner_text() != "–":
            # The correction changes m and l together, so no weight moves.
            assert now == pytest.approx(heights)
        heights = now
    # Two steps for the first block, three for the one that brings a larger score.
    assert steps(page) == 5


def test_online_softmax_with_values_is_attention(open_page: Any, exported: Path) -> None:
    page: Page = open_page("online-softmax", base=exported.as_uri())
    values = np.array([[1, 0], [0, 2], [1, 1], [2, 0], [0, 1], [1, 2]], dtype=float)
    row = np.array([2.0, 8, 1, 9, 3, 7])
    page.keyboard.press("End")
    weights = np.exp(row - row.max())
    expected = weights @ values / weights.sum()
    assert numbers(caption(page))[-2:] == pytest.approx(list(expected), abs=1e-4)
    for at in range(steps(page) + 1):
        seek(page, at)
        spoken = page.locator(".scene svg").get_attribute("aria-label") or ""
        panel = svg_text(page, ".value.large.end")
        assert f"m = {panel[0]}, l = {panel[1]}" in spoken
        if at > 0 and "is read" not in caption(page):
            assert panel[1] in caption(page) or panel[0] in caption(page), at


def test_why_softmax_resists_in_numbers(open_page: Any, exported: Path) -> None:
    page: Page = open_page("softmax-resists?step=5", base=exported.as_uri())
    row = np.array([2.0, 8, 1, 9, 3, 7])
    true = np.exp(row - 9) / np.exp(row - 9).sum()
    first = np.exp(row[:3] - 8) / np.exp(row[:3] - 8).sum()
    assert f"{true[1]:.4f}" in caption(page)
    assert f"factor of {first[1] / true[1]:.2f}" in caption(page)
    shown = svg_text(page, ".note.mid")
    assert shown[:3] == [f"{p:.4f}" for p in first]


def test_the_pipeline_says_what_the_simulator_says(open_page: Any, exported: Path) -> None:
    page: Page = open_page("fa3", base=exported.as_uri())
    for ping_pong in (True, False):
        for dtype, cycles in (("fp16", 512), ("fp8", 256)):
            go(page, f"fa3?pingpong={int(ping_pong)}&dtype={dtype}")
            page.keyboard.press("End")
            spans = timeline(Pipeline(ping_pong=ping_pong, load=cycles, product=cycles))
            end = max(span.stop for span in spans)
            share = f"{busy_share(spans):.0%}".replace("%", " %")
            assert f"takes {end:,} cycles" in caption(page)
            assert f"busy {share} of the time" in caption(page)
            assert page.locator(".scene .span").count() == len(spans) + 4 * 2 * 2


def test_a_split_is_weighed_as_the_text_says(open_page: Any, exported: Path) -> None:
    page: Page = open_page("split-decoding", base=exported.as_uri())
    seek(page, 4)
    weights = numbers(caption(page).split("=")[1])
    lses = [numbers(text)[-1] for text in svg_text(page, ".note.mid") if text.startswith("lse")]
    assert weights == pytest.approx([math.exp(lse - max(lses)) for lse in lses], abs=0.01)
    page.keyboard.press("End")
    shares = numbers(caption(page).split(":")[0])
    assert sum(shares) == pytest.approx(1, abs=2e-3)
    assert shares == pytest.approx([one / sum(weights) for one in weights], abs=2e-3)
    # The bench shows both, the weight and the share.
    go(page, "paging")
    rows = page.get_by_role("region", name="Parts and their merge").locator("tbody tr").all()
    found = [numbers(" ".join(row.locator("td").all_inner_texts()[2:4])) for row in rows[:-1]]
    assert max(weight for weight, _ in found) == 1
    assert sum(share for _, share in found) == pytest.approx(1, abs=2e-3)


def test_pages_tell_the_articles_story(open_page: Any, exported: Path) -> None:
    page: Page = open_page("pages?step=4", base=exported.as_uri())
    expect(page.locator(".scene")).to_contain_text("reserved: 16 of 16 pages, 7 of them empty")
    page.keyboard.press("ArrowRight")
    assert "Contiguous: refused" in caption(page)
    go(page, "pages?story=shared&step=4")
    assert "page 2 is copied to 3 before it writes" in caption(page)
    assert "Sharing saves 5 of 10 pages, 50 %" in caption(page)


def test_recomputed_gradients_are_the_simulators(open_page: Any, exported: Path) -> None:
    page: Page = open_page("recompute", base=exported.as_uri())
    given = page.evaluate(
        """async () => {
          const {headInputs} = await import("tilewise/engine/check.js");
          const {someNumbers} = await import("tilewise/engine/numbers.js");
          const {attention} = await import("tilewise/lesson/common.js");
          const inputs = {...headInputs(attention(6, 2, 2)), dout: someNumbers(6, 2, 4)};
          return Object.fromEntries(Object.entries(inputs).map(([name, one]) => [name, Array.from(one.data)]));
        }"""
    )
    arrays = {name: np.array(data, dtype=float).reshape(6, 2) for name, data in given.items()}
    work = Workload(6, 6, 2, 2, block_m=2, block_n=2, scale=2**-0.5)
    forward = simulate("fa2", work, {name: arrays[name] for name in "qkv"}).results
    results = simulate("backward", work, {**arrays, "out": forward["out"], "lse": forward["lse"]}).results
    seek(page, steps(page) - 3)
    # The last tile of keys is in SRAM with its gradient, as numbers.
    shown = [numbers(text)[0] for text in svg_text(page, ".value") if numbers(text)]
    for expected in results["dk"][4:].flatten():
        assert min(abs(one - expected) for one in shown) < 0.051


# --- the picture moves, and fits


def test_blocks_travel_unless_motion_is_unwanted(open_page: Any, exported: Path) -> None:
    for motion, travels in (("no-preference", True), ("reduce", False)):
        page: Page = open_page("fa2", base=exported.as_uri(), reduced_motion=motion)
        page.wait_for_timeout(300)
        page.keyboard.press("ArrowRight")
        assert (page.locator(".packet").count() > 0) == travels
        # Q, K and V were loaded: an arrow for each stays in the picture.
        assert page.locator(".wire.loaded").count() == 3
        expect(page.locator(".packet")).to_have_count(0)


@pytest.mark.parametrize(("width", "height"), [(1024, 768), (1920, 1080)])
def test_figure_memory_and_steps_are_on_one_screen(open_page: Any, exported: Path, width: int, height: int) -> None:
    page: Page = open_page("", base=exported.as_uri(), width=width)
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


def test_presenting_goes_on_by_arrow_keys(open_page: Any, exported: Path) -> None:
    page: Page = open_page("softmax-resists?step=4", base=exported.as_uri())
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


def test_a_tile_that_does_not_fit_says_so(open_page: Any, exported: Path) -> None:
    page: Page = open_page("fa2?block=6", base=exported.as_uri())
    expect(page.locator(".scene")).to_contain_text("it does not fit")
    go(page, "fa2?block=3")
    expect(page.locator(".scene")).not_to_contain_text("does not fit")
    for device, fits in (("v100", False), ("h100", True)):
        go(page, f"tiles?n=128&bm=128&bn=64&d=64&device={device}")
        text = page.locator("[data-capacity]").inner_text()
        assert ("they fit" in text) == fits, text


def test_hovering_a_cell_explains_its_score(open_page: Any, exported: Path) -> None:
    page: Page = open_page("fa2?step=1", base=exported.as_uri())
    page.locator(".scene .pair").first.hover()
    expect(page.locator(".tip")).to_contain_text(re.compile(r"Query 0, key 0: q·k = .* weight in the row's softmax"))
    go(page, "tiles?step=1")
    box = page.locator("canvas").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] * 0.7)
    expect(page.locator(".tip")).to_contain_text("q·k =")


def test_the_active_line_is_lit(open_page: Any, exported: Path) -> None:
    page: Page = open_page("", base=exported.as_uri())
    for name in TOUR:
        go(page, name)
        found = walk(page, "Array.from(document.querySelectorAll('.code .lit'), (line) => line.textContent)")
        assert all(found[1:]), name
        lit = set(itertools.chain(*found))
        assert len(lit) >= 3 or name == "tiled-matmul", (name, lit)


# --- words


def test_every_symbol_is_explained_in_its_chapter(open_page: Any, exported: Path) -> None:
    page: Page = open_page("", base=exported.as_uri())
    # Letters of the text itself: named where they stand, or ordinary words.
    own = {"a", "e", "s", "t", "x", "A", "B", "C"}
    for name in TOUR:
        go(page, name)
        text = page.locator(".chapter-text").inner_text()
        symbols = set(re.findall(r"(?<![\w^])(?:[A-Za-z]|d[A-Z]|lse|HBM|SRAM|TMA|FP8|KV cache)(?![\w])", text)) - own
        explained = set(
            page.locator(".chapter-text .explained").evaluate_all("all => all.map((one) => one.firstChild.data)")
        )
        assert symbols <= explained, (name, symbols - explained)
    first = page.locator(".chapter-text .explained").first
    first.focus()
    expect(page.locator(".tip")).to_be_visible()


def test_questions_are_answered_when_asked(open_page: Any, exported: Path) -> None:
    page: Page = open_page("", base=exported.as_uri())
    asked = 0
    for name in TOUR:
        go(page, name)
        boxes = page.locator(".question").all()
        asked += len(boxes)
        assert boxes, name
        for box in boxes:
            expect(box.locator(".answer-text")).to_be_hidden()
            box.locator("input").first.check()
            box.get_by_role("button").click()
            expect(box.locator(".answer-text")).to_have_text(re.compile(r"^(Right|Not quite)\. .{30,}"))
    assert asked >= 12


def test_the_teachers_page_has_every_chapter_and_prints(open_page: Any, exported: Path) -> None:
    page: Page = open_page("teacher", base=exported.as_uri())
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
    page: Page = open_page("", base=target.as_uri(), offline=True)
    expect(page.locator("article")).to_have_attribute("data-chapter", "online-softmax")
    page.keyboard.press("End")
    expect(page.locator("[data-check]")).to_contain_text("Same result")
    expect(page.locator("#places")).to_be_hidden()
    page.locator("[data-bench]").click()
    expect(page.get_by_role("heading", name="Softmax without")).to_be_visible()
    page.get_by_role("link", name="Teacher's page").click()
    assert page.locator("[data-notes]").count() == 1


# --- paint, contrast, imposed colours


def test_first_paint_of_the_exported_file(open_page: Any, exported: Path) -> None:
    assert exported.stat().st_size < 600 * 1024
    page: Page = open_page("", base=exported.as_uri())
    painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    times = [page.evaluate(painted)]
    for _ in range(2):
        page.reload()
        page.wait_for_selector("html[data-ready]")
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
        times.append(page.evaluate(painted))
    # The best of three: other tests run on the same cores.
    assert min(times) < 1000, times


COLOURS = """(canvas) => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const counts = {};
  for (let at = 0; at < data.length; at += 4) {
    const colour = data.slice(at, at + 4).join();
    counts[colour] = (counts[colour] ?? 0) + 1;
  }
  const sorted = Object.values(counts).sort((one, other) => other - one);
  return {distinct: sorted.length, largest: sorted[0] / (data.length / 4)};
}"""


@pytest.mark.parametrize("place", ["tiles?step=4", "backward?step=9", "matmul?step=4"])
def test_canvases_keep_their_lines_in_imposed_colours(open_page: Any, exported: Path, place: str) -> None:
    page: Page = open_page(place, base=exported.as_uri(), forced_colors="active")
    page.wait_for_timeout(100)
    before = page.locator("canvas").last.get_attribute("aria-label")
    found = page.locator("canvas").last.evaluate(COLOURS)
    assert found["distinct"] > 5
    # Mostly background, not a solid figure.
    assert 0.5 < found["largest"] < 0.99
    page.keyboard.press("ArrowRight")
    assert page.locator("canvas").last.get_attribute("aria-label") != before


def test_axe_finds_nothing_serious(open_page: Any, exported: Path) -> None:
    reason = "axe-playwright-python is not installed: pip install tilewise[dev]"
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason=reason).Axe()
    for scheme in ("light", "dark"):
        page: Page = open_page("", base=exported.as_uri(), color_scheme=scheme)
        rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
        if scheme == "dark":
            rules = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}  # type: ignore[dict-item]
        places = (
            (*TOUR, *BENCHES, "teacher") if scheme == "light" else ("fa2", "online-softmax", "fa3", "tiles", "problem")
        )
        for place in places:
            go(page, place)
            if page.locator(".player-scrub input").count():
                seek(page, 2)
            found = axe.run(page, options=rules).response["violations"]
            serious = [
                (one["id"], node["target"], node["failureSummary"])
                for one in found
                if one["impact"] in ("serious", "critical")
                for node in one["nodes"][:3]
            ]
            assert serious == [], (scheme, place)
