"""Check every family's launches for a GPU without one: one graph, kernels that build, and a budget of
launches.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zoo

pytest.importorskip("triton", reason="pip install -e .[rehearse]")

from benchmarks.rehearse import rehearse
from zoo.csm.demo import CONFIGS
from zoo.kernels.triton_whole_stack import PHASES
from zoo.nn.s3.parts import VOCODER

pytestmark = pytest.mark.rehearse
# What runs on each card, and how many slots. The graph of a render takes longest to compile.
CARDS = {
    "h100": ((16, 64), ("step", "mixed", "prefill", "render")),  # sm_90: all sizes share a graph
    "4090": ((1,), ("step",)),  # sm_89
}
# These families have CosyVoice 2's vocoder, whose graph takes more than two minutes.
WITHOUT_VOCODER = dict.fromkeys(("chatterbox", "glm4_voice", "step_audio2"), (VOCODER.place,))
KINDS = ("triton", "extern", "recorded", "eager")
# Launches of a tiny model's step, by card and kind (see launches.Launch). Write lower counts down when they fall.
BUDGET = json.loads(Path(__file__).with_name("budget.json").read_text())


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("name", zoo.families())
def test_a_model_runs_without_waits_in_few_launches_whose_kernels_build(
    name: str, card: str, tmp_path: Path
) -> None:
    slots, wanted = CARDS[card]
    uncompiled = WITHOUT_VOCODER.get(name, ())
    result = rehearse(
        name, "tiny", card, slots, tmp_path, parts=wanted, is_largest_window=True, uncompiled=uncompiled
    )
    assert result.breaks == {} and result.graphs == result.num_lowered > 0
    assert result.graphs_again == 0
    assert result.built is not None and result.built.failed == {} and result.built.num_kernels > 0
    assert {part.name for part in result.parts} >= set(wanted)
    assert [part for part in result.parts if part.waits or part.copies] == []
    step = [part for part in result.parts if part.name == "step"][-1]
    counted = {kind: step.num(kind) for kind in KINDS}
    budget = BUDGET[name][card]
    over = {kind: num for kind, num in counted.items() if num > budget[kind]}
    assert not over, f"{over} launches, but the budget is {budget}"


def test_a_whole_code_predictor_has_one_launch_a_pass(tmp_path: Path) -> None:
    result = rehearse("csm", "tiny", "h100", (16, 64), tmp_path, parts=("step",), depth="whole")
    assert result.problems == [] and result.graphs_again == 0
    step = result.parts[-1]
    num_passes = CONFIGS["tiny"]["num_codebooks"] - 1
    num_phases = PHASES * CONFIGS["tiny"]["depth_decoder_config"]["num_hidden_layers"]
    assert sum(num for launch, num in step.launches.items() if launch.name == "_run_stack") == num_passes
    assert step.num("phase") == num_passes * (num_phases - 1)
