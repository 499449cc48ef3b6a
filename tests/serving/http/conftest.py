"""A headless Chromium for the tests with the marker `browser`, and an end of what a fake engine holds back."""

import os
import shutil

import pytest

COMMANDS = ("chromium", "chromium-browser", "google-chrome")
SOUND = [
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--autoplay-policy=no-user-gesture-required",
]
NOT_LOADED = "Failed to load resource: "  # the console shows it for every HTTP error, even expected ones


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install -e '.[browser]'"
    )
    path = os.environ.get("ZOO_CHROMIUM") or next(filter(None, map(shutil.which, COMMANDS)), None)
    if path is None:
        pytest.skip(f"needs a Chromium: one of {', '.join(COMMANDS)}, or ZOO_CHROMIUM=PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=SOUND)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Return a function that opens a server's page. At the end, check that the page had no errors and used
    no other server."""
    contexts, wrong = [], []

    def open_page(server, path="/", *, is_ready=True, **options):
        context = chromium.new_context(**options)
        context.set_default_timeout(10_000)
        context.grant_permissions(["clipboard-read", "clipboard-write", "microphone"], origin=server.url)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: (
                request.url.startswith((server.url, "blob:", "data:")) or wrong.append(request.url)
            ),
        )
        page.on("console", lambda said: said.text.startswith(NOT_LOADED) or wrong.append(said.text))
        page.on(
            "response",
            lambda answer: "/playground/" in answer.url and answer.status != 200 and wrong.append(answer.url),
        )
        page.goto(server.url + path)
        if is_ready:
            page.wait_for_selector("#speak:enabled")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


@pytest.fixture
def held(server):
    """Let the engine go on after a test that held it."""
    yield
    server.call(server.engine.go.set)
