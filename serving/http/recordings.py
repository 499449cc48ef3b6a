"""Decoded recordings in the HTTP process. Each is held once, however many requests and sessions use it, and
the memory quota counts it for as long as it exists."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from hashlib import blake2b

from serving.http.bodies import read_beside
from serving.http.decode_worker import max_clip_bytes
from serving.http.decoders import Decoders
from serving.http.quota import Quota, Share
from serving.protocol import AudioClip


class Recordings:
    """Decodes files and holds their samples. memory: a quota in bytes. places: a quota of recordings being
    read."""

    def __init__(self, memory: Quota, places: Quota, decoders: Decoders):
        self.memory, self.places, self.decoders = memory, places, decoders
        self._clips: weakref.WeakValueDictionary[bytes, AudioClip] = weakref.WeakValueDictionary()

    async def decode(self, read: Callable[[], bytes], max_s: float) -> AudioClip:
        """Return the samples of the file that `read` returns; it runs in another thread. Raises ValueError,
        and the refusal."""
        with self.places.take(), self.memory.take(max_clip_bytes(max_s)) as share:
            data, key = await read_beside(lambda: with_digest(read()))
            held = self._clips.get(key)
            if held is not None:
                return held
            clip = await self.decoders.decode(data, max_s)
            return self._hold(key, clip, share)

    def hold(self, clip: AudioClip, key: bytes) -> AudioClip:
        """Count a clip, or return the equal one that is held already. key: its `digest`. Raises the
        refusal."""
        held = self._clips.get(key)
        if held is not None:
            return held
        with self.memory.take(len(clip.samples)) as share:
            return self._hold(key, clip, share)

    def _hold(self, key: bytes, clip: AudioClip, share: Share) -> AudioClip:
        """Let the clip take over the share, until it is freed."""
        share.resize(len(clip.samples))
        own = share.hand_over()
        weakref.finalize(clip, own.release).atexit = False
        self._clips[key] = clip
        return clip


def with_digest(data: bytes) -> tuple[bytes, bytes]:
    return data, b"file" + blake2b(data, digest_size=16).digest()


def digest(clip: AudioClip) -> bytes:
    """Return the key of a clip. A minute takes ten milliseconds."""
    found = blake2b(clip.samples, digest_size=16)
    found.update(b"%d" % clip.sample_rate_hz)
    return b"clip" + found.digest()  # unlike the key of any file
