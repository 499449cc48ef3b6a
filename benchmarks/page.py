"""Measure how soon the page at / plays audio in a headless Chromium, and take its picture.

    python benchmarks/page.py [--rounds 10] [--url URL] [--pictures DIR] [SERVE_OPTION ...]

Serves the small voice, or uses a running server. First audio is the time that the page shows: from the click
to the first samples that it hands to the browser's audio. The time from opening the address to a page that
can be clicked is measured as well. Playwright comes with the extra `browser`, Chromium from the system.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import time
from pathlib import Path
from statistics import median
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright
from served import served

TEXT = (
    "The old man told the children a story about the sea. We had bread and cheese for breakfast this morning."
)
COMMANDS = ("chromium", "chromium-browser", "google-chrome")
SEEN_S = 3.0  # seconds of speech before the picture is taken
SIZE = {"width": 1280, "height": 890}


def opened(browser: Browser, url: str, scheme: Literal["light", "dark"] = "light") -> Page:
    page = browser.new_context(color_scheme=scheme, viewport=SIZE).new_page()
    page.goto(url)
    page.wait_for_selector("#speak:enabled")
    page.fill("#input", TEXT)
    return page


def wait(page: Page, fact: str) -> None:
    """Poll until an expression is true.

    Playwright's own waiting evaluates strings in the page, which the page's policy forbids."""
    while not page.evaluate(fact):
        time.sleep(0.01)


def spoken(page: Page) -> dict[str, float]:
    page.click("#speak")
    wait(page, "playground.take !== null && playground.isSpeaking")
    wait(page, "!playground.isSpeaking")
    shown = {name: page.text_content(f"#{name}") or "" for name in ("ttfa", "rtf", "underruns")}
    return {name: float(re.sub(r"[^0-9.]", "", text)) for name, text in shown.items()}


def picture(browser: Browser, url: str, scheme: Literal["light", "dark"], path: Path) -> None:
    page = opened(browser, url, scheme)
    page.click("#speak")
    time.sleep(SEEN_S)
    page.screenshot(path=path)
    page.context.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--rounds", type=int, default=10)
    options.add_argument("--url")
    options.add_argument("--pictures", type=Path)
    given, serve_options = options.parse_known_args()
    path = os.environ.get("ZOO_CHROMIUM") or next(filter(None, map(shutil.which, COMMANDS)), None)
    if path is None:
        raise SystemExit(f"no Chromium found; install one of {', '.join(COMMANDS)}, or set ZOO_CHROMIUM=PATH")
    with served(serve_options, given.url) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        began_s = time.perf_counter()
        page = opened(browser, url)
        opened_ms = 1000 * (time.perf_counter() - began_s)
        rounds = [spoken(page) for _ in range(given.rounds)]
        if given.pictures is not None:
            picture(browser, url, "light", given.pictures / "playground.png")
            picture(browser, url, "dark", given.pictures / "playground_dark.png")
        browser.close()
    later = [each["ttfa"] for each in rounds[1:]] or [rounds[0]["ttfa"]]
    result = {
        "page_ready_ms": round(opened_ms),
        "first_click_to_first_audio_ms": rounds[0]["ttfa"],
        "click_to_first_audio_ms": median(later),
        "click_to_first_audio_most_ms": max(later),
        "rtf": median(each["rtf"] for each in rounds),
        "underruns": sum(each["underruns"] for each in rounds),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
