"""A server of long works in this process, and requests to it."""

import contextlib

from http_server import Server, until

from serving.settings import WorksSettings

WORKS = "/v1/audio/works"
TWO = "# frames 300 The sea\n\nIt was long.\n\n# frames 200 The door\n\nShe opened it.\n"


@contextlib.contextmanager
def started(tmp_path, where, **options):
    """Start a server, and wait until it has read the works: it answers other requests before."""
    with Server(tmp_path, **{"works": WorksSettings(str(where)), **options}) as server:
        until(lambda: not str(server.app.state.works.problem).startswith("the works are being read"))
        yield server


def post(server, text, name="book.txt", headers=None, **fields):
    content = text if isinstance(text, bytes) else text.encode()
    files = {"document": (name, content)}
    return server.http.post(WORKS, files=files, data=fields, headers=headers)


def add(server, text, name="book.txt", **fields):
    answer = post(server, text, name, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def get(server, id):
    answer = server.http.get(f"{WORKS}/{id}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait(server, id, state):
    until(lambda: get(server, id)["state"] == state)
    return get(server, id)
