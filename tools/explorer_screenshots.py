"""Takes the pictures of docs/explorer.md: `python tools/explorer_screenshots.py docs/images`. Look at them, too."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tilewise.explorer import exported_page

# File, view, and whether it is dark.
PICTURES = (
    ("lesson", "fa2?step=16", False),
    ("tiles", "tiles?n=8&mask=causal&step=14", False),
    ("tiles-dark", "tiles?n=64&bm=4&bn=4&d=8&mask=window&w=20&step=140", True),
    ("softmax", "softmax?step=4", False),
    ("traffic", "traffic", False),
    ("matmul", "matmul?step=6", False),
    ("backward", "backward?step=22", False),
    ("paging", "paging?step=5", False),
    ("problem", "problem?context=32768&model=70B%2C+GQA+8%3A1+%28Llama+3+70B%29", False),
)
# A palette keeps a page of flat colours under 100 kB; k-means keeps the colours of small things, too.
COLOURS = 256


def take(browser: Browser, page_file: Path, target: Path, view: str, dark: bool) -> None:
    """One picture of a whole view."""
    page = browser.new_page(viewport={"width": 1160, "height": 800}, color_scheme="dark" if dark else "light")
    page.goto(f"{page_file.as_uri()}#{view}")
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(300)
    page.screenshot(path=target, full_page=True)
    page.close()
    with Image.open(target) as picture:
        picture.convert("RGB").quantize(COLOURS, kmeans=3).save(target, optimize=True)


def main(folder: Path) -> None:
    """All pictures, into a folder."""
    found = shutil.which("chromium")
    if found is None:
        sys.exit("no browser is installed: apt-get install chromium")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as temporary:
        page_file = Path(temporary) / "explorer.html"
        page_file.write_text(exported_page(), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for name, view, dark in PICTURES:
            take(browser, page_file, folder / f"explorer-{name}.png", view, dark)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
