"""The engine's figures, as `protocol.Stats` has them."""

from __future__ import annotations

from typing import Any

from serving.engine.model_worker import ModelWorker


def model_stats(model: ModelWorker) -> dict[str, Any]:
    """Return the figures of `protocol.ModelStats`. To be asked under the engine's lock."""
    requests = model.queue.requests.values()
    preparing = sum(not request.is_made for request in requests)
    outlook, slots, counters = model.forecaster.outlook, model.scheduler.slots, model.counters
    return {
        "slots": slots.num_slots,
        "running": len(model.running),
        "preparing": preparing,
        "waiting": len(requests) - preparing,
        "places": outlook.max_concurrency,
        "predicted_turn_s": float(model.forecaster.costs.steady_s(len(outlook.left))),
        "underruns": model.scheduler.num_underruns,
        "graph_misses": model.runner.graph_misses,
        "admitted": counters.num_admitted,
        "queue_s": counters.queue_s,
        "held": int(slots.listener.has_backpressure.sum()),
        "paused": int(slots.lacks_pages.sum()),
        "refused": counters.num_refused,
        "left_early": counters.num_left_early,
        "short_passes": counters.num_short,
        "long_passes": counters.num_long,
        "not_finite": counters.num_not_finite,
        "audio_s": counters.audio_s,
        "first_audio_s": counters.first_audio_s,
        "queue_times": counters.queue_times,
    }
