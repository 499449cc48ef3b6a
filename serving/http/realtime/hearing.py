"""The audio that a realtime client sends, until it is a turn of the conversation.

    base64 ─ PCM at 24 kHz, or G.711 at 8 kHz ─ resample ─ 16 kHz ─ buffer ─┬─ commit ─────────> a clip
                                                                            └─ voice detection ─> a clip

Without voice detection the buffer holds everything up to the commit. With it, the buffer holds the speech under way,
or the last `prefix_padding_ms` before any.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr

from serving.audio.pcm import pcm16
from serving.audio.voice_activity import RATE_HZ, VoiceActivity
from serving.http.errors import refusal
from serving.http.realtime.events import G711_HZ, PCM_HZ, Format, Pcm, Pcma, ServerVad

LEAST_S = 0.1  # of a turn
FULL_SCALE = 32767
SAMPLE_BYTES = 2


@dataclass(frozen=True)
class Started:
    """Speech has begun. at_ms: counted from the first audio of the session, the audio before it included."""

    at_ms: int


@dataclass(frozen=True)
class Stopped:
    """Speech has ended. pcm: its samples, int16 at 16 kHz."""

    at_ms: int
    pcm: bytes


class Hearing:
    """The input buffer of a session, of at most max_s seconds. `append` takes about a millisecond for each 32 ms of
    audio with voice detection, so it runs in a thread; calls come one at a time."""

    def __init__(self, max_s: float, format: Format, detection: ServerVad | None):
        self.max_bytes = SAMPLE_BYTES * int(max_s * RATE_HZ)
        self.format = format
        self.detection: ServerVad | None = None
        self.activity: VoiceActivity | None = None
        self._pcm = bytearray()
        self._first = 0  # number of the buffer's first sample in the session
        self._resampler = self._new_resampler()
        self.configure(format, detection)

    def configure(self, format: Format, detection: ServerVad | None) -> None:
        """Take another format or detection from now on. Audio in the buffer stays."""
        if format != self.format:
            self._flush()
            self.format = format
            self._resampler = self._new_resampler()
        if detection != self.detection:
            self.detection = detection
            self.activity = None
            if detection is not None:
                self.activity = VoiceActivity(detection.threshold, detection.silence_duration_ms / 1000)
                self.activity.skip(self._end)

    @property
    def num_bytes(self) -> int:
        return len(self._pcm)

    @property
    def _end(self) -> int:
        """The number of the next sample in the session."""
        return self._first + len(self._pcm) // SAMPLE_BYTES

    def num_added(self, num_bytes: int) -> int:
        """Return about how many bytes the buffer grows by for `num_bytes` bytes of audio."""
        rate_hz, width = (PCM_HZ, SAMPLE_BYTES) if isinstance(self.format, Pcm) else (G711_HZ, 1)
        return num_bytes // width * RATE_HZ // rate_hz * SAMPLE_BYTES

    def append(self, data: bytes) -> list[Started | Stopped]:
        """Add audio in the client's format, and return the turns that begin and end in it. Raises the refusal."""
        if self.activity is None and len(self._pcm) + self.num_added(len(data)) > self.max_bytes:
            longest = f"{self.max_bytes / SAMPLE_BYTES / RATE_HZ:g} s"
            message = f"the input buffer would be longer than {longest}, the limit of this server; commit or clear it"
            raise refusal(400, message, "audio", "input_audio_buffer_full")
        pcm = self._resampled(data)
        if self.activity is None:
            self._pcm += pcm
            return []
        found: list[Started | Stopped] = []
        for begin in range(0, len(pcm), RATE_HZ):  # half a second at a time bounds the buffer
            found += self._judged(pcm[begin : begin + RATE_HZ])
        return found

    def _judged(self, pcm: bytes) -> list[Started | Stopped]:
        assert self.activity is not None and self.detection is not None, "there is no voice detection"
        self._pcm += pcm
        found: list[Started | Stopped] = []
        for edge in self.activity.feed(pcm):
            if edge.is_start:
                padding = self.detection.prefix_padding_ms * RATE_HZ // 1000
                self._drop_before(edge.at - padding)
                found.append(Started(ms(self._first)))
            else:
                found.append(self._stopped(edge.at))
        if self.activity.is_speech and len(self._pcm) >= self.max_bytes:  # the turn ends here, heard or not
            found.append(self._stopped(self._end))
            self.activity.reset()
        if not self.activity.is_speech:
            self._drop_before(self._end - self.detection.prefix_padding_ms * RATE_HZ // 1000)
        return found

    def _stopped(self, at: int) -> Stopped:
        end = SAMPLE_BYTES * (at - self._first)
        pcm = bytes(self._pcm[:end])
        self._drop_before(at)
        return Stopped(ms(at), pcm)

    def _drop_before(self, at: int) -> None:
        num = min(max(at - self._first, 0), len(self._pcm) // SAMPLE_BYTES)
        del self._pcm[: SAMPLE_BYTES * num]
        self._first += num

    def whole(self) -> bytes:
        """Return all audio of the buffer, int16 at 16 kHz, which stays there. Raises the refusal for too little."""
        self._flush()
        if len(self._pcm) < SAMPLE_BYTES * LEAST_S * RATE_HZ:
            has_s = len(self._pcm) / SAMPLE_BYTES / RATE_HZ
            message = f"the input buffer has {has_s:.3g} s of audio; a turn has at least {LEAST_S:g} s"
            raise refusal(400, message, code="input_audio_buffer_commit_empty")
        return bytes(self._pcm)

    def clear(self) -> None:
        self._first = self._end
        self._pcm.clear()
        if self.activity is not None:
            self.activity.reset()

    def close(self) -> None:
        """Free the audio and the network of the voice detection, which takes 3 MB."""
        self._pcm.clear()
        self.activity = None

    def _new_resampler(self) -> soxr.ResampleStream:
        rate_hz = PCM_HZ if isinstance(self.format, Pcm) else G711_HZ
        return soxr.ResampleStream(rate_hz, RATE_HZ, 1, dtype="float32")

    def _resampled(self, data: bytes, is_last: bool = False) -> bytes:
        return pcm16(self._resampler.resample_chunk(samples_of(data, self.format), last=is_last))

    def _flush(self) -> None:
        """Take the last samples out of the resampler. With voice detection they would be silence."""
        if self.activity is None:
            self._pcm += self._resampled(b"", is_last=True)
            self._resampler = self._new_resampler()


def samples_of(data: bytes, format: Format) -> np.ndarray:
    """Return samples [N] float32 in -1 .. 1. Raises the refusal."""
    if isinstance(format, Pcm):
        if len(data) % SAMPLE_BYTES:
            message = f"the audio has {len(data)} bytes; PCM16 has two bytes a sample"
            raise refusal(400, message, "audio", "invalid_audio")
        return np.frombuffer(data, "<i2").astype(np.float32) / FULL_SCALE
    if not data:
        return np.zeros(0, np.float32)
    law = "ALAW" if isinstance(format, Pcma) else "ULAW"
    read = soundfile.read(
        io.BytesIO(data), dtype="float32", format="RAW", subtype=law, samplerate=G711_HZ, channels=1
    )
    samples: np.ndarray = read[0]
    return samples


def clip_of(data: bytes, format: Format) -> bytes:
    """Return a whole recording in the client's format as int16 at 16 kHz. Raises the refusal."""
    rate_hz = PCM_HZ if isinstance(format, Pcm) else G711_HZ
    return pcm16(soxr.resample(samples_of(data, format), rate_hz, RATE_HZ))


def ms(num_samples: int) -> int:
    return num_samples * 1000 // RATE_HZ
