"""What /metrics tells Prometheus: how requests went, as their clients saw it, and what the engine said of itself last."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from serving.link import Link

TTFA_S = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
RTF = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 5)
OUTCOMES = ("stop", "length", "cancelled", "refused", "unavailable", "failed")


class Metrics:
    """One registry per app."""

    def __init__(self, link: Link):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(link))
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "zoo_requests",
            "Speech requests by how they ended: the model's own end, the cap on frames, a client that left, a request that was refused, "
            "an engine that was full or away, a failure.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in OUTCOMES:  # so that a rate is there before the first of its kind
            self.requests.labels(outcome)
        self.ttfa = Histogram(
            "zoo_time_to_first_audio_seconds", "From the request to its first audio.", buckets=TTFA_S, registry=self.registry
        )
        self.rtf = Histogram(
            "zoo_real_time_factor", "Seconds taken per second of audio, of requests that ended well.", buckets=RTF, registry=self.registry
        )
        self.audio_s = Counter("zoo_audio_seconds", "Audio made.", registry=self.registry)

    def began(self, ttfa_s: float) -> None:
        self.ttfa.observe(ttfa_s)

    def ended(self, outcome: str, took_s: float = 0.0, audio_s: float = 0.0) -> None:
        """audio_s: what was made until then."""
        self.requests.labels(outcome).inc()
        self.audio_s.inc(audio_s)
        if audio_s and outcome in ("stop", "length"):
            self.rtf.observe(took_s / audio_s)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """-> the exposition in the form that the client takes, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self.registry), media_type


class EngineCollector(Collector):
    """The engine's own numbers, at most a second old; none while it is away."""

    def __init__(self, link: Link):
        self.link = link

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("zoo_ready", "1 when requests are taken.", value=float(self.link.status.state == "ready"))
        stats = self.link.stats
        if stats is None:
            return
        yield GaugeMetricFamily("zoo_slots", "How many requests can speak at once.", value=stats.slots)
        yield GaugeMetricFamily("zoo_requests_running", "Requests that speak.", value=stats.running)
        yield GaugeMetricFamily("zoo_requests_waiting", "Requests that wait for a slot or for memory.", value=stats.waiting)
        yield GaugeMetricFamily("zoo_pages", "Pages of memory for keys and values.", value=stats.pages)
        yield GaugeMetricFamily("zoo_pages_free", "Pages that a request could have now.", value=stats.pages_free)
        yield CounterMetricFamily("zoo_pages_shared", "Pages that a request found filled already.", value=stats.pages_shared)
        yield CounterMetricFamily("zoo_pages_evicted", "Filled pages that were given up for others.", value=stats.pages_evicted)
        yield CounterMetricFamily("zoo_underruns", "Audio that came after the listener had played all there was.", value=stats.underruns)
        yield CounterMetricFamily("zoo_graph_misses", "Launches that no recorded graph fitted.", value=stats.graph_misses)
