"""Long works by the small voice, on a complete server."""

import httpx
import pytest
from http_server import until
from served import serving

BOOK = "# One\n\nThe old man told a story.\n\n# Two\n\nIt was about the sea.\n"
PATHS = ("chapters/1", "chapters/2", "book.m4b")


def works(url):
    return httpx.Client(base_url=f"{url}/v1/audio/works/", timeout=30)


def files(http, ids):
    return [[http.get(f"{id}/{path}").raise_for_status().content for path in PATHS] for id in ids]


def states(http):
    return [work["state"] for work in http.get("").json()["data"]]


@pytest.mark.slow
def test_equal_seeds_give_equal_books(tmp_path):
    options, ids = ("--deterministic", "--works-dir", tmp_path / "works"), []
    with serving(tmp_path, *options, key=None) as url, works(url) as http:
        for seed in (7, 7, 8):
            form = {"voice": "slt", "options": f'{{"seed": {seed}, "max_new_tokens": 8}}'}
            answer = http.post("", files={"document": ("b.md", BOOK.encode())}, data=form)
            ids.append(answer.raise_for_status().json()["id"])
        until(lambda: states(http) == ["complete"] * 3, 60)
        first, second, other = files(http, ids)
        assert first == second and first[2] != other[2]
