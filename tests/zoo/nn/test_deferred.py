"""Encoders of other packages: imported and built when the first recording comes, and counted without them."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from models import directory, family

import zoo
from serving.engine.memory.memory_plan import peak_bytes
from zoo.checkpoint import loading
from zoo.nn.deferred import Deferred
from zoo.request import AudioClip, Reference, Request

NO_CLONE = """
import sys
import zoo
from serving.engine.memory.memory_plan import plan
for path in sys.argv[1:]:
    zoo.generate(zoo.load(path, "cpu", "float32"), zoo.Request(text="Hm.", max_frames=2))
    plan(zoo.load(path, "meta", "bfloat16"), 1)
print([name for name in ("transformers", "vector_quantize_pytorch", "accelerate") if name in sys.modules])
"""
CLONES = (("higgs_v3", "tiny"), ("csm", "tiny"))


@pytest.mark.slow
def test_without_a_recording_no_package_of_encoders_is_imported():
    """Neither the load, nor a request, nor the memory plan, which counts the encoders, imports one."""
    paths = [str(directory(*name)) for name in CLONES]
    done = subprocess.run([sys.executable, "-c", NO_CLONE, *paths], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("seconds", [2, 9])
def test_a_memory_plan_counts_what_the_encoders_take(seconds):
    samples = torch.zeros(1, 16_000 * seconds)
    outline = samples.to("meta")
    mimi, hubert = (
        family("qwen3_tts", size="tiny-base").codec.encoder,
        family("higgs_v3").codec.encoder.hubert,
    )
    for encoder in (mimi, hubert):
        encoder(samples)  # builds it
        taken = peak_bytes(lambda encoder=encoder: encoder(samples))
        counted = peak_bytes(lambda encoder=encoder: encoder(outline))
        assert counted == pytest.approx(taken, rel=0.01)
        assert encoder(samples).shape == encoder(outline).shape


def test_the_built_module_shares_the_tensors_and_a_copy_has_its_own():
    hubert = family("higgs_v3").codec.encoder.hubert
    name = "feature_projection.projection.weight"
    ours = hubert.get_parameter(name)
    assert hubert.module.get_parameter(name).data_ptr() == ours.data_ptr()
    copied = copy.deepcopy(hubert)
    assert copied.module.get_parameter(name).data_ptr() == copied.get_parameter(name).data_ptr()
    assert copied.get_parameter(name).data_ptr() != ours.data_ptr()
    assert len(list(hubert.parameters())) == len(hubert.state_dict())  # the built module is no second owner


@pytest.mark.parametrize("name", ["bagpiper", pytest.param("step_audio2", marks=pytest.mark.slow)])
def test_an_encoder_of_bf16_weights_keeps_them_and_computes_in_float32(name, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "LEAST_NUMBERS", 1024)
    place = zoo.families()[name].write_demo(tmp_path / name, "tiny", dtype=torch.bfloat16)
    plain, kept = (find(zoo.load(place, "cpu", "float32", keeps_bf16=keeps)) for keeps in (False, True))
    matrices = [weight for weight in kept.parameters() if weight.ndim == 2 and weight.numel() >= 1024]
    assert {weight.dtype for weight in matrices} == {torch.bfloat16}
    mel = torch.randn(plain.config.mels, 301)
    heard = plain(mel)
    assert heard.dtype == torch.float32 and torch.equal(kept(mel), heard)


def find(model):
    return next(module for module in model.modules() if isinstance(module, Deferred))


def test_a_clone_of_each_family_reads_its_recording():
    """Another recording gives another prompt."""
    waves = (np.sin(np.arange(30_000) ** power / 30).astype(np.float32) / 4 for power in (1.5, 1.4))
    clips = [AudioClip(wave, 24_000) for wave in waves]
    for name, size in CLONES:
        loaded = zoo.load(directory(name, size), "cpu", "float32")
        asked = (Request(text="Hm.", references=(Reference(clip, "Hm."),)) for clip in clips)
        first, second = (loaded.prompt(request).lanes[0].inputs for request in asked)
        assert not torch.equal(first, second)
