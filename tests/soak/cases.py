"""The distinct requests of a soak. Each has a fixed seed, and its first answer is recorded before the
load."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.clones import recording
from serving.tools.load.plan import SENTENCES

SHORT = "Good morning, everybody who is here today."
LONG = " ".join(SENTENCES[:6])
SHORT_S, LONG_S = 1.0, 6.0  # of speech
REFERENCE_S = 2.0
TRANSCRIPT = "A recording."
KEPT = ("kept-0", "kept-1")  # uploaded voices that stay
NEED_WORDS = ("csm", "orpheus")  # families that clone no recording without its transcript
LATENT_FAMILIES = (
    "voxcpm2",
)  # equal requests may differ by one step of 16 bits, because rows share products


@dataclass(frozen=True)
class Case:
    """A request. `first` is the file that the server sent at first with `"stream": false`.

    has_kept_voice: it speaks in an uploaded voice. has_times: the model gives times of pieces. session: the
    settings of a WebSocket session that says the same, or None if a session may say something else."""

    name: str
    body: dict[str, Any]
    is_exact: bool
    is_long: bool = False
    has_kept_voice: bool = False
    has_times: bool = True
    session: dict[str, Any] | None = None
    first: bytes = b""

    @property
    def form(self) -> str:
        return str(self.body["response_format"])


def upload_kept(client: httpx.Client) -> None:
    for index, name in enumerate(KEPT):
        voice = {"name": name, "ref_text": TRANSCRIPT}
        answer = client.post("/v1/audio/voices", data=voice, files={"audio_sample": sample(index)})
        assert answer.status_code == 200, answer.text


def sample(index: int) -> tuple[str, bytes]:
    """Return the recording of a kept voice as a file for an upload."""
    return "voice.wav", base64.b64decode(recording(index, REFERENCE_S).partition(",")[2])


def record(client: httpx.Client) -> list[Case]:
    """Upload the kept voices, and return every case with its first answer. Models that answer, unless they
    also perform a text, have questions instead (conversations.py)."""
    upload_kept(client)
    found = []
    for model in client.get("/v1/models").json()["data"]:
        for case in cases_of(model) if speaks(model) else ():
            answer = client.post("/v1/audio/speech", json=case.body | {"stream": False})
            assert answer.status_code == 200, f"{case.name}: {answer.text}"
            found.append(Case(**vars(case) | {"first": answer.content}))
    return found


def speaks(model: dict[str, Any]) -> bool:
    """Return whether a model takes the speech routes."""
    return model["performs"] or not model["answers"]


def cases_of(model: dict[str, Any]) -> Iterator[Case]:
    is_exact = model["family"] not in LATENT_FAMILIES
    for index, (name, form, fields) in enumerate(requests_of(model)):
        is_long = name == "long"
        speech_s = min(LONG_S, model["max_audio_s"] / 2) if is_long else SHORT_S
        body = {
            "model": model["id"],
            "input": LONG if is_long else SHORT,
            "response_format": form,
            "seed": 100 + index,
            "max_new_tokens": round(speech_s * model["frame_rate_hz"]),
            **fields,
        }
        yield Case(
            f"{model['id']} {name}",
            body,
            is_exact,
            is_long,
            has_kept_voice=fields.get("voice") in KEPT,
            has_times="segment" in model["timestamp_granularities"],
            session=session_of(model, name, body),
        )


def requests_of(model: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, format and further fields of a model's cases, in every way to choose a voice."""
    modes, options = set(model["modes"]), {option["name"] for option in model["options"]}
    clone = {"ref_audio": recording(5, REFERENCE_S), "ref_text": TRANSCRIPT}
    usual = {"voice": model["voices"][0]} if "voice" in modes else clone if "clone" in modes else {}
    yield "plain", "pcm", usual
    yield "long", "pcm", usual | {"sample_rate": 48000}
    yield "sampled", "wav", usual | {"speed": 1.25, **sampling(options)}
    yield "mp3", "mp3", usual
    if {"instruct", "design"} & modes:
        yield "instructed", "flac", usual | {"instructions": "Speak slowly."}
    if "text_mode" in options:
        yield "text in portions", "pcm", usual | {"text_mode": "interleaved"}
    if model["mixes"] and len(model["voices"]) > 1:
        yield "mixed", "aac", {"voice": f"{model['voices'][0]}(2)+{model['voices'][1]}(1)"}
    if "clone" in modes:
        without = {"x_vector_only_mode": True} if "x_vector_only_mode" in options else {}
        yield "cloned", "opus", clone
        if model["family"] not in NEED_WORDS:
            yield "cloned without words", "pcm", {"ref_audio": clone["ref_audio"], **without}
        yield "uploaded", "pcm", {"voice": KEPT[0], **without}
        yield "uploaded, AAC", "aac", {"voice": KEPT[1], **without}


def sampling(options: set[str]) -> dict[str, Any]:
    given = {"temperature": 0.8, "top_p": 0.9, "cfg_scale": 2.5}
    return {name: value for name, value in given.items() if name in options}


def session_of(model: dict[str, Any], name: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a session that says the same as the request.

    Models that read tokens say the same as in `interleaved`; the others speak one sentence as one text."""
    fits = name == "text in portions" if model["feeds"] else name in ("plain", "uploaded")
    return {key: body[key] for key in body if key not in ("input", "text_mode")} if fits else None


def speakable(cases: Sequence[Case], *, is_long: bool = False) -> list[Case]:
    return [case for case in cases if case.is_long == is_long]
