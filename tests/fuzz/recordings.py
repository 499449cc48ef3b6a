"""Audio files damaged in every way, sent with a request or uploaded."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable
from functools import cache

import av
import httpx
import numpy as np
import soundfile
from hypothesis import given, seed
from hypothesis import strategies as st

from tests.attack.target import Target
from tests.fuzz.trials import trials

RATE_HZ = 16_000
SOUND = np.random.default_rng(5).uniform(-0.5, 0.5, (RATE_HZ, 1)).astype(np.float32)
WRITTEN = [
    ("WAV", "PCM_16"),
    ("WAV", "PCM_U8"),
    ("WAV", "FLOAT"),
    ("WAV", "IMA_ADPCM"),
    ("RF64", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("MP3", None),
    ("OGG", "VORBIS"),
    ("OGG", "OPUS"),
    ("AIFF", "PCM_16"),
]
RECORDED = [("mp4", "aac"), ("webm", "libopus"), ("matroska", "flac"), ("adts", "aac")]
POSSIBLE = (200, 400, 413, 422)  # statuses that the schema lists for files


@cache
def files() -> list[bytes]:
    """Return a second of noise in each kind of file."""
    found = []
    for kind, subtype in WRITTEN:
        file = io.BytesIO()
        soundfile.write(file, SOUND, RATE_HZ, format=kind, subtype=subtype)
        found.append(file.getvalue())
    for form, codec in RECORDED:
        file = io.BytesIO()
        with av.open(file, "w", format=form) as out:
            stream = out.add_stream(codec, rate=48_000, layout="mono")
            frame = av.AudioFrame.from_ndarray(
                (SOUND.T * 32767).astype(np.int16), format="s16", layout="mono"
            )
            frame.sample_rate, frame.pts = RATE_HZ, 0
            as_taken = av.AudioResampler(stream.codec_context.format, "mono", 48_000)
            for part in [*as_taken.resample(frame), *as_taken.resample(None)]:
                out.mux(stream.encode(part))
            out.mux(stream.encode(None))
        found.append(file.getvalue())
    return found


def cut(data: bytearray, draw: Callable) -> bytearray:
    return data[: draw(st.integers(0, len(data)))]


def flip(data: bytearray, draw: Callable) -> bytearray:
    """Flip bits, most of them in the headers."""
    for _ in range(draw(st.integers(1, 16))):
        end = draw(st.sampled_from([64, 512, len(data)]))
        if data:
            data[draw(st.integers(0, min(end, len(data)) - 1))] ^= 1 << draw(st.integers(0, 7))
    return data


def overwrite(data: bytearray, draw: Callable) -> bytearray:
    """Overwrite four bytes near the start with extreme lengths and counts."""
    at = draw(st.integers(0, max(0, min(200, len(data)) - 1)))
    data[at : at + 4] = draw(
        st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x80", b"\xff\xff\xff\x7f"])
    )
    return data


def insert(data: bytearray, draw: Callable) -> bytearray:
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(max_size=64)) + data[at:]


def repeat(data: bytearray, draw: Callable) -> bytearray:
    at = draw(st.integers(0, len(data)))
    return data[:at] + data[max(0, at - 4096) : at] * draw(st.integers(1, 8)) + data[at:]


def splice(data: bytearray, draw: Callable) -> bytearray:
    """Join the head of one file and the rest of another."""
    other = draw(st.sampled_from(files()))
    return data[: draw(st.integers(0, len(data)))] + other[draw(st.integers(0, len(other))) :]


WAYS = (cut, flip, overwrite, insert, repeat, splice)


@st.composite
def damaged(draw: Callable) -> bytes:
    data = bytearray(draw(st.sampled_from(files())))
    for way in draw(st.lists(st.sampled_from(WAYS), min_size=1, max_size=3)):
        data = way(data, draw)
    return bytes(data)


def fuzz(target: Target, examples: int, start: int) -> Counter[str]:
    """Return requests by route and status. Raises the first failure, shrunk."""
    counts: Counter[str] = Counter()
    cloner = target.models[1]

    @seed(start)
    @trials(examples)
    @given(data=damaged(), way=st.sampled_from(["ref_audio", "references", "upload"]))
    def tried(data: bytes, way: str) -> None:
        if way == "upload":
            answer = uploaded(target, data)
            if answer.status_code == 200:
                count(target.speak(model=cloner, voice="fuzz"), "speech in an uploaded voice", counts)
                assert target.http.delete("/v1/audio/voices/fuzz").status_code == 200
        else:
            text = base64.b64encode(data).decode()
            given: dict[str, object] = (
                {"ref_audio": text} if way == "ref_audio" else {"references": [{"audio": text}]}
            )
            answer = target.speak(model=cloner, x_vector_only_mode=True, **given)
        count(answer, way, counts)

    tried()
    assert (
        all(any(f"{way}: 200" in name for name in counts) for way in ("upload", "ref_audio"))
        or examples < 100
    )
    return counts


def uploaded(target: Target, data: bytes) -> httpx.Response:
    return target.http.post(
        "/v1/audio/voices", data={"name": "fuzz"}, files={"audio_sample": ("a.bin", data, "audio/wav")}
    )


def count(answer: httpx.Response, what: str, counts: Counter[str]) -> None:
    assert answer.status_code in POSSIBLE, f"{what}: {answer.status_code} {answer.text[:500]}"
    if answer.status_code == 200:
        assert answer.content
    else:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"], answer.text
    counts[f"{what}: {answer.status_code}"] += 1
