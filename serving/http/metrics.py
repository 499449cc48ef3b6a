"""The metrics of /metrics for Prometheus: how requests went from the clients' view, and the engine's latest
statistics."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from serving.audio.playback import Playback
from serving.engine_client import EngineClient
from serving.http.works.schemas import State
from serving.protocol import ModelState, Stats

TTFA_S = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 20, 30, 60, 120)
RTF = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 5)
UNDERRUN_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
KEY_LIMITS = ("requests_per_minute", "characters_per_day", "audio_s_per_day")
STATES: tuple[State, ...] = get_args(State)  # of works
OUTCOMES = ("stop", "length", "no_audio", "cancelled", "refused", "unavailable", "failed")
# Type, name, field of protocol.ModelStats, description.
BY_MODEL = (
    (GaugeMetricFamily, "zoo_slots", "slots", "Slots: how many requests can speak at once."),
    (
        GaugeMetricFamily,
        "zoo_places",
        "places",
        "How many requests may speak now, so that each stream is generated in real time.",
    ),
    (
        GaugeMetricFamily,
        "zoo_predicted_turn_seconds",
        "predicted_turn_s",
        "Predicted time of an engine step with the requests that speak now.",
    ),
    (GaugeMetricFamily, "zoo_requests_running", "running", "Requests that have a slot and speak."),
    (
        GaugeMetricFamily,
        "zoo_requests_held",
        "held",
        "Requests paused by backpressure: their clients do not read the audio.",
    ),
    (
        GaugeMetricFamily,
        "zoo_requests_paused",
        "paused",
        "Running requests that are paused because others needed their pages more.",
    ),
    (GaugeMetricFamily, "zoo_requests_preparing", "preparing", "Requests whose prompts are being built."),
    (GaugeMetricFamily, "zoo_requests_waiting", "waiting", "Requests that wait for a slot or for memory."),
    (
        CounterMetricFamily,
        "zoo_requests_turned_away",
        "refused",
        "Requests refused because the engine was full.",
    ),
    (
        CounterMetricFamily,
        "zoo_requests_left_early",
        "left_early",
        "Requests whose client disconnected before their prompt was built.",
    ),
    (
        CounterMetricFamily,
        "zoo_underruns",
        "underruns",
        "Times that a listener had played all audio before the next arrived.",
    ),
    (CounterMetricFamily, "zoo_graph_misses", "graph_misses", "Launches that fitted no recorded graph."),
    (CounterMetricFamily, "zoo_requests_admitted", "admitted", "Requests that got a slot."),
    (
        CounterMetricFamily,
        "zoo_short_passes",
        "short_passes",
        "Passes whose speech is much too short for the text: the model ended early.",
    ),
    (
        CounterMetricFamily,
        "zoo_long_passes",
        "long_passes",
        "Passes whose speech is much too long for the text: the model did not end in time.",
    ),
    (
        CounterMetricFamily,
        "zoo_not_finite",
        "not_finite",
        "Requests that failed because the model computed NaN or infinity.",
    ),
    (CounterMetricFamily, "zoo_queue_seconds", "queue_s", "Total time that requests waited for a slot."),
)


# The same for protocol.ModelState, of models on demand.
BY_STATE = (
    (CounterMetricFamily, "zoo_model_loads", "loads", "Times that a model on demand was loaded."),
    (
        CounterMetricFamily,
        "zoo_model_load_failures",
        "failures",
        "Times that a model on demand could not be loaded.",
    ),
    (
        CounterMetricFamily,
        "zoo_model_load_seconds",
        "load_s",
        "Total time of loading and warming up models on demand.",
    ),
    (
        GaugeMetricFamily,
        "zoo_model_planned_bytes",
        "planned_bytes",
        "Memory of the device that a model on demand takes once it is loaded, by its memory plan.",
    ),
)


class Metrics:
    """The metrics of one app. Requests refused before their model was known count under the model ""."""

    def __init__(self, engine: EngineClient):
        self.engine = engine
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, labelnames=["model"], registry=self.registry)
        self.requests = counter(
            "zoo_requests",
            "Speech requests by outcome: stop (the model ended), length (the frame limit), no_audio, cancelled "
            "(the client disconnected), refused (a bad request), unavailable (the engine was full or away), failed.",
            ["model", "outcome"],
        )
        self.ttfa = histogram(
            "zoo_time_to_first_audio_seconds", "Time from a request to its first audio.", buckets=TTFA_S
        )
        self.rtf = histogram(
            "zoo_real_time_factor",
            "Seconds taken per second of audio, for requests that ended without an error.",
            buckets=RTF,
        )
        self.underrun = histogram(
            "zoo_stream_underrun_seconds",
            "Total time per stream that a listener who plays at once waits for more audio. Streams at 0 are viable. "
            "Only streams that ended without an error count.",
            buckets=UNDERRUN_S,
        )
        self.chunks = counter(
            "zoo_stream_chunks", "Chunks of audio after the first of each stream.", ["model"]
        )
        self.late_chunks = counter(
            "zoo_stream_chunks_late",
            "Chunks that arrived after a listener would have played all audio before them.",
            ["model"],
        )
        self.sessions = gauge("zoo_sessions", "Open WebSocket sessions.")
        self.foreign = counter(
            "zoo_foreign_requests",
            "Requests refused because of their Host, or because a page of another site sent them.",
        )
        self.unaccepted = counter(
            "zoo_accept_failures",
            "Times that no connection could be accepted for lack of file descriptors or memory.",
        )
        self.memory = gauge(
            "zoo_http_memory_bytes",
            "Bytes of recordings and whole answers that the HTTP process holds or has promised.",
        )
        self.works = gauge(
            "zoo_works",
            "Audiobooks by state: waiting, speaking, joining (all is spoken, and the book is being written), "
            "complete, failed.",
            ["state"],
        )
        for state in STATES:
            self.works.labels(state)
        self.works_bytes = gauge("zoo_works_bytes", "Bytes of the files of all audiobooks.")
        self.audio_s = counter("zoo_audio_seconds", "Seconds of audio generated.", ["model"])
        self.key_requests = counter(
            "zoo_key_requests", "Requests that an API key began, by its name.", ["key"]
        )
        self.key_refused = counter(
            "zoo_key_refused",
            "Requests refused because a limit of their API key was reached.",
            ["key", "limit"],
        )
        self.key_characters = counter("zoo_key_characters", "Characters spoken for an API key.", ["key"])
        self.key_audio_s = counter(
            "zoo_key_audio_seconds", "Seconds of audio spoken for an API key.", ["key"]
        )

    def add_key(self, name: str) -> None:
        """Let the counters of an API key exist, at 0."""
        for counter in (self.key_requests, self.key_characters, self.key_audio_s):
            counter.labels(name)
        for limit in KEY_LIMITS:
            self.key_refused.labels(name, limit)

    def began(self, model: str, ttfa_s: float) -> None:
        self.ttfa.labels(model).observe(ttfa_s)

    def streamed(self, model: str, playback: Playback, outcome: str) -> None:
        """Count the gaps that a listener who plays at once has heard in a stream."""
        self.chunks.labels(model).inc(playback.num_followers)
        self.late_chunks.labels(model).inc(playback.num_late)
        if playback.num_followers and outcome in ("stop", "length"):
            self.underrun.labels(model).observe(playback.underrun_s)

    def ended(self, model: str, outcome: str, took_s: float = 0.0, audio_s: float = 0.0) -> None:
        """Count a request that ended. audio_s: the audio generated until then."""
        self.requests.labels(model, outcome).inc()
        self.audio_s.labels(model).inc(audio_s)
        if audio_s and outcome in ("stop", "length"):
            self.rtf.labels(model).observe(took_s / audio_s)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition in a format that the client accepts, and its media type."""
        for info in self.engine.models:  # so that each counter exists, at 0, before its first event
            self._prepare(info.id)
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type

    def _prepare(self, model: str) -> None:
        for metric in (self.ttfa, self.rtf, self.audio_s, self.underrun, self.chunks, self.late_chunks):
            metric.labels(model)
        for outcome in OUTCOMES:
            self.requests.labels(model, outcome)


class EngineCollector(Collector):
    """The engine's own statistics, at most a second old. They are absent while the engine is away."""

    def __init__(self, engine: EngineClient):
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "zoo_ready", "1 if the server accepts requests.", value=float(self.engine.status.state == "ready")
        )
        build = GaugeMetricFamily(
            "zoo_build_info", "Always 1; the labels are the versions.", labels=["version", "python"]
        )
        build.add_metric([importlib.metadata.version("speechzoo"), platform.python_version()], 1)
        yield build
        stats = self.engine.stats
        yield CounterMetricFamily(
            "zoo_engine_restarts",
            "Times that an engine stopped and was started again, those of replicas included.",
            value=self.engine.num_restarts + (0 if stats is None else stats.engine_restarts),
        )
        yield from states_of(self.engine.states)
        if stats is not None and stats.replicas:
            yield from with_replicas({name: figures_of(each) for name, each in stats.replicas.items()})
        elif stats is not None:
            yield from figures_of(stats)


def states_of(states: Mapping[str, ModelState]) -> Iterator[Metric]:
    """Yield the states of models on demand."""
    loaded = GaugeMetricFamily(
        "zoo_model_loaded",
        "1 if a model on demand is loaded, 0 if a request has to load it.",
        labels=["model"],
    )
    for model, state in states.items():
        loaded.add_metric([model], float(state.stage == "loaded"))
    yield loaded
    for kind, name, field, what in BY_STATE:
        metric = kind(name, what, labels=["model"])
        for model, state in states.items():
            metric.add_metric([model], getattr(state, field))
        yield metric


def with_replicas(figures: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """Return the metrics of all replicas, with a label that names the replica."""
    merged: dict[str, Metric] = {}
    for replica, metrics in figures.items():
        for metric in metrics:
            whole = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                whole.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    return merged.values()


def figures_of(stats: Stats) -> Iterator[Metric]:
    """Yield an engine's figures."""
    yield GaugeMetricFamily("zoo_pages", "Pages of KV memory, for all models together.", value=stats.pages)
    yield GaugeMetricFamily("zoo_pages_free", "Pages that are free for requests.", value=stats.pages_free)
    yield CounterMetricFamily(
        "zoo_pages_shared",
        "Pages that requests shared instead of filling their own.",
        value=stats.pages_shared,
    )
    yield CounterMetricFamily(
        "zoo_pages_evicted",
        "Filled pages dropped from the prefix cache to make room.",
        value=stats.pages_evicted,
    )
    compiles = "Functions compiled after warmup; each compilation delays all requests."
    yield CounterMetricFamily("zoo_compiles_after_warmup", compiles, value=stats.compiles_after_warmup)
    pauses = "Times that a stream far ahead of its listener was paused to give its pages to another."
    yield CounterMetricFamily("zoo_pauses", pauses, value=stats.pauses)
    yield CounterMetricFamily("zoo_turns", "Engine steps, each over all models with work.", value=stats.turns)
    yield CounterMetricFamily("zoo_turn_seconds", "Total time of all engine steps.", value=stats.turn_s)
    times = stats.turn_times
    yield HistogramMetricFamily(
        "zoo_turn_time_seconds", "Time of each engine step.", buckets=times.buckets, sum_value=times.sum_s
    )
    waits = HistogramMetricFamily(
        "zoo_queue_time_seconds", "Time that each request waited for a slot.", labels=["model"]
    )
    for model, numbers in stats.models.items():
        waits.add_metric([model], numbers.queue_times.buckets, numbers.queue_times.sum_s)
    yield waits
    resident = "Resident memory of the engine process (process_resident_memory_bytes is the HTTP process)."
    yield GaugeMetricFamily("zoo_engine_resident_memory_bytes", resident, value=stats.resident_bytes)
    recordings = "Bytes of recordings that are being encoded or wait for it."
    yield GaugeMetricFamily("zoo_reference_bytes", recordings, value=stats.reference_bytes)
    for kind, name, field, what in BY_MODEL:
        metric = kind(name, what, labels=["model"])
        for model, numbers in stats.models.items():
            metric.add_metric([model], getattr(numbers, field))
        yield metric
