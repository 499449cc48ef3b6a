"""Long works by the small voice, on a complete server."""

import httpx
import pytest
from http_server import until
from served import serving

BOOK = "# One\n\nThe old man told a story.\n\n# Two\n\nIt was about the sea.\n"


@pytest.mark.slow
def test_equal_seeds_give_equal_books_and_a_restart_finds_them(tmp_path):
    def files(works):
        paths = ("chapters/1", "chapters/2", "book.m4b")
        return [[http.get(f"{each}/{path}").raise_for_status().content for path in paths] for each in works]

    works = []
    with serving(tmp_path, "--deterministic", "--works-dir", tmp_path / "works", key=None) as url:
        with httpx.Client(base_url=f"{url}/v1/audio/works/", timeout=30) as http:
            for seed in (7, 7, 8):
                form = {"voice": "slt", "options": f'{{"seed": {seed}}}'}
                answer = http.post("", files={"document": ("b.md", BOOK.encode())}, data=form)
                works.append(answer.raise_for_status().json()["id"])
            until(lambda: all(work["state"] == "complete" for work in http.get("").json()["data"]), 60)
            first, second, other = files(works)
            assert first == second and first[2] != other[2]
    with serving(tmp_path, "--works-dir", tmp_path / "works", key=None) as url:
        with httpx.Client(base_url=f"{url}/v1/audio/works/", timeout=30) as http:
            assert [work["state"] for work in http.get("").json()["data"]] == ["complete"] * 3
            assert files(works) == [first, second, other]
