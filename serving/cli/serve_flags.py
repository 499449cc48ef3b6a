"""The flags of `zoo serve`: a group for each panel of its help. Each group returns its settings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from serving import settings
from serving.api_keys import all_keys
from serving.cli.common import (
    LATENCY,
    LOGS,
    MEMORY,
    MODEL,
    REPLICAS,
    SECURITY,
    Attention,
    Chunked,
    Codec,
    Compile,
    Depth,
    Device,
    DeviceMap,
    DType,
    KVMemory,
    MaxSlots,
    VoicesDir,
    Weights,
    directory_path,
    num_bytes,
)
from zoo.align.files import check
from zoo.request import MAX_GAP_S
from zoo.text.pronunciations import read_file

MAX_TTFA_S = 10.0
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")
HOST_NAME = re.compile(r"[^\s/:?#@*]+")
RAY_ADDRESS = re.compile(r"auto|\S+:\d{1,5}")
MIN_HTTP_MEMORY = "12MiB"  # a recording of 60 s and 48 kHz


@dataclass(frozen=True)
class Listening:
    """Flags for the address, the web page, the stored voices and the grace period."""

    host: Annotated[
        str, Option(help="The server listens on this address. 0.0.0.0 means every interface.")
    ] = "127.0.0.1"
    port: Annotated[
        int, Option(min=0, max=65535, help="The server listens on this port. 0 picks a free one.")
    ] = 8000
    playground: Annotated[
        bool, Option(help="The server shows a web page at / where you can try the models.")
    ] = True
    voices_dir: VoicesDir = None
    grace_s: Annotated[
        int, Option(min=0, help="When the server stops, open answers have this many seconds to finish.")
    ] = 5


@dataclass(frozen=True)
class Model:
    """Flags for the models, and for the names that clients may use."""

    device: Device = None
    dtype: DType = None
    device_map: DeviceMap = None
    weights: Weights = "published"
    chunked: Chunked = False
    codec: Codec = "float32"
    attention: Attention = "auto"
    depth: Depth = "layers"
    deterministic: Annotated[
        bool,
        Option(
            "--deterministic",
            help="Equal requests give equal bytes under any load. The server is slower with few streams.",
            rich_help_panel=MODEL,
        ),
    ] = False
    compile: Compile = True
    warm: Annotated[
        bool,
        Option(
            help="The server runs every batch shape before it accepts requests. With --no-warm, the first request of "
            "each shape waits.",
            rich_help_panel=MODEL,
        ),
    ] = True
    cache_dir: Annotated[
        Path | None,
        Option(
            parser=directory_path,
            metavar="DIR",
            help="The server keeps compiled code in this directory. Default: ZOO_CACHE_DIR, else "
            "~/.cache/speechzoo.",
            rich_help_panel=MODEL,
        ),
    ] = None
    aliases: Annotated[
        list[str],
        Option(
            "--alias",
            metavar="NAME=MODEL",
            help="Clients can also request the served model MODEL as NAME. May be repeated.",
            rich_help_panel=MODEL,
        ),
    ] = field(default_factory=list)
    voice_aliases: Annotated[
        list[str],
        Option(
            "--alias-voice",
            metavar="NAME=VOICE",
            help="Clients can also request VOICE, preset or uploaded, as NAME. May be repeated.",
            rich_help_panel=MODEL,
        ),
    ] = field(default_factory=list)
    strict: Annotated[
        bool,
        Option(
            "--strict",
            help="The server refuses OpenAI's names (tts-1, alloy, ...) and fields of other servers. Otherwise these "
            "names stand for its only model of that kind and its first voice, it ignores these fields, and a header "
            "x-warning says so.",
            rich_help_panel=MODEL,
        ),
    ] = False
    pronunciations: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="This JSON file says how terms are spoken, in all requests.",
            rich_help_panel=MODEL,
        ),
    ] = None

    sentence_gap_s: Annotated[
        float | None,
        Option(
            min=0,
            max=MAX_GAP_S,
            help="Between sentences there are this many seconds of silence, in requests that do not set it.",
            rich_help_panel=MODEL,
        ),
    ] = None
    aligner: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="This CTC model finds word times for requests that ask for them. DIR is a directory of transformers' "
            "Wav2Vec2ForCTC or HubertForCTC.",
            rich_help_panel=MODEL,
        ),
    ] = None
    aligner_device: Annotated[
        str | None,
        Option(
            help="The aligner runs on this device: cpu, cuda or cuda:N. Default: cpu.", rich_help_panel=MODEL
        ),
    ] = None

    def aligner_settings(self) -> settings.AlignerSettings:
        """Raises ValueError if a directory holds no aligner, and for a device without one."""
        if self.aligner is None:
            if self.aligner_device is not None:
                raise ValueError("--aligner-device needs --aligner")
            return settings.AlignerSettings()
        directory = check(self.aligner).directory.resolve()
        return settings.AlignerSettings(str(directory), self.aligner_device or "cpu")

    def options(self) -> settings.ModelOptions:
        return settings.ModelOptions(
            self.device,
            self.dtype,
            self.device_map,
            self.weights,
            self.chunked,
            self.codec,
            self.attention,
            self.depth,
            self.deterministic,
            self.compile,
            self.warm,
        )

    def pronunciations_path(self) -> str | None:
        """Return the path of a valid file of pronunciations. Raises ValueError."""
        if self.pronunciations is None:
            return None
        read_file(self.pronunciations)
        return str(self.pronunciations.resolve())

    def names(self, served: Iterable[str], repositories: Mapping[str, str] = {}) -> settings.Aliases:
        """Return the aliases of the served models and of voices. repositories: the model of each repository
        of the Hub. Raises ValueError."""
        voices = aliases_of("--alias-voice", "NAME=VOICE", self.voice_aliases)
        models = {**repositories, **model_aliases(self.aliases, served)}
        return settings.Aliases(models, voices, self.strict)


@dataclass(frozen=True)
class Memory:
    """Flags for the memory of both processes."""

    max_slots: MaxSlots = None
    kv_memory: KVMemory = None
    swap_memory: Annotated[
        str | None,
        Option(
            help="Paused streams keep their KV cache in this much host memory (4GiB or bytes). With 0 the server pauses "
            "none, and each request reserves all memory that it can need. Default: five times --kv-memory, at most a "
            "quarter of host memory.",
            rich_help_panel=MEMORY,
        ),
    ] = None
    reference_memory: Annotated[
        str,
        Option(
            help="Recordings that wait to be encoded use at most this much memory (256MiB or bytes). Further "
            "ones get 503.",
            rich_help_panel=MEMORY,
        ),
    ] = "256MiB"
    http_memory: Annotated[
        str,
        Option(
            help="Recordings and whole answers use at most this much memory in the HTTP process (1GiB or bytes). "
            "Further ones get 503.",
            rich_help_panel=MEMORY,
        ),
    ] = "1GiB"

    def http_memory_bytes(self) -> int:
        """Raises ValueError if it would refuse every recording."""
        given = num_bytes(self.http_memory)
        if given < num_bytes(MIN_HTTP_MEMORY):
            raise ValueError(
                f"--http-memory {self.http_memory} holds no recording; give {MIN_HTTP_MEMORY} or more"
            )
        return given

    def settings(self) -> settings.Memory:
        """Raises ValueError."""
        return settings.Memory(
            max_slots=self.max_slots,
            kv_memory_bytes=None if self.kv_memory is None else num_bytes(self.kv_memory),
            swap_memory_bytes=swap_bytes(self.swap_memory),
            reference_memory_bytes=num_bytes(self.reference_memory),
        )


@dataclass(frozen=True)
class Latency:
    """Flags for the order of requests, and for refusing late ones."""

    policy: Annotated[
        Literal["streaming", "throughput", "fifo"],
        Option(
            help="streaming gives the earliest first audio, and throughput the most audio per second. fifo ignores "
            "deadlines, for comparisons.",
            rich_help_panel=LATENCY,
        ),
    ] = "streaming"
    max_ttfa: Annotated[
        float | None,
        Option(
            min=0,
            help="Requests that would wait longer than this many seconds for first audio get 503, and streams beyond "
            "real-time capacity wait. 0 turns both off. Default: 10, or 0 with --policy throughput.",
            rich_help_panel=LATENCY,
        ),
    ] = None
    run_async: Annotated[
        bool,
        Option(
            "--async/--no-async",
            help="On a GPU, the server launches the next step before it reads the results of the last one.",
            rich_help_panel=LATENCY,
        ),
    ] = True

    def settings(self) -> settings.Latency:
        max_ttfa_s = self.max_ttfa
        if max_ttfa_s is None:
            max_ttfa_s = 0.0 if self.policy == "throughput" else MAX_TTFA_S
        return settings.Latency(self.policy, max_ttfa_s or None, self.run_async)


@dataclass(frozen=True)
class Security:
    """Flags for the API key and for requests from other hosts and sites."""

    api_key: Annotated[
        str | None,
        Option(
            envvar="ZOO_API_KEY",
            help="Clients must send this key (Authorization: Bearer KEY).",
            rich_help_panel=SECURITY,
        ),
    ] = None
    api_keys: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Clients must send one of the keys in this JSON file. Each has a name, and may have a rate and quotas.",
            rich_help_panel=SECURITY,
        ),
    ] = None
    speech_urls: Annotated[
        bool,
        Option(
            "--speech-urls",
            help="GET /v1/audio/speech speaks the text in a signed URL, for an audio element. POST "
            "/v1/audio/speech/url signs URLs, with the secret ZOO_URL_SECRET or a new one at each start.",
            rich_help_panel=SECURITY,
        ),
    ] = False
    private_metrics: Annotated[
        bool,
        Option("--private-metrics", help="/metrics requires the API key too.", rich_help_panel=SECURITY),
    ] = False
    allow_url_references: Annotated[
        bool,
        Option(
            help="The server fetches reference audio from URLs that clients send, from public addresses "
            "only.",
            rich_help_panel=SECURITY,
        ),
    ] = False
    reference_dir: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="Clients may name recordings in this directory by their path.",
            rich_help_panel=SECURITY,
        ),
    ] = None
    cors_origins: Annotated[
        list[str],
        Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Web pages of this origin may use the server. May be repeated.",
            rich_help_panel=SECURITY,
        ),
    ] = field(default_factory=list)
    allowed_hosts: Annotated[
        list[str],
        Option(
            "--allowed-host",
            metavar="NAME",
            help="The server answers requests for this host name, too, and not only for localhost and IP addresses. * "
            "means any name. May be repeated. Default: any name on an open address with an API key.",
            rich_help_panel=SECURITY,
        ),
    ] = field(default_factory=list)

    def settings(self) -> settings.Security:
        """Raises ValueError for a key that cannot be one, or that is missing, and for a site or a host name that no
        request has."""
        origins = tuple(origin.lower() for origin in self.cors_origins)  # as browsers send it
        hosts = tuple(host.lower() for host in self.allowed_hosts)
        for origin in origins:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"--cors-origin {origin!r} is not an origin; use https://HOST or https://HOST:PORT, "
                    "without a path, or *"
                )
        for host in hosts:
            if host != "*" and not HOST_NAME.fullmatch(host):
                raise ValueError(
                    f"--allowed-host {host!r} is not a host name; use a name such as zoo.example.com, without a "
                    "scheme or a port, or *"
                )
        all_keys(self.api_key, self.api_keys)
        if self.private_metrics and self.api_key is None and self.api_keys is None:
            raise ValueError("--private-metrics requires an API key; set one with --api-key or --api-keys")
        if self.api_key is None and "ZOO_API_KEY" in os.environ:
            raise ValueError(
                "ZOO_API_KEY is empty, which would let every client in; set it to a key, or unset it"
            )
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise ValueError("an API key must consist of printable ASCII characters without spaces")
        return settings.Security(
            self.private_metrics,
            origins,
            hosts,
            None if self.api_keys is None else str(self.api_keys.resolve()),
            self.speech_urls,
        )


@dataclass(frozen=True)
class Replicas:
    """Flags for several engines on a Ray cluster."""

    replicas: Annotated[
        str,
        Option(
            metavar="N|MIN-MAX|auto",
            help="This many engines run on a Ray cluster, each on a separate GPU. With a range, their number follows the "
            "load. auto is a range from 1 to the number of GPUs. 0 waits for replicas that another server starts in the "
            "cluster. All but 1 need the extra `ray`.",
            rich_help_panel=REPLICAS,
        ),
    ] = "1"
    ray_address: Annotated[
        str | None,
        Option(
            metavar="HOST:PORT|auto",
            help="The server joins this Ray cluster, and uses the replicas that run there. auto is the cluster of "
            "this machine. Default: the server starts a cluster for its replicas.",
            rich_help_panel=REPLICAS,
            show_default=False,
        ),
    ] = None

    def settings(self) -> settings.Replicas:
        """Raises ValueError."""
        counts = bounds_of(self.replicas)
        if self.ray_address is not None and not RAY_ADDRESS.fullmatch(self.ray_address):
            raise ValueError(
                f"--ray-address {self.ray_address!r} is not the address of a cluster; use HOST:PORT, such as "
                "10.0.0.1:6379, or auto"
            )
        if counts == (0, 0) and self.ray_address is None:
            raise ValueError("--replicas 0 uses the replicas of a Ray cluster; name it with --ray-address")
        return settings.Replicas(counts, self.ray_address)

    def check(self) -> None:
        """Raises ValueError if Ray is needed and not installed."""
        if self.settings().are_on_ray and find_spec("ray") is None:
            raise ValueError("--replicas and --ray-address need Ray: pip install -e '.[ray]'")


@dataclass(frozen=True)
class Logs:
    """Flags for the log, the status line and traces."""

    log: Annotated[
        Literal["json", "text"] | None,
        Option(
            envvar="ZOO_LOG",
            help="Log lines are JSON objects or text. Default: text on a terminal, JSON elsewhere.",
            rich_help_panel=LOGS,
        ),
    ] = None
    status_line: Annotated[
        bool,
        Option(
            help="A terminal shows running and queued requests, audio per second and time to first audio "
            "below the log.",
            rich_help_panel=LOGS,
        ),
    ] = True
    otel: Annotated[
        bool,
        Option(
            "--otel",
            help="The server sends a trace of each request to OTEL_EXPORTER_OTLP_ENDPOINT, by default "
            "http://localhost:4318. This needs the extra `otel`.",
            rich_help_panel=LOGS,
        ),
    ] = False

    @property
    def has_status_line(self) -> bool:
        """Whether the log goes to a terminal that can show the status line below it."""
        is_text = self.log != "json" and os.environ.get("TERM") != "dumb"
        return self.status_line and is_text and sys.stderr.isatty()

    def check(self) -> None:
        """Raises ValueError if OpenTelemetry is asked for and not installed."""
        if self.otel and find_spec("opentelemetry.sdk") is None:
            raise ValueError("--otel needs OpenTelemetry: pip install -e '.[otel]'")


def bounds_of(text: str) -> tuple[int, int]:
    """Return the least and the most replicas; 0 as the most for as many as there are GPUs. Raises
    ValueError."""
    if text == "auto":
        return 1, 0
    match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text, re.ASCII)
    if match is None:
        raise ValueError(f"--replicas {text!r} is not a number, a range like 1-4, or auto")
    least = int(match[1])
    most = int(match[2] or least)
    if least > most or (least == 0 and most > 0):
        raise ValueError(f"--replicas {text} is not possible; a range begins with 1 or more, and goes up")
    return least, most


def swap_bytes(text: str | None) -> int | None:
    """Return the amount of --swap-memory, which may be 0. Raises ValueError."""
    if text is None:
        return None
    return 0 if text == "0" else num_bytes(text)


def aliases_of(flag: str, form: str, given: list[str]) -> dict[str, str]:
    """Return the target of each alias. Raises ValueError."""
    aliases: dict[str, str] = {}
    for pair in given:
        name, equals, target = pair.partition("=")
        if not (name and equals and target):
            raise ValueError(f"{flag} {pair!r} is not of the form {form}")
        if aliases.setdefault(name, target) != target:
            raise ValueError(f"{flag} {name!r} is given twice: for {aliases[name]!r} and for {target!r}")
    return aliases


def model_aliases(given: list[str], served: Iterable[str]) -> dict[str, str]:
    """Return the model id of each alias. Raises ValueError."""
    aliases = aliases_of("--alias", "NAME=MODEL", given)
    ids = list(served)
    for name, id in aliases.items():
        if name in ids:
            raise ValueError(f"--alias {name!r} is already the id of a model")
        if id not in ids:
            raise ValueError(
                f"--alias {name}={id}: model {id!r} is not served; possible models: {', '.join(ids)}"
            )
    return aliases
