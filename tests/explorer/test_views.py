"""Every view in a real browser: the facts to the digit, stepping, keys, the address, phones, dark and light, speed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

from tilewise import explain
from tilewise.explorer import ExplorerServer
from tilewise.explorer.questions import Question, plan_of
from tilewise.simulator import Workload, count, counts_after_each, schedule
from tilewise.units import format_bytes

# One browser for all of them.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

VIEWS = ("tiles", "softmax", "traffic", "matmul", "backward", "paging", "problem")


def value(page: Page, counter: str) -> str:
    return page.locator(f'[data-counter="{counter}"]').inner_text()


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def here(page: Page) -> Locator:
    """The link to what is shown."""
    return page.locator("#places [aria-current=page]")


def unfold(page: Page) -> None:
    """Opens the form."""
    page.locator("details.folded").evaluate_all("all => all.forEach((one) => { one.open = true; })")


def cells(page: Page, region: str) -> list[list[str]]:
    """The rows of a table."""
    rows = page.get_by_role("region", name=region, exact=True).locator("tbody tr")
    return [row.locator("th, td").all_inner_texts() for row in rows.all()]


# --- every view, served and from a disk


def test_every_view_loads_and_fits_a_phone(open_page: Any, server: ExplorerServer) -> None:
    page: Page = open_page(base=server.url, width=360)
    for view in VIEWS:
        page.evaluate(f"location.hash = '{view}'")
        expect(here(page)).to_have_attribute("id", f"to-{view}")
        expect(page.locator("main h2")).to_be_visible()
        if view == "problem":
            expect(page.locator("[data-fact=backend]")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
        if view in ("traffic", "backward", "problem"):
            # Tables to compare: no column is hidden behind a scroll.
            hidden = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
            assert page.locator(".table-scroll").evaluate_all(hidden) == 0, view
        fields = page.locator("main input, main select, main textarea")
        nameless = "all => all.filter(one => !one.labels?.length && !one.ariaLabel).length"
        assert fields.evaluate_all(nameless) == 0, view


def test_the_exported_page_has_every_view_without_a_network(open_page: Any) -> None:
    page: Page = open_page("tiles", offline=True)
    for view in VIEWS:
        page.locator(f"#to-{view}").click()
        expect(here(page)).to_have_attribute("id", f"to-{view}")
        expect(page.locator("main h2")).to_be_visible()
    expect(page.locator("[data-fact=backend]")).to_have_text("hopper")
    page.get_by_label("Device", exact=True).select_option("a100")
    expect(page.locator("[data-fact=backend]")).to_have_text("triton")
    page.locator("#to-tiles").click()
    unfold(page)
    page.get_by_label("Tokens N").fill("8")
    press(page, "Escape")
    expect(page.locator("[data-summary]")).to_contain_text("16 tiles")


# --- tiles


def tiles_of(sees: Callable[[int, int], bool], size: int, block: int = 2) -> str:
    """How the page counts the tiles of a mask."""
    kinds = []
    for top, left in itertools.product(range(0, size, block), repeat=2):
        pairs = [sees(m, n) for m in range(top, top + block) for n in range(left, left + block)]
        kinds.append("full" if all(pairs) else "partial" if any(pairs) else "skipped")
    counts = [len(kinds) - kinds.count("skipped"), kinds.count("partial"), kinds.count("skipped")]
    return "{} tiles visited, {} of them partial, {} skipped".format(*counts)


def test_masks_of_any_form(open_page: Any) -> None:
    page: Page = open_page("tiles?n=12&mask=documents&documents=3")
    unfold(page)
    summary, check = page.locator("[data-summary]"), page.locator("[data-check]")
    expect(summary).to_contain_text(tiles_of(lambda m, n: m // 4 == n // 4, 12))
    page.get_by_label("Mask").select_option("prefix")
    page.get_by_label("Prefix", exact=True).fill("5")
    expect(summary).to_contain_text(tiles_of(lambda m, n: n < 5 or n <= m, 12))
    expect(check).to_contain_text(re.compile("Same result as naive attention: largest difference (0|.*e-1)"))
    page.get_by_label("Mask").select_option("neighbours")
    page.get_by_label("Picture width").fill("4")
    expect(summary).to_contain_text(tiles_of(lambda m, n: abs(m // 4 - n // 4) < 2 and abs(m % 4 - n % 4) < 2, 12))
    page.get_by_label("Mask").select_option("drawn")
    page.get_by_label("Tiles", exact=True).fill("100000-010000")
    expect(summary).to_contain_text("26 tiles visited, 0 of them partial, 10 skipped")
    page.get_by_label("Tiles", exact=True).fill("10x")
    expect(page.get_by_text("Expected rows of 0 and 1 with - between them")).to_be_visible()


def test_a_click_hides_or_shows_a_tile(open_page: Any) -> None:
    """The mask becomes a drawn one, which the address keeps."""
    page: Page = open_page("tiles?mask=causal")
    summary = page.locator("[data-summary]")
    expect(summary).to_contain_text("6 tiles visited, 3 of them partial, 3 skipped")
    canvas = page.get_by_role("region", name="FA-2 order").locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    # The tip says which pair is under the pointer.
    places: dict[tuple[int, int], Any] = {}
    for x, y in itertools.product(range(4, int(box["width"]), 32), range(4, int(box["height"]), 32)):
        page.mouse.move(box["x"] + x, box["y"] + y)
        tip = page.locator(".tip")
        if tip.is_visible() and (found := re.match(r"Query (\d), key (\d)", tip.text_content() or "")):
            places[int(found[1]), int(found[2])] = {"x": x, "y": y}
    canvas.click(position=places[0, 5])
    # Tiles that were visible in part are whole ones now.
    expect(summary).to_contain_text("7 tiles visited, 0 of them partial, 2 skipped")
    expect(page).to_have_url(re.compile("mask=drawn&tiles=101-110-111"))
    canvas.click(position=places[5, 0])
    expect(summary).to_contain_text("6 tiles visited, 0 of them partial, 3 skipped")
    canvas.click(position=places[5, 0])
    expect(page).to_have_url(re.compile("mask=drawn&tiles=101-110-111"))
    page.reload()
    expect(page.locator("[data-summary]")).to_contain_text("7 tiles visited")


def test_bad_input_is_named_and_changes_nothing(open_page: Any) -> None:
    page: Page = open_page("tiles")
    unfold(page)
    page.get_by_label("Tokens N").fill("1000")
    expect(page.get_by_text("Expected a whole number from 1 to 128.")).to_be_visible()
    expect(page.get_by_label("Tokens N")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("[data-summary]")).to_contain_text("9 tiles")
    page.get_by_label("Tokens N").fill("128")
    expect(page.get_by_text("4,096 tiles are more than")).to_be_visible()


def test_the_defaults_show_the_thesis_and_a_sentence_says_when_it_fails(open_page: Any) -> None:
    page: Page = open_page("tiles")
    expect(page.locator("[data-verdict]")).to_contain_text("moves 192 elements, FA-1 132, FA-2 96.")
    page.evaluate("location.hash = 'tiles?d=4'")
    expect(page.locator("[data-verdict]")).to_contain_text("moves 240 elements, FA-1 264, FA-2 192.")
    expect(page.locator("[data-verdict]")).to_contain_text("Here FA-1 does not save traffic")
    page.evaluate("location.hash = 'backward'")
    work = Workload(16, 16, 2, 2, block_m=4, block_n=4)
    tiled, naive = (count(schedule(one, work)) for one in ("backward", "naive_backward"))
    assert tiled.flops > naive.flops
    assert tiled.bytes_read + tiled.bytes_written < naive.bytes_read + naive.bytes_written
    verdict = page.locator("[data-verdict]")
    expect(verdict).to_contain_text(f"{tiled.flops / naive.flops:.2f}× the FLOP")
    expect(verdict).to_contain_text("It would fail with tiny blocks")
    page.evaluate("location.hash = 'backward?n=64&d=64&bm=4&bn=4'")
    expect(verdict).to_contain_text("at these sizes recomputing moves more")


def test_an_address_with_nonsense_opens_the_defaults(open_page: Any) -> None:
    page: Page = open_page("tiles?n=banana&mask=x&step=-4&bm=0")
    expect(page.locator("[data-summary]")).to_contain_text("9 tiles")
    expect(page.locator(".step-counter")).to_have_text("step 0 of 27")


# --- online softmax


def test_online_softmax_facts(open_page: Any) -> None:
    page: Page = open_page("softmax")
    press(page, "ArrowRight", "ArrowRight")
    assert (value(page, "softmax-m"), value(page, "softmax-l")) == ("8", "1.0034")
    press(page, "ArrowRight", "ArrowRight")
    assert value(page, "softmax-correction") == "0.3679"
    press(page, "ArrowRight")
    assert (value(page, "softmax-m"), value(page, "softmax-l")) == ("9", "1.5069")
    expect(page.locator(".step-counter")).to_have_text("step 5 of 5")
    unfold(page)
    page.get_by_role("button", name="1 2 3 | 6 2 1").click()
    press(page, "End")
    rows = cells(page, "After each block")
    assert rows == [["1", "1 2 3", "3", "–", "1.503215"], ["2", "6 2 1", "6", "0.049787", "1.099894"]]
    exact = "0.006126 0.016652 0.045265 0.909178 0.016652 0.006126"
    expect(page.locator("[data-check]")).to_contain_text(exact)
    page.get_by_label("Scores of one row").fill("1, two")
    expect(page.get_by_text('"two" is none')).to_be_visible()


# --- memory traffic


def test_memory_traffic_facts(open_page: Any) -> None:
    page: Page = open_page("traffic")
    rows = {row[0]: (row[1], row[3], row[4]) for row in cells(page, "Traffic by N")}
    assert rows == {
        "256": ("327,680", "98,304", "3.3×"),
        "512": ("1,179,648", "327,680", "3.6×"),
        "1,024": ("4,456,448", "1,179,648", "3.8×"),
        "2,048": ("17,301,504", "4,456,448", "3.9×"),
        "4,096": ("68,157,440", "17,301,504", "3.9×"),
    }
    share = "reads 8,781,824, writes 8,519,680, in all 17,301,504, of which N² terms 16,777,216 (97 %)"
    expect(page.locator("[data-share]")).to_contain_text(share)
    memory = cells(page, "Memory by N")
    assert memory == [["1,024", "4 MiB", "8 KiB"], ["4,096", "64 MiB", "32 KiB"], ["16,384", "1 GiB", "128 KiB"]]
    expect(page.locator(".long-context")).to_contain_text("32 GiB a head")
    expect(page.locator(".long-context")).to_contain_text("at d = 64 are 17 MiB; at d = 128 they are 33 MiB")
    unfold(page)
    page.get_by_label("Axes", exact=True).select_option("log")
    page.get_by_label("Show", exact=True).select_option("time")
    page.get_by_label("Device", exact=True).select_option("h200")
    # 17,301,504 elements of 2 bytes at 4.8 TB/s.
    assert {row[0]: row[1] for row in cells(page, "Traffic by N")}["2,048"] == "7.21 µs"


# --- tiled matmul, backward


def test_tiled_matmul_facts(open_page: Any) -> None:
    page: Page = open_page("matmul")
    press(page, "ArrowRight")
    assert (value(page, "matmul-naive-loads"), value(page, "matmul-tiled-loads")) == ("8", "8")
    press(page, "End")
    assert (value(page, "matmul-naive-steps"), value(page, "matmul-naive-loads")) == ("16", "128")
    assert (value(page, "matmul-tiled-steps"), value(page, "matmul-tiled-loads")) == ("8", "64")


def test_backward_recomputes_and_agrees(open_page: Any) -> None:
    page: Page = open_page("backward?n=6&bm=2&bn=2&d=4")
    # 3 passes over rows for delta, 9 tiles of 3 steps, 3 to round dQ.
    assert page.locator(".player input").get_attribute("max") == str(3 + 27 + 3)
    press(page, "End")
    trace = schedule("backward", Workload(6, 6, 4, 4, block_m=2, block_n=2))
    traffic = list(counts_after_each(trace))[-1].traffic
    assert value(page, "backward-total") == f"{traffic.elements:,}"
    assert value(page, "backward-wide") == f"{traffic.wide:,}"
    difference = page.locator("[data-gradcheck]").inner_text().rstrip(".").split()[-1]
    assert float(difference) < 1e-12


# --- decode and paging


def test_paging_facts(open_page: Any) -> None:
    page: Page = open_page("paging?step=4")
    contiguous = [value(page, f"contiguous-{name}") for name in ("reserved", "used", "wasted")]
    assert contiguous == ["16", "9", "7"]
    assert value(page, "paged-reserved") == "9"
    press(page, "ArrowRight")
    expect(page.locator(".caption")).to_contain_text("Contiguous: refused")
    assert value(page, "paged-reserved") == "10"
    press(page, "ArrowRight", "ArrowRight")
    expect(page.locator(".caption")).to_contain_text("page 6 was C's")
    tables = page.locator(".page-table").all_inner_texts()
    assert [" ".join(text.split()) for text in tables][-1] == "E 9 6 5 tokens".replace("9 6", "96")
    error = page.locator("[data-split-error]").inner_text().rstrip(".").split()[-1]
    assert float(error) < 1e-12


def test_sharing_copies_on_write_and_buttons_write_the_story(open_page: Any) -> None:
    page: Page = open_page("paging")
    page.get_by_role("button", name="Shared prompt").click()
    press(page, "ArrowRight", "ArrowRight", "ArrowRight")
    assert (value(page, "paged-reserved"), value(page, "paged-saved")) == ("3", "6 (67 %)")
    press(page, "ArrowRight")
    expect(page.locator(".caption")).to_contain_text("page 2 is copied to 3 before it writes")
    page.get_by_role("button", name="C finishes").click()
    unfold(page)
    # What C was to do later makes no sense any more; the rest of the story stays.
    expect(page.get_by_label("What happens")).to_have_value(
        "A arrives 10\nB shares A\nC shares A\nB grows 3\nC finishes\nD shares A\nA finishes\nB grows 4"
    )
    expect(page.locator(".step-counter")).to_have_text("step 5 of 8")
    page.get_by_label("What happens").fill("A arrives 3\nZ grows 1")
    expect(page.get_by_text("line 2 to make sense: Z is not there")).to_be_visible()


# --- my problem


def test_my_problem_shows_what_explain_says(open_page: Any, server: ExplorerServer) -> None:
    page: Page = open_page("problem", base=server.url)
    page.get_by_label("Model").select_option("70B, GQA 8:1 (Llama 3 70B)")
    page.get_by_label("Context").fill("32768")
    page.get_by_label("Device", exact=True).select_option("h200")
    expect(page.locator("[data-fact=kv-model]")).to_contain_text("10.0 GiB")
    question = Question(1, 32768, 64, 8, 128, "bfloat16", "h200", "prefill", True, None)
    plan = plan_of(question)
    expect(page.locator("[data-fact=backend]")).to_have_text(str(plan.backend))
    expect(page.locator("[data-fact=tile]")).to_contain_text(f"{plan.tile.block_m} × {plan.tile.block_n}")
    assert plan.tiled.seconds is not None
    expect(page.locator("[data-fact=seconds-tiled]")).to_contain_text(f"{plan.tiled.seconds * 1e3:.1f} ms")
    page.locator("[data-fact=seconds-tiled] .explained").focus()
    expect(page.locator(".tip")).to_contain_text("Bound by arithmetic")
    page.get_by_label("K/V heads").fill("7")
    expect(page.get_by_text("must be a multiple of K/V heads (7). Shown for 4 K/V heads.")).to_be_visible()


def test_my_problem_compares_the_ways_to_share_keys_and_values(open_page: Any) -> None:
    """Bytes of a token in a layer, and of all tokens in all layers."""
    page: Page = open_page("problem")
    page.get_by_label("Model").select_option("70B, GQA 8:1 (Llama 3 70B)")
    page.get_by_label("Context").fill("32768")
    columns = {"mha": 2 * 64 * 128, "gqa": 2 * 8 * 128, "mqa": 2 * 128, "latent": 512 + 64}
    for way, width in columns.items():
        row = page.locator("tr", has=page.locator(f"[data-cache={way}]"))
        sizes = [f"{2 * width:,} B", format_bytes(2 * width * 80 * 32768)]
        expect(row.locator("td")).to_have_text(sizes)
    q = torch.empty(1, 64, 1, 576, dtype=torch.bfloat16, device="meta")
    latent = torch.empty(1, 1, 64, 576, dtype=torch.bfloat16, device="meta")
    assert explain(q, latent, latent[..., :512], device="h200").bytes_per_token == 2 * columns["latent"]


def test_three_ways_on_one_device(open_page: Any) -> None:
    page: Page = open_page("problem")
    plan = plan_of(Question(1, 8192, 32, 32, 128, "bfloat16", "h100", "prefill", True, None))
    assert plan.tiled.seconds is not None
    expect(page.locator('[data-way="fa2"]')).to_have_text(f"{plan.tiled.seconds * 1e6:.0f} µs")
    expect(page.locator('[data-way="fa1"]')).to_have_text(f"{plan.tiled.seconds * 1e6:.0f} µs")
    # SDPA has no window: it computes every pair.
    page.get_by_label("Mask").select_option("window")
    page.get_by_label("Window").fill("1023")
    expect(page.get_by_text("SDPA has no sliding window")).to_be_visible()
    expect(page.locator('[data-way="fa1"]')).to_have_text(f"{plan.naive.flops / 989e12 * 1e3:.2f} ms")
    expect(page.get_by_text("an estimate: the least time, not a measurement")).to_be_visible()


def test_numbers_read_as_a_person_writes_them(open_page: Any) -> None:
    page: Page = open_page("matmul?n=1&t=1")
    expect(page.locator("[data-verdict]")).to_contain_text("naive 1 step and 2 element loads, tiled 1 step and 2")
    texts = page.evaluate(
        """async () => {
          const {formatSeconds} = await import("tilewise/ui/format.js");
          return [999, 5000, 9549783, 4e9, 1e5].map(formatSeconds);
        }"""
    )
    assert texts == ["999 s", "83 min", "111 days", "127 years", "28 h"]


# --- keys, address, themes


def test_keys_and_links(open_page: Any) -> None:
    page: Page = open_page("tiles")
    press(page, "ArrowRight", "ArrowRight", "ArrowLeft")
    expect(page.locator(".step-counter")).to_have_text("step 1 of 27")
    press(page, "End", "Home", " ")
    expect(page.get_by_role("button", name="Play or pause")).to_have_text("Pause")
    expect(page.locator(".step-counter")).not_to_have_text("step 0 of 27")
    press(page, " ")
    # No single letter or digit does anything.
    press(page, "3")
    expect(here(page)).to_have_text("Tiles")
    page.get_by_role("link", name="Online softmax").focus()
    press(page, "Enter")
    expect(page.get_by_role("heading", name="Softmax without")).to_be_focused()
    page.get_by_role("button", name="Keys").click()
    expect(page.locator("#help")).to_be_visible()


def test_the_address_keeps_the_state(open_page: Any, server: ExplorerServer) -> None:
    page: Page = open_page("tiles?n=10&step=7", base=server.url)
    press(page, "ArrowRight")
    unfold(page)
    page.get_by_label("Heads").fill("2")
    press(page, "Tab")
    page.locator(".player input").fill("9")
    expect(page).to_have_url(re.compile(r"#tiles\?n=10&heads=2&step=9$"))
    page.reload()
    expect(page.locator(".step-counter")).to_have_text("step 9 of 150")
    page.evaluate("location.hash = '#softmax?step=5'")
    assert value(page, "softmax-l") == "1.5069"


def test_dark_and_light_follow_the_system_and_the_button(open_page: Any) -> None:
    page: Page = open_page("tiles", color_scheme="dark")
    for theme in ("dark", "light"):
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        page.locator("#theme-button").click()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


# --- speed


def test_interactive_in_under_a_second(open_page: Any) -> None:
    ready = "performance.getEntriesByName('tilewise-ready')[0].startTime"
    page: Page = open_page()
    times = [page.evaluate(ready)]
    for _ in range(2):
        page.reload()
        page.wait_for_selector("html[data-ready]")
        times.append(page.evaluate(ready))
    # The best of three: other tests run on the same cores.
    assert min(times) < 1000, times
