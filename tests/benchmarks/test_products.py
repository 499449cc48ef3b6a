"""The products of a step: all of them, as often as the step computes them."""

from __future__ import annotations

import torch

import zoo
from benchmarks.products import best_ms, calls_of_a_step
from zoo import kernels


def test_every_product_of_a_step_is_timed_as_often_as_it_is_computed(tmp_path):
    place = zoo.families()["qwen3_tts"].write_demo(tmp_path / "demo", "tiny", dtype=torch.bfloat16)
    config = zoo.load(place, "cpu", "float32").config
    kernels.build()
    with torch.inference_mode():
        calls = calls_of_a_step(str(place), 2, None)
        heads = [rows for module, rows in calls if getattr(module, "out_features", 0) == config.depth_vocab]
        assert len(heads) >= config.codebooks - 1 and {len(rows) for rows in heads} == {2}
        assert best_ms(calls) > 0
