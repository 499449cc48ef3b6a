"""The page at GET /docs in a headless Chromium."""

import os
import shutil

import pytest
from http_server import Server

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'")

pytestmark = [pytest.mark.browser, pytest.mark.slow]
COMMANDS = ("chromium", "chromium-browser", "google-chrome")


def test_the_page_shows_the_routes_and_asks_no_other_host(tmp_path):
    path = os.environ.get("ZOO_CHROMIUM") or next(filter(None, map(shutil.which, COMMANDS)), None)
    if path is None:
        pytest.skip(f"needs a Chromium: one of {', '.join(COMMANDS)}, or ZOO_CHROMIUM=PATH")
    wrong = []
    with Server(tmp_path) as server, sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        page = browser.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        page.on(
            "request", lambda asked: asked.url.startswith((server.url, "data:")) or wrong.append(asked.url)
        )
        page.goto(f"{server.url}/docs")
        page.wait_for_selector(
            "#operations-default-V1AudioSpeechSpeak, .opblock-summary-path", timeout=15_000
        )
        paths = page.locator(".opblock-summary-path").all_inner_texts()
        browser.close()
    assert any("audio/speech" in path.replace("\u200b", "") for path in paths)
    assert not wrong
