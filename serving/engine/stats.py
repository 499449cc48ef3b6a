"""The engine's figures, as `protocol.Stats` has them."""

from __future__ import annotations

from typing import Any

from serving.engine.model_worker import ModelWorker

TYPICAL_TEXT_BYTES = 80  # of the request whose first audio is predicted: a sentence


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
        "held": int(slots.listener.has_backpressure.sum()),
        "paused": int(slots.lacks_pages.sum()),
        "refused": counters.num_refused,
        "left_early": counters.num_left_early,
        "short_passes": counters.num_short,
        "long_passes": counters.num_long,
        "not_finite": counters.num_not_finite,
        "audio_s": counters.audio_s,
        "first_audio_s": counters.first_audio_s,
        "expected_first_audio_s": expected_first_audio_s(model),
        "queue_times": counters.queue_times,
    }


def expected_first_audio_s(model: ModelWorker) -> list[float]:
    """Return the predicted first audio of a request that finds 0, places - 1 and 2 * places - 1 others;
    nothing before costs are known. Between these the prediction is linear: others slow down each iteration
    until no place is free, and from then on a place becomes free with each speech that ends."""
    forecaster = model.forecaster
    costs, outlook = forecaster.costs, forecaster.outlook
    if not costs.is_known:
        return []
    places = outlook.max_concurrency
    speech = forecaster.expected(TYPICAL_TEXT_BYTES).iterations

    def first_s(num_others: int) -> float:
        waits = max(num_others + 1 - places, 0) / places * speech
        iteration_s = float(costs.steady_s(min(num_others + 1, places))) + outlook.other_models_s
        return costs.prefill_s(forecaster.prompt_tokens) + (waits + outlook.first_iterations) * iteration_s

    return [first_s(0), first_s(places - 1), first_s(2 * places - 1)]
