"""The page at GET /docs in a headless Chromium."""

import pytest
from http_server import Server

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_page_shows_the_routes_and_asks_no_other_host(visit, tmp_path):
    with Server(tmp_path) as server:
        page = visit(server, "/docs", is_ready=False)
        page.wait_for_selector(
            "#operations-default-V1AudioSpeechSpeak, .opblock-summary-path", timeout=15_000
        )
        paths = page.locator(".opblock-summary-path").all_inner_texts()
    assert any("audio/speech" in path.replace("\u200b", "") for path in paths)
