"""What /metrics tells Prometheus, by model: how requests went, as their clients saw it, and what the engine
said of itself last."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from serving.engine_client import EngineClient
from serving.playback import Playback

TTFA_S = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 20, 30, 60, 120)
RTF = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 5)
UNDERRUN_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
OUTCOMES = ("stop", "length", "no_audio", "cancelled", "refused", "unavailable", "failed")
BY_MODEL = (  # what protocol.ModelStats holds
    (GaugeMetricFamily, "zoo_slots", "slots", "How many requests can speak at once."),
    (
        GaugeMetricFamily,
        "zoo_places",
        "places",
        "How many may speak now, so that each is made faster than heard.",
    ),
    (
        GaugeMetricFamily,
        "zoo_predicted_turn_seconds",
        "predicted_turn_s",
        "What a turn of those who speak takes.",
    ),
    (GaugeMetricFamily, "zoo_requests_running", "running", "Requests that speak."),
    (
        GaugeMetricFamily,
        "zoo_requests_held",
        "held",
        "Requests whose clients do not take what was spoken.",
    ),
    (
        GaugeMetricFamily,
        "zoo_requests_paused",
        "paused",
        "Requests that speak, and whose pages others needed more.",
    ),
    (GaugeMetricFamily, "zoo_requests_preparing", "preparing", "Requests whose prompts are being made."),
    (GaugeMetricFamily, "zoo_requests_waiting", "waiting", "Requests that wait for a slot or for memory."),
    (
        CounterMetricFamily,
        "zoo_requests_turned_away",
        "refused",
        "Requests that were refused for want of room.",
    ),
    (
        CounterMetricFamily,
        "zoo_requests_left_early",
        "left_early",
        "Those who left before their prompt was made.",
    ),
    (
        CounterMetricFamily,
        "zoo_underruns",
        "underruns",
        "Audio that came after the listener had played all there was.",
    ),
    (CounterMetricFamily, "zoo_graph_misses", "graph_misses", "Launches that no recorded graph fitted."),
    (CounterMetricFamily, "zoo_requests_admitted", "admitted", "Requests that got a slot."),
    (
        CounterMetricFamily,
        "zoo_short_passes",
        "short_passes",
        "Speech that is much too short for its text: the model ended early.",
    ),
    (
        CounterMetricFamily,
        "zoo_long_passes",
        "long_passes",
        "Speech that is much too long for its text: the model found no end.",
    ),
    (CounterMetricFamily, "zoo_queue_seconds", "queue_s", "That requests waited for a slot, added up."),
)


class Metrics:
    """One registry per app. A request that was refused before it was clear which model it is for counts under
    the model ""."""

    def __init__(self, engine: EngineClient):
        self.engine = engine
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "zoo_requests",
            "Speech requests by how they ended: the model's own end, the cap on frames, no audio, a client that "
            "left, a request that was refused, an engine that was full or away, a failure.",
            ["model", "outcome"],
            registry=self.registry,
        )
        self.ttfa = Histogram(
            "zoo_time_to_first_audio_seconds",
            "From the request to its first audio.",
            ["model"],
            buckets=TTFA_S,
            registry=self.registry,
        )
        self.rtf = Histogram(
            "zoo_real_time_factor",
            "Seconds taken per second of audio, of requests that ended well.",
            ["model"],
            buckets=RTF,
            registry=self.registry,
        )
        self.underrun = Histogram(
            "zoo_stream_underrun_seconds",
            "Of streams that ended well: all waits of a listener who plays from the first audio on. Those at 0 are viable.",
            ["model"],
            buckets=UNDERRUN_S,
            registry=self.registry,
        )
        self.chunks = Counter(
            "zoo_stream_chunks",
            "Stretches of audio that followed a stream's first.",
            ["model"],
            registry=self.registry,
        )
        self.late_chunks = Counter(
            "zoo_stream_chunks_late",
            "Those of them that came after all audio before them would have been played.",
            ["model"],
            registry=self.registry,
        )
        self.sessions = Gauge("zoo_sessions", "WebSockets that are open.", registry=self.registry)
        self.audio_s = Counter("zoo_audio_seconds", "Audio made.", ["model"], registry=self.registry)

    def began(self, model: str, ttfa_s: float) -> None:
        self.ttfa.labels(model).observe(ttfa_s)

    def streamed(self, model: str, playback: Playback, outcome: str) -> None:
        """What a listener who plays at once has heard of a stream."""
        self.chunks.labels(model).inc(playback.num_followers)
        self.late_chunks.labels(model).inc(playback.num_late)
        if playback.num_followers and outcome in ("stop", "length"):
            self.underrun.labels(model).observe(playback.underrun_s)

    def ended(self, model: str, outcome: str, took_s: float = 0.0, audio_s: float = 0.0) -> None:
        """audio_s: what was made until then."""
        self.requests.labels(model, outcome).inc()
        self.audio_s.labels(model).inc(audio_s)
        if audio_s and outcome in ("stop", "length"):
            self.rtf.labels(model).observe(took_s / audio_s)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """-> the exposition in the form that the client takes, and its media type."""
        for info in self.engine.models:  # so that a rate is there before the first of its kind
            self._prepare(info.id)
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def _prepare(self, model: str) -> None:
        for metric in (self.ttfa, self.rtf, self.audio_s, self.underrun, self.chunks, self.late_chunks):
            metric.labels(model)
        for outcome in OUTCOMES:
            self.requests.labels(model, outcome)


class EngineCollector(Collector):
    """The engine's own numbers, at most a second old; none while it is away."""

    def __init__(self, engine: EngineClient):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "zoo_ready", "1 when requests are taken.", value=float(self.engine.status.state == "ready")
        )
        build = GaugeMetricFamily("zoo_build_info", "1, and what runs.", labels=["version", "python"])
        build.add_metric([importlib.metadata.version("speechzoo"), platform.python_version()], 1)
        yield build
        yield CounterMetricFamily(
            "zoo_engine_restarts", "Times that the engine went away.", value=self.engine.num_restarts
        )
        stats = self.engine.stats
        if stats is None:
            return
        yield GaugeMetricFamily(
            "zoo_pages", "Pages of memory for keys and values, of all models.", value=stats.pages
        )
        yield GaugeMetricFamily(
            "zoo_pages_free", "Pages that a request could have now.", value=stats.pages_free
        )
        yield CounterMetricFamily(
            "zoo_pages_shared", "Pages that a request found filled already.", value=stats.pages_shared
        )
        yield CounterMetricFamily(
            "zoo_pages_evicted", "Filled pages that were given up for others.", value=stats.pages_evicted
        )
        compiles = "Functions that were compiled after the models were warm: each held up everybody."
        yield CounterMetricFamily("zoo_compiles_after_warmup", compiles, value=stats.compiles_after_warmup)
        pauses = "Streams that were far ahead of their listeners, and gave up their pages for a while."
        yield CounterMetricFamily("zoo_pauses", pauses, value=stats.pauses)
        yield CounterMetricFamily("zoo_turns", "Launches of every model that had work.", value=stats.turns)
        yield CounterMetricFamily("zoo_turn_seconds", "That they took, added up.", value=stats.turn_s)
        times = stats.turn_times
        yield HistogramMetricFamily(
            "zoo_turn_time_seconds", "Of each.", buckets=times.buckets, sum_value=times.sum_s
        )
        waits = HistogramMetricFamily(
            "zoo_queue_time_seconds", "That a request waited for a slot.", labels=["model"]
        )
        for model, numbers in stats.models.items():
            waits.add_metric([model], numbers.queue_times.buckets, numbers.queue_times.sum_s)
        yield waits
        resident = "Of the engine process; process_resident_memory_bytes is of the HTTP process."
        yield GaugeMetricFamily("zoo_engine_resident_memory_bytes", resident, value=stats.resident_bytes)
        recordings = "Recordings that are being encoded, or wait for it."
        yield GaugeMetricFamily("zoo_reference_bytes", recordings, value=stats.reference_bytes)
        for kind, name, field, what in BY_MODEL:
            metric = kind(name, what, labels=["model"])
            for model, numbers in stats.models.items():
                metric.add_metric([model], getattr(numbers, field))
            yield metric
