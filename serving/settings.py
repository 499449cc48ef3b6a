"""The settings of a server: a frozen type for each panel of `zoo serve --help`.

    flags (cli/serve.py) ─ Settings ─ supervisor ─ JSON ─┬─ engine process
                                                         └─ HTTP process

A value is named like its flag, with its unit. A field of Limits leaves out the `max_` that all of them share.
The API key is not among the settings: it travels in the environment variable ZOO_API_KEY, because every user
of the machine can read a process's arguments.
"""

from __future__ import annotations

from typing import Literal

import msgspec

URL_SECRET = "ZOO_URL_SECRET"  # the environment variable of the secret that signs URLs

Policy = Literal["streaming", "throughput", "fifo"]


class ModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings for loading and running the models. None: the machine decides."""

    device: str | None = None
    dtype: str | None = None
    device_map: str | None = None  # where layers lie: "auto", "balanced" or a file; None: on the device
    weights: str = "published"  # or "int8" on a CPU, "fp8" on a GPU
    chunked: bool = False  # models that render whole speeches render them in chunks
    codec: str = "float32"  # the precision of a GPU's renders
    attention: str = "auto"  # of a GPU's steps: "auto", "triton" or "flashinfer"
    depth: str = "layers"  # a GPU's code predictors run layer by layer, or "whole"
    deterministic: bool = False  # equal requests give equal bytes under any load
    compile: bool = True
    warm: bool = True


class Aliases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Other names that clients may use. models: alias -> ID of a served model. voices: alias -> voice.
    is_strict: OpenAI's names have no special meaning."""

    models: dict[str, str] = {}
    voices: dict[str, str] = {}
    is_strict: bool = False


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of the engine process. None: what fits."""

    max_slots: int | None = None
    kv_memory_bytes: int | None = None
    swap_memory_bytes: int | None = None  # of the host, for paused streams; 0: no stream pauses
    reference_memory_bytes: int = 256 << 20  # of recordings that wait to be encoded


class Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The order of requests, and the limit on the wait for first audio."""

    policy: Policy = "streaming"
    max_ttfa_s: float | None = None  # None: every request is accepted, however long it would wait
    run_async: bool = True  # a GPU's next step is launched before the results of the last one are read


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what clients may send and use."""

    waiting: int = 256  # queued requests of each model
    flex_wait_s: float | None = None  # how long a flexible request waits for its first audio; None: for ever
    unread_s: float = 30.0  # audio that a client may leave unread before its stream is paused
    stall_s: float = 60.0  # how long a client may read nothing, or leave its stream paused
    text_chars: int = 8000
    reference_bytes: int = 10 << 20  # of one recording, as it is sent
    reference_s: float = 60.0
    reference_dir: str | None = None  # where ref_audio may be a path; None: nowhere
    allows_url_references: bool = False  # whether ref_audio may be a URL, which this server then fetches
    voices: int = 1000
    reading: int = 16  # requests whose body is being read; the same for fetching and decoding recordings
    sessions: int = 256  # open WebSockets
    memory_bytes: int = 1 << 30  # of recordings and whole answers in the HTTP process
    text_idle_s: float = 30.0  # how long a speaking utterance may wait for more text
    session_idle_s: float = 600.0  # how long a WebSocket may be idle in both directions

    @property
    def speech_body_bytes(self) -> int:
        """The largest body: all reference audio together, as base64, and 1 MiB for everything else."""
        return (1 << 20) + self.reference_bytes * 4 // 3

    @property
    def upload_body_bytes(self) -> int:
        return (1 << 20) + self.reference_bytes


class Security(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings for requests from other hosts and sites, and for /metrics."""

    private_metrics: bool = False  # whether /metrics needs the API key too
    cors_origins: tuple[str, ...] = ()  # origins of other sites whose pages may use this server
    # Names that Host headers may have besides localhost and IP addresses; "*": any.
    allowed_hosts: tuple[str, ...] = ()
    api_keys: str | None = None  # a file with API keys (api_keys.py)
    speech_urls: bool = False  # whether a signed URL speaks


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many engines there are. More than one, and any in a cluster, run on Ray."""

    # The least and the most; (1, 0): up to as many as there are GPUs, (0, 0): those that another server
    # starts.
    counts: tuple[int, int] = (1, 1)
    address: str | None = None  # of a Ray cluster that runs; None: one is started on this machine

    @property
    def are_on_ray(self) -> bool:
        return self.address is not None or self.counts != (1, 1)


class AlignerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that finds word times (zoo/align/files.py), and where it runs."""

    directory: str | None = None  # None: there are no word times
    device: str = "cpu"


class WorksSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Long works (serving/http/works), and how large they may be."""

    directory: str | None = None  # None: there are none
    num: int = 100
    document_bytes: int = 32 << 20  # of one document, as it is sent
    disk_bytes: int = 20 << 30  # of the files of all works


class OnDemand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How models on demand are loaded and unloaded."""

    keep_alive_s: float | None = 300.0  # how long an idle model stays loaded; None: for ever
    load_wait_s: float = 300.0  # how long a request waits for its model
    memory_bytes: int | None = None  # of all loaded models; None: what the device has free at the start


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of a server. `models` has the directory of each model by the ID that clients know."""

    models: dict[str, str] = {}
    host: str = "127.0.0.1"
    port: int = 8000
    playground: bool = True  # whether GET / serves the page for trying the models
    voices_dir: str | None = None  # None: voices.default_directory()
    pronunciations: str | None = None  # a file with how words are spoken (zoo/text/pronunciations.py)
    sentence_gap_s: float | None = None  # silence between sentences, for requests that do not set it
    aligner: AlignerSettings = AlignerSettings()
    works: WorksSettings = WorksSettings()
    grace_s: int = 5  # how long open answers may continue when the server stops
    otel: bool = False  # whether a trace of each request is exported
    model: ModelOptions = ModelOptions()
    aliases: Aliases = Aliases()
    memory: Memory = Memory()
    latency: Latency = Latency()
    replicas: Replicas = Replicas()
    on_demand: OnDemand | None = None  # None: all models are loaded at the start
    limits: Limits = Limits()
    security: Security = Security()


class EngineArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of the engine process."""

    settings: Settings
    socket: str  # where the engine process listens
    parent_fd: int | None = None  # the read end of a pipe that closes when the supervisor ends


class HTTPArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of the HTTP process."""

    settings: Settings
    socket: str  # where the engine process listens
    # A bound socket that outlives this process. Clients wait in its backlog while the process restarts.
    fd: int
    parent_fd: int | None = None
    heartbeat_fd: int | None = None  # a pipe on which the supervisor expects a byte a second
