"""The file of an uploaded voice, voice.safetensors. The HTTP process writes it, and the engine reads it.

It has one tensor, `samples` [N] F32: the decoded upload, mono. Its metadata is text: `format` (FORMAT),
`version`, `name`, `created_at` (seconds since 1970), `sample_rate_hz`, and `ref_text` and `consent` if they
were given. `recording` has 32 digits, the samples' `recording_name`; older files lack it. `blake2b` has 32
digits: the digest of the other entries, as lines NAME=VALUE sorted by name, followed by the samples' bytes.
"""

from __future__ import annotations

import io
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import safetensors.numpy

from serving.protocol import AudioClip
from zoo.request import recording_name

VOICE_FILE = "voice.safetensors"
FORMAT, VERSION = "speechzoo.voice", "1"
MAX_HEADER_BYTES = 1 << 20  # ref_text and consent have 4096 characters at most


class StoredVoice(msgspec.Struct):
    """The metadata of a voice."""

    name: str
    created_at: int  # seconds since 1970
    duration_s: float
    ref_text: str | None = None  # the words of the sample; without them, models use only its sound
    consent: str | None = None  # the uploader's proof of the speaker's consent


class Damaged(ValueError):
    """The stored file of a voice is damaged."""


class Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct):
    """A safetensors header. size_bytes: its size, including the eight bytes of the length."""

    samples: Tensor
    metadata: dict[str, str] = msgspec.field(name="__metadata__")
    size_bytes: int = 0

    @property
    def voice(self) -> StoredVoice:
        """The voice that the metadata describes. Raises KeyError, ValueError."""
        facts = self.metadata
        duration_s = round(self.samples.shape[0] / self.sample_rate_hz, 3)
        created_at = int(facts["created_at"])
        return StoredVoice(facts["name"], created_at, duration_s, facts.get("ref_text"), facts.get("consent"))

    @property
    def recording(self) -> bytes:
        """The name of the samples; empty if the file does not tell. Raises ValueError."""
        return bytes.fromhex(self.metadata.get("recording", ""))

    @property
    def sample_rate_hz(self) -> int:
        rate_hz = int(self.metadata["sample_rate_hz"])
        if rate_hz <= 0:
            raise ValueError(f"its sample rate is {rate_hz} Hz")
        return rate_hz


def recording_of(sample: AudioClip) -> bytes:
    return recording_name(np.frombuffer(sample.samples, "<f4"), sample.sample_rate_hz)


def packed(voice: StoredVoice, sample: AudioClip) -> bytes:
    """Return the contents of voice.safetensors."""
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "name": voice.name,
        "created_at": str(voice.created_at),
        "sample_rate_hz": str(sample.sample_rate_hz),
        "ref_text": voice.ref_text,
        "consent": voice.consent,
        "recording": recording_of(sample).hex(),
    }
    metadata = {name: value for name, value in facts.items() if value is not None}
    metadata["blake2b"] = digest(metadata, sample.samples)
    samples = np.frombuffer(sample.samples, "<f4")
    return safetensors.numpy.save({"samples": samples}, metadata)


def unpacked(content: bytes) -> tuple[StoredVoice, AudioClip]:
    """Read the contents of voice.safetensors. Raises Damaged."""
    header = header_of(io.BytesIO(content), len(content))
    samples = content[header.size_bytes :]
    if header.metadata.get("blake2b") != digest(header.metadata, samples):
        raise Damaged(f"the checksum of {VOICE_FILE} is wrong")
    return header.voice, AudioClip(samples, header.sample_rate_hz)


def header_of(file: BinaryIO, size_bytes: int) -> Header:
    """Read the header of a file of size_bytes. Raises Damaged."""
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        header = msgspec.json.decode(file.read(length), type=Header)
        header.size_bytes = 8 + length
        _ = header.voice, header.recording
    except (KeyError, ValueError) as error:  # msgspec's are ValueErrors
        raise Damaged(f"{VOICE_FILE} has no valid header: {error}") from None
    form, version = header.metadata.get("format"), header.metadata.get("version")
    if (form, version) != (FORMAT, VERSION):
        raise Damaged(f"{VOICE_FILE} has the format {form} {version}, not {FORMAT} {VERSION}")
    num_bytes = 4 * header.samples.shape[0]
    if header.samples.dtype != "F32" or header.samples.data_offsets != (0, num_bytes):
        raise Damaged(f"the samples of {VOICE_FILE} are not [N] F32")
    if num_bytes == 0 or size_bytes != header.size_bytes + num_bytes:
        raise Damaged(f"{VOICE_FILE} has {size_bytes} bytes instead of {header.size_bytes + num_bytes}")
    return header


def digest(metadata: dict[str, str], samples: bytes) -> str:
    lines = [f"{name}={value}\n" for name, value in sorted(metadata.items()) if name != "blake2b"]
    found = blake2b("".join(lines).encode(), digest_size=16)
    found.update(samples)
    return found.hexdigest()


def read(directory: Path) -> tuple[StoredVoice, AudioClip]:
    """Return the voice in a directory. Raises Damaged, OSError."""
    return unpacked((directory / VOICE_FILE).read_bytes())
