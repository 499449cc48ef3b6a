"""Reference audio in a request: inline, by URL, and invalid in many ways."""

import base64
import io
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import msgspec
import numpy as np
import pytest
import soundfile
from fake_engine import CLONER, MODEL, frame
from http_server import Server, error, until

from serving.http import references
from serving.protocol import MAX_CLIP_BYTES, AudioClip, Reference
from serving.settings import Limits

RATE_HZ = 22050
LOUD = np.random.default_rng(2).uniform(-0.5, 0.5, (2 * RATE_HZ, 2)).astype(np.float32)  # [N, 2]
CLIP = AudioClip(LOUD.mean(1).tobytes(), RATE_HZ)


def recording(samples=LOUD, subtype="FLOAT"):
    file = io.BytesIO()
    soundfile.write(file, samples, RATE_HZ, format="WAV", subtype=subtype)
    return file.getvalue()


WAV = recording()
BASE64 = base64.b64encode(WAV).decode()
SHORT = base64.b64encode(recording(LOUD[: RATE_HZ // 2])).decode()
LONG = recording(np.tile(LOUD[:, :1], (11, 1)), "ULAW")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    limits = Limits(reference_bytes=500_000, reference_s=20)
    with Server(tmp_path_factory.mktemp("s"), models=[CLONER, MODEL], limits=limits) as server:
        yield server


def reached(server, **fields):
    """Return the references and options that reached the engine."""
    answer = server.speak("frames 1", **fields)
    assert answer.status_code == 200, answer.text
    assert answer.content[44:] == frame(0)
    message = server.engine.messages[answer.headers["x-request-id"]]
    return message.references, message.request.options or None


@pytest.mark.parametrize(
    "prefix", ["", "data:audio/wav;base64,", "DATA:audio/x-wav;codecs=1;BASE64,", "data:;base64,"]
)
def test_a_reference_reaches_the_engine_with_its_text(server, prefix):
    assert reached(server, ref_audio=prefix + BASE64, ref_text="What I say.") == (
        [Reference(CLIP, "What I say.")],
        None,
    )


def test_references_can_be_sent_in_other_forms(server):
    assert reached(server, ref_audio=BASE64, x_vector_only_mode=True) == (
        [Reference(CLIP)],
        {"x_vector_only_mode": True},
    )
    assert reached(server, references=[{"audio": BASE64, "text": "What I say."}]) == (
        [Reference(CLIP, "What I say.")],
        None,
    )
    assert reached(server, references=[{"ref_audio": BASE64}], ref_text="What I say.") == (
        [Reference(CLIP, "What I say.")],
        None,
    )
    assert reached(server, ref_audio=BASE64, references=[], task_type="Base", voice=None, model="cloner")[
        0
    ] == [Reference(CLIP)]
    assert reached(server) == ([], None)  # the real engine would refuse it


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_base64_may_have_line_breaks(server, end):
    text = base64.encodebytes(base64.b64decode(BASE64)).decode().replace("\n", end)
    assert reached(server, ref_audio=text)[0] == [Reference(CLIP)]


@pytest.mark.parametrize("size", [1, 2, 3, 200_000, 200_001, 200_002])
def test_base64_may_lack_its_padding(size):
    data = bytes(range(256)) * 1000
    assert references.unpack(base64.b64encode(data[:size]).decode().rstrip("="), 1 << 20) == data[:size]


def test_models_say_whether_they_take_references(server):
    cloner, fake = server.http.get("/v1/models").json()["data"]
    # The model's limits, narrowed by the server's.
    assert (cloner["modes"], cloner["reference_s"]) == (["clone"], [1.0, 20.0])
    assert fake["reference_s"] is None


OTHER = {"model": "fake"}
BAD = {
    "no base64": ({"ref_audio": "hello!"}, "ref_audio", "neither a data URL nor base64"),
    "not ASCII": ({"ref_audio": "ä" * 8}, "ref_audio", "neither a data URL nor base64"),
    "a file's name": ({"ref_audio": "file:///etc/passwd"}, "ref_audio", "this server reads no files"),
    "nothing": ({"ref_audio": ""}, "ref_audio", "it is empty"),
    "no audio": (
        {"ref_audio": base64.b64encode(b"Good morning.").decode()},
        "ref_audio",
        "format is not supported",
    ),
    "a data URL of text": ({"ref_audio": "data:text/plain,hello"}, "ref_audio", "data:audio/wav;base64,"),
    "a data URL without an end": (
        {"ref_audio": "data:audio/wav;base64"},
        "ref_audio",
        "data:audio/wav;base64,",
    ),
    "a URL": (
        {"ref_audio": "https://example.com/a.wav"},
        "ref_audio",
        "does not fetch URLs .* --allow-url-references",
    ),
    "too long": (
        {"ref_audio": base64.b64encode(LONG).decode()},
        "ref_audio",
        "longer than the maximum of 20 s",
    ),
    "too large": (
        {"ref_audio": base64.b64encode(bytes(600_000)).decode()},
        "ref_audio",
        "about 600000 bytes; .* takes up to 500000",
    ),
    "a number": ({"ref_audio": 5}, "ref_audio", "a data URL or base64"),
    "twice": ({"ref_audio": BASE64, "references": [{"audio": BASE64}]}, "references", "both given"),
    "two": (
        {"references": [{"audio": BASE64}] * 2},
        "references",
        "2 references are given; model 'cloner' takes up to 1",
    ),
    "seventeen": ({"references": [{"audio": "x"}] * 17}, "references", "a list of up to 16"),
    "an empty item": (
        {"references": [{}]},
        "references",
        "exactly one of audio, ref_audio and audio_path .*; one item has 0",
    ),
    "both names": (
        {"references": [{"audio": BASE64, "ref_audio": BASE64}]},
        "references",
        "exactly one of audio, ref_audio and audio_path .*; one item has 2",
    ),
    "two texts": (
        {"references": [{"audio": BASE64, "text": "a"}], "ref_text": "b"},
        "references",
        "both given; leave one out",
    ),
    "an unknown name": (
        {"references": [{"audio": BASE64, "vq_codes": [1]}]},
        "references",
        "unknown field `vq_codes`",
    ),
    "no list": ({"references": {"audio": BASE64}}, "references", "a list of up to 16"),
    "bad in a list": ({"references": [{"audio": "!"}]}, "references", "neither a data URL nor base64"),
    "a text alone": ({"ref_text": "What I say."}, "ref_text", "ref_audio is missing"),
    "too short": ({"ref_audio": SHORT}, "ref_audio", "lasts 0.5 s; it must last 1 to 20 s"),
    "too short in a list": (
        {"references": [{"audio": SHORT}]},
        "references",
        "lasts 0.5 s; it must last 1 to 20 s",
    ),
    "a model without": (
        {"ref_audio": BASE64, **OTHER},
        "ref_audio",
        "'fake' takes no reference audio; available voices: vivian, ryan",
    ),
    "a task without": ({"ref_audio": BASE64, "task_type": "VoiceDesign"}, "task_type", "it supports: Base"),
    "no such voice": (
        {"voice": "alloy"},
        "voice",
        "no voice 'alloy'; upload a voice .POST /v1/audio/voices. or send ref_audio",
    ),
}


@pytest.mark.parametrize(("fields", "param", "says"), BAD.values(), ids=BAD)
def test_unusable_references_are_refused(server, fields, param, says):
    before = len(server.engine.asked)
    fault = error(server.speak("frames 1", **fields), 400)
    assert fault["param"] == param
    with pytest.raises(ValueError, match=says):
        raise ValueError(fault["message"])
    assert len(server.engine.asked) == before  # nothing of it reached the engine


def test_a_body_over_the_limit_is_a_413(server):
    assert error(server.speak("frames 1", ref_audio="A" * 2_000_000), 413)["code"] == "body_too_large"


def test_rejections_by_the_engine_use_the_clients_field_names(server):
    for fields in ({"ref_audio": BASE64}, {}):
        assert error(server.speak("reject references", **fields), 400)["param"] == "ref_audio"
        fault = error(server.speak("reject transcript", **fields), 400)
        assert (fault["param"], fault["message"]) == ("ref_text", "ref_text is not possible")
    for param in ("references", "transcript"):
        fault = error(server.speak(f"reject {param}", references=[{"audio": BASE64}]), 400)
        assert (fault["param"], fault["message"]) == ("references", "references is not possible")
    assert (
        error(server.speak("reject x_vector_only_mode", ref_audio=BASE64), 400)["param"]
        == "x_vector_only_mode"
    )


@pytest.fixture(scope="module")
def choir(tmp_path_factory):
    """A server with a model that takes several references."""
    model = msgspec.structs.replace(CLONER, max_references=16, reference_s=(0.1, 30.0))
    with Server(tmp_path_factory.mktemp("s"), models=[model]) as server:
        yield server


def test_several_references_reach_the_engine(choir):
    items = [
        {"audio": BASE64, "text": "a", "speaker": "[S1]"},
        {"ref_audio": SHORT, "text": "b", "speaker": "[S2]"},
    ]
    [first, second], _ = reached(choir, references=items)
    assert first == Reference(CLIP, "a", "[S1]")
    assert (second.transcript, second.speaker, second.clip.duration_s) == ("b", "[S2]", 0.5)
    assert len(reached(choir, references=[{"audio": SHORT}] * 16)[0]) == 16


def test_a_speaker_may_be_a_number(choir):
    [first, second], _ = reached(
        choir, references=[{"audio": SHORT, "speaker": 0}, {"audio": SHORT, "speaker": "1"}]
    )
    assert (first.speaker, second.speaker) == ("0", "1")


def test_the_wrong_one_of_several_references_is_named(choir):
    fault = error(choir.speak("frames 1", references=[{"audio": BASE64}, {"audio": "!"}]), 400)
    assert fault["param"] == "references" and fault["message"].startswith(
        "references[1] cannot be used: it is neither"
    )
    fault = error(choir.speak("frames 1", references=[{"audio": SHORT}] * 2, ref_text="x"), 400)
    assert fault["param"] == "references" and "give each item its own text" in fault["message"]


@pytest.mark.slow
def test_references_that_are_too_large_together_are_refused(choir):
    file = io.BytesIO()
    # 5.5 MiB of samples after decoding, in a very small file.
    soundfile.write(file, np.zeros(30 * 192_000), 192_000, format="FLAC")
    item = {"audio": base64.b64encode(file.getvalue()).decode()}
    assert len(reached(choir, references=[item] * 8)[0]) == 8
    fault = error(choir.speak("frames 1", references=[item] * 9), 400)
    assert fault["param"] == "references" and fault["message"].startswith("references[8] cannot be used")
    assert f"exceed {MAX_CLIP_BYTES >> 20} MiB" in fault["message"]


# References by URL


class Files(BaseHTTPRequestHandler):
    """Answers that a host on the Internet may give."""

    def do_GET(self):
        self.server.hosts.append(self.headers["host"])
        match self.path:
            case "/voice.wav":
                self.answer(200, WAV)
            case "/twice":
                self.answer(302, b"", location="/voice.wav")
            case "/for-ever":
                self.answer(302, b"", location="/for-ever")
            case "/inside":
                self.answer(302, b"", location="http://10.0.0.1/secret")
            case "/file":
                self.answer(302, b"", location="file:///etc/passwd")
            case "/large":
                self.answer(200, bytes(600_000))
            case "/cut":
                self.answer(200, WAV[:1000], content_length=str(len(WAV)))
            case "/page":
                self.answer(200, b"<!doctype html><p>Not here</p>")
            case "/slow":
                self.answer(200, b"", content_length="9")
                while not self.server.going.wait(0.05):
                    self.wfile.write(b"R")
            case "/silent":
                self.server.going.wait(20)
            case _:
                self.answer(404, b"no")

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"content_length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def host():
    """A local host that the tests treat as public."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    server.going, server.hosts = threading.Event(), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.going.set()
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def fetching(tmp_path_factory):
    limits = Limits(reference_bytes=500_000, allows_url_references=True)
    with Server(tmp_path_factory.mktemp("s"), models=[CLONER], limits=limits) as server:
        yield server


@pytest.fixture
def public(monkeypatch):
    monkeypatch.setattr(references, "is_public", lambda address: address == "127.0.0.1")


@pytest.mark.parametrize("path", ["/voice.wav", "/twice"])
def test_a_reference_is_fetched_from_a_url(fetching, host, public, path):
    name = f"localhost:{host.server_port}"
    assert reached(fetching, ref_audio=f"http://{name}{path}", ref_text="x") == ([Reference(CLIP, "x")], None)
    # The Host header has the name, although the connection goes to the checked address.
    assert host.hosts[-1] == name


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/nothing", "status 404"),
        ("/for-ever", "redirects more than 3 times"),
        ("/inside", "not at a public address"),
        ("/file", "must begin with http"),
        ("/large", "more than 500000 bytes"),
        ("/cut", "its URL cannot be fetched"),
        ("/page", "its audio format is not supported"),
        ("/slow", "did not answer within 0.3 s"),
        ("/silent", "did not answer within 0.3 s"),
    ],
)
def test_a_url_without_a_usable_reference_is_refused(fetching, host, public, monkeypatch, path, says):
    monkeypatch.setattr(references, "FETCH_S", 0.3)
    fault = error(fetching.speak("frames 1", ref_audio=f"http://127.0.0.1:{host.server_port}{path}"), 400)
    assert fault["param"] == "ref_audio" and says in fault["message"]


def test_a_disconnect_while_its_reference_is_fetched_cancels_the_request(fetching, host, public):
    before = len(fetching.engine.asked)
    with pytest.raises(httpx.ReadTimeout):
        url = f"http://127.0.0.1:{host.server_port}/silent"
        fetching.http.post("/v1/audio/speech", json={"input": "frames 1", "ref_audio": url}, timeout=0.3)
    until(
        lambda: (
            'zoo_requests_total{model="cloner",outcome="cancelled"} 1.0' in fetching.http.get("/metrics").text
        )
    )
    assert len(fetching.engine.asked) == before


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "0", "2130706433", "[::ffff:127.0.0.1]"])
def test_urls_of_this_machine_are_refused(fetching, host, name):
    before = len(host.hosts)
    fault = error(fetching.speak("frames 1", ref_audio=f"http://{name}:{host.server_port}/voice.wav"), 400)
    assert "not at a public address" in fault["message"] or "cannot be fetched" in fault["message"]
    assert len(host.hosts) == before


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "https://no.such.host.invalid/a.wav", "http://[::1", "http://a:99999/"]
)
def test_invalid_urls_are_refused(fetching, url):
    assert error(fetching.speak("frames 1", ref_audio=url), 400)["param"] == "ref_audio"


PRIVATE = "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1 255.255.255.255 198.18.0.1"
PRIVATE += " ::1 :: fe80::1 fc00::1 ff02::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::7f00:1 2002:7f00:1:: 2001:0:7f00:1::"
PRIVATE += " 2001:db8::1 ::7f00:1"


@pytest.mark.parametrize("address", PRIVATE.split())
def test_private_addresses_are_not_public(address):
    assert not references.is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_public(address):
    assert references.is_public(address)
