"""A server, an exported page and a browser, one of each; without a browser its tests are skipped and say so."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tilewise.explorer import ExplorerServer, exported_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What chromium needs in a container, and what keeps it from calling home.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]

OpenPage = Callable[..., "Page"]


@pytest.fixture(scope="session")
def server() -> Iterator[ExplorerServer]:
    with ExplorerServer(0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("explorer") / "explorer.html"
    target.write_text(exported_page(), encoding="utf-8")
    return target


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Browser, exported: Path) -> Iterator[OpenPage]:
    """Opens a view, by default of the exported page, which takes half as long as one that is served; fails at the end
    where anything was written to the console or went elsewhere.
    """
    complaints: list[str] = []
    contexts = []

    def open_view(view: str = "", *, base: str | None = None, width: int = 1200, **options: object) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        own = base or exported.as_uri()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.extend([] if is_own(request.url, own) else [request.url]))
        page.goto(f"{own}#{view}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_view
    for context in contexts:
        context.close()
    assert complaints == []


def is_own(url: str, base: str) -> bool:
    """Part of the page: the same address, or a module that the exported page makes of its own text."""
    return url.startswith((base, "data:"))
