"""The recordings of a voice, from uploaded voices or from the request.

Decoding takes milliseconds and fetching takes longer, so neither delays the event loop. The engine gets
samples.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from serving.http import reference_files
from serving.http.bodies import read_beside
from serving.http.decoders import Decoders
from serving.http.errors import refusal
from serving.http.objects import Model
from serving.http.quota import Quota
from serving.http.recordings import Recordings
from serving.http.reference_files import is_path
from serving.http.schemas import GivenReference, SpeechRequest
from serving.http.voice_choice import VoiceChoice, VoiceChooser
from serving.protocol import MAX_CLIP_BYTES, AudioClip, Reference, StoredClip
from serving.settings import Limits
from serving.voice_file import Damaged
from zoo.request import SOUND_ONLY

FETCH_S = 10.0
MAX_REDIRECTS = 3
PIECE_CHARS = 1 << 18  # of base64, decoded in one call: it keeps other threads waiting for half a millisecond
UNICAST = ipaddress.ip_network("2000::/3")


@dataclass(frozen=True)
class LoadedVoice:
    """A voice as the engine takes it.

    name: a voice of the model or a mix, which the engine looks up. references: its recordings; those of a mix
    have names. is_sound_only: whether the model uses the sound of the recording and not its words, unless the
    request says otherwise.
    """

    name: str | None
    references: list[Reference]
    is_sound_only: bool = False


class References:
    """Finds the recordings of voices. It holds processes and an HTTP client, so call `close` at the end.
    memory: the quota in bytes."""

    def __init__(self, chooser: VoiceChooser, limits: Limits, memory: Quota):
        self.chooser = chooser
        self.limits = limits
        self.fetching = Quota(limits.reading, "recordings are being fetched")
        self.decoding = Quota(limits.reading, "recordings are being decoded")
        self.decoders = Decoders()
        self.recordings = Recordings(memory, self.decoding, self.decoders)
        self._client: httpx.AsyncClient | None = None
        if limits.allows_url_references:
            # Connections go to an IP address and are not kept: the next URL at that address may be another
            # host's.
            self._client = httpx.AsyncClient(
                trust_env=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=FETCH_S
            )

    async def close(self) -> None:
        await self.decoders.close()
        if self._client is not None:
            await self._client.aclose()

    async def find(self, voice: VoiceChoice, request: SpeechRequest, model: Model) -> LoadedVoice:
        """Return a voice as the engine takes it. Raises the refusal."""
        if voice.is_mix:
            return LoadedVoice(voice.name, await self._mixed(voice, model))
        if voice.uploaded:
            [name] = voice.uploaded
            reference = await self._uploaded(name, model)
            is_sound_only = reference.transcript is None and SOUND_ONLY in model.option_names
            return LoadedVoice(None, [reference], is_sound_only)
        return LoadedVoice(voice.name, await self._given(voice, request.given_references, model))

    async def _given(
        self, voice: VoiceChoice, recordings: list[GivenReference], model: Model
    ) -> list[Reference]:
        """Decode the recordings in a request."""
        found: list[Reference] = []
        for i, given in enumerate(recordings):
            name = voice.field if len(recordings) == 1 else f"references[{i}]"
            room = MAX_CLIP_BYTES - sum(reference.clip.num_bytes for reference in found)
            try:
                clip = await self._clip(given.audio, model)
                if len(clip.samples) > room:
                    raise ValueError(
                        f"all references together exceed {MAX_CLIP_BYTES >> 20} MiB of float32 samples"
                    )
            except ValueError as error:
                raise refusal(400, f"{name} cannot be used: {error}", voice.field) from None
            found.append(Reference(clip, given.text, given.speaker))
        return found

    async def _mixed(self, voice: VoiceChoice, model: Model) -> list[Reference]:
        """Load the uploaded voices of a mix, each with its name."""
        found: list[Reference] = []
        for name in voice.uploaded:
            reference = await self._uploaded(name, model)
            reference.name = name
            found.append(reference)
            if sum(reference.clip.num_bytes for reference in found) > MAX_CLIP_BYTES:
                message = f"the recordings of {voice.name!r} exceed {MAX_CLIP_BYTES >> 20} MiB of float32 samples; mix fewer voices"
                raise refusal(400, message, "voice")
        return found

    async def _uploaded(self, voice: str, model: Model) -> Reference:
        try:
            found = await read_beside(self.chooser.voices.find, voice)
        except Damaged as error:
            raise refusal(400, str(error), "voice", "voice_damaged") from None
        if found is None:  # removed since it was chosen
            raise self.chooser.no_voice(voice, model)
        stored, clip = found
        try:
            check_duration(clip, taken_s(model))
            if model.needs_transcript and stored.ref_text is None:
                raise ValueError("the model needs the words of the recording; upload it again with ref_text")
        except ValueError as error:
            raise refusal(
                400, f"{voice!r} cannot be used with model {model.id!r}: {error}", "voice"
            ) from None
        return Reference(clip, stored.ref_text)

    async def _clip(self, audio: str, model: Model) -> AudioClip:
        """Raises ValueError."""
        if is_url(audio):
            with self.fetching.take():
                data = await self._fetch(audio)
            return await self.decoded(lambda: data, taken_s(model))
        read = self._read if is_path(audio) else unpack
        return await self.decoded(lambda: read(audio, self.limits.reference_bytes), taken_s(model))

    def _read(self, path: str, max_bytes: int) -> bytes:
        """Raises ValueError."""
        return reference_files.read(path, self.limits.reference_dir, max_bytes)

    async def decoded(self, read: Callable[[], bytes], possible_s: tuple[float, float]) -> AudioClip:
        """Decode the file that `read` returns. Raises ValueError, and the refusal."""
        clip = await self.recordings.decode(read, possible_s[1])
        check_duration(clip, possible_s)
        return clip

    async def _fetch(self, url: str) -> bytes:
        """Raises ValueError."""
        if self._client is None:
            raise ValueError(
                "this server does not fetch URLs (it was started without --allow-url-references); "
                "send a data URL or base64"
            )
        return await fetch(self._client, url, self.limits.reference_bytes)


def is_url(audio: str) -> bool:
    return audio[:8].lower().startswith(("http://", "https://"))


def taken_s(model: Model) -> tuple[float, float]:
    """Return the shortest and the longest reference of a model that takes references."""
    assert model.reference_s is not None, f"model {model.id!r} takes no references"
    return model.reference_s


def check_duration(clip: AudioClip | StoredClip, possible_s: tuple[float, float]) -> None:
    """Raises ValueError."""
    shortest_s, longest_s = possible_s
    if not shortest_s <= clip.duration_s <= longest_s:
        raise ValueError(f"it lasts {clip.duration_s:.4g} s; it must last {shortest_s:g} to {longest_s:g} s")


def unpack(text: str, max_bytes: int) -> bytes:
    """Decode a base64 data URL or bare base64. Raises ValueError."""
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise ValueError("the data URL must have the form data:audio/wav;base64,...")
    if "\n" in text:
        text = without_breaks(text)
    if len(text) > (max_bytes + 2) // 3 * 4:
        raise ValueError(f"it has about {len(text) * 3 // 4} bytes; this server takes up to {max_bytes}")
    try:
        pieces = range(0, len(text), PIECE_CHARS)
        return b"".join(from_base64(text[at : at + PIECE_CHARS]) for at in pieces)
    except ValueError:
        raise ValueError("it is neither a data URL nor base64") from None


def from_base64(text: str) -> bytes:
    """Decode base64, also without the padding at its end. Raises ValueError."""
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def without_breaks(text: str) -> str:
    """Return base64 without the line breaks that the command `base64` puts into it."""
    pieces = (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))
    return "".join("".join(piece.split()) for piece in pieces)


async def fetch(client: httpx.AsyncClient, url: str, max_bytes: int) -> bytes:
    """Download from a URL at a public address. Raises ValueError for any problem; its message reveals
    nothing about the network of this server."""
    try:
        async with asyncio.timeout(FETCH_S):
            target = httpx.URL(url)
            for _ in range(MAX_REDIRECTS + 1):
                request = await aim(client, target)
                response = await client.send(request, stream=True)
                try:
                    if not response.has_redirect_location:
                        return await receive(response, max_bytes)
                    target = target.join(response.headers["location"])
                finally:
                    await response.aclose()
    except TimeoutError:
        raise ValueError(f"its URL did not answer within {FETCH_S:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError):
        raise ValueError("its URL cannot be fetched") from None
    raise ValueError(f"its URL redirects more than {MAX_REDIRECTS} times")


async def receive(response: httpx.Response, max_bytes: int) -> bytes:
    if response.status_code != 200:
        raise ValueError(f"its URL answered with status {response.status_code}")
    data = bytearray()
    async for chunk in response.aiter_raw():  # not decompressed: a small body could expand to any size
        data += chunk
        if len(data) > max_bytes:
            raise ValueError(f"its URL has more than {max_bytes} bytes, the limit of this server")
    return bytes(data)


async def aim(client: httpx.AsyncClient, url: httpx.URL) -> httpx.Request:
    """Build a request to the IP address that was checked: a second lookup of the name could give another
    address. Raises ValueError, OSError."""
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError("its URL must begin with http:// or https:// and a host")
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    addresses = [str(address[4][0]) for address in found]
    if not all(map(is_public, addresses)):
        raise ValueError("its URL is not at a public address")
    headers = {"host": url.netloc.decode(), "accept-encoding": "identity"}
    return client.build_request(
        "GET", url.copy_with(host=addresses[0]), headers=headers, extensions={"sni_hostname": url.host}
    )


def is_public(address: str) -> bool:
    """Whether an IP address is public and does not lead to a private one."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip not in UNICAST or ip.sixtofour is not None or ip.teredo is not None:
            return False
    return ip.is_global and not ip.is_multicast
