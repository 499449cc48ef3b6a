"""Which replica speaks soonest. Pure arithmetic over what each engine last reported.

    first audio of a request = what the engine predicts for as many open requests as the replica has now
                             + what the replica must do again because it does not know the voice

A conversation goes to the replica that remembers it. One that is new to this gateway goes to the replica that
its name picks, so that all gateways agree.

The prediction follows from the costs that the engine's admission has learned. It is a function of the number
of open requests, which the gateway counts itself. A report is up to a second old. A prediction for the
requests of that time would send all requests of a second to one replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from serving.protocol import ModelStats, Reference, Speak, StoredClip

# Seconds that a replica saves if it knows a voice: its prompt is filled, and its recording is encoded.
KNOWN_VOICE_SAVES_S = 0.005
KNOWN_RECORDING_SAVES_S = 0.05
UNKNOWN_S = (
    0.05  # first audio that a request takes from the next one, before an engine has predicted anything
)
MAX_KNOWN = 512  # voices of a replica: about what its prefix cache keeps
MAX_HOMES = 65_536  # conversations; a replica remembers fewer
HASHED_BYTES = 64 << 10  # of a recording, so that a minute of audio takes no time


@dataclass(frozen=True)
class Ask:
    """A request as routing sees it. avoided: replicas that have refused it or were lost with it. home: the
    replica that remembers its conversation."""

    model: str
    id: str = ""
    voice: str = ""  # equal for requests that share pages; "": none do
    saved_s: float = 0.0  # by a replica that knows the voice
    avoided: frozenset[str] = frozenset()
    conversation: str = ""  # "": none
    home: str = ""


@dataclass
class Load:
    """A replica as the gateway sees it. models: the engine's latest report. num_open: requests of this
    gateway that it works on. num_others: those of other gateways, at the time of the report."""

    is_ready: bool = False
    models: dict[str, ModelStats] = field(default_factory=dict)
    num_open: int = 0
    num_others: int = 0
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def report(self, models: dict[str, ModelStats]) -> None:
        """Take the figures of the engine, which have just arrived."""
        self.models = models
        self.num_others = max(sum(map(num_open, models.values())) - self.num_open, 0)

    def learn(self, voice: str) -> None:
        """Note that the replica speaks with a voice. The oldest ones are forgotten."""
        if voice:
            self.known[voice] = None
            self.known.move_to_end(voice)
        while len(self.known) > MAX_KNOWN:
            self.known.popitem(last=False)

    def first_audio_s(self, ask: Ask) -> float:
        """Return the predicted seconds to a request's first audio."""
        is_known = not ask.voice or ask.voice in self.known
        learns_s = 0.0 if is_known else ask.saved_s
        return learns_s + predicted_s(self.models.get(ask.model), self.num_open + self.num_others)


class Homes:
    """The replicas that remember conversations, which are those that spoke last in them."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, str] = OrderedDict()

    def fill(self, ask: Ask) -> Ask:
        """Return the request with its home."""
        return replace(ask, home=self._homes.get(ask.conversation, ""))

    def learn(self, conversation: str, name: str) -> None:
        """Note where a conversation goes on. The oldest ones are forgotten, as replicas forget them
        sooner."""
        if conversation:
            self._homes[conversation] = name
            self._homes.move_to_end(conversation)
        while len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)


def num_open(model: ModelStats) -> int:
    return model.running + model.waiting + model.preparing


def predicted_s(model: ModelStats | None, num: int) -> float:
    """Return the predicted first audio of a request that finds `num` others."""
    if model is None or not model.expected_first_audio_s:
        return UNKNOWN_S * num
    alone_s, last_s, full_s = model.expected_first_audio_s
    if num < model.places:
        return alone_s + (last_s - alone_s) * num / max(model.places - 1, 1)
    return last_s + (full_s - last_s) * (num - model.places + 1) / model.places


def ranked(ask: Ask, loads: Iterable[tuple[str, Load]]) -> list[str]:
    """Return the names of the ready replicas that the request may go to, the soonest first. Between equals,
    the one with the fewest requests. A conversation continues on the replica that remembers it, as long as
    that one is ready."""
    ready = {name: load for name, load in loads if load.is_ready}
    possible = [
        name for name in ready if name not in ask.avoided and (ask.home not in ready or name == ask.home)
    ]
    if ask.conversation:
        return sorted(possible, key=lambda name: digest(f"{ask.conversation} {name}".encode()))
    return sorted(possible, key=lambda name: (ready[name].first_audio_s(ask), ready[name].num_open))


def ask_of(message: Speak, avoided: Collection[str]) -> Ask:
    """Return a request as routing sees it."""
    voice, saved_s = message.request.voice or "", KNOWN_VOICE_SAVES_S
    if message.references:
        voice, saved_s = " ".join(map(name_of, message.references)), KNOWN_RECORDING_SAVES_S
    key = f"{message.model} {voice}" if voice else ""
    conversation = message.request.conversation or ""
    return Ask(message.model, message.id, key, saved_s, frozenset(avoided), conversation)


def name_of(reference: Reference) -> str:
    """Return where a recording is stored, or what it sounds like."""
    if isinstance(reference.clip, StoredClip):
        return reference.clip.directory
    samples = reference.clip.samples
    return f"{digest(samples[:HASHED_BYTES])}-{len(samples)}"


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
