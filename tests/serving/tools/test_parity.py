"""`zoo parity` and `zoo warm` below their commands: what they find, and that they would find what is wrong."""

from __future__ import annotations

import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import directory, family
from toy import Toy

import zoo
from compile_cache.strategy import Whole
from serving import parity as measured
from serving.tools.parity import buzz, compare, follow, parity, requests
from serving.tools.warm import warm
from zoo.contract import Request

TINY = str(directory("qwen3_tts", "tiny"))


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    monkeypatch.setenv("ZOO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def test_the_served_form_says_what_the_plain_one_says():
    result = parity(TINY, device="cpu", dtype="float32", compile=False, frames=6)
    run = result["served"]["voice"]
    assert (run["steps"], run["steps_equal"], run["largest_frame_difference"]) == (6, 6, 0)
    assert run["equal_s"] == run["expected_s"] == run["audio_s"] == 6 * 0.08
    assert run["largest_sample_difference"] < 5e-5 and run["snr_db"] > 80
    assert result["reference"] is None and (result["family"], result["dtype"]) == ("qwen3_tts", "float32")


def test_a_form_that_says_something_else_is_seen():
    """The wrong one errs from its first step on, but each step is taken from where the right one stood."""
    plain = family("qwen3_tts")
    wrong = zoo.load(TINY, "cpu", "float32")
    wrong.talker.codec_head.weight = torch.nn.Parameter(wrong.talker.codec_head.weight.roll(1, 0), requires_grad=False)
    run = follow(plain, wrong, Request(text="hello", voice="vivian", temperature=0.0, max_frames=5), compile=False)
    assert run["steps"] == 5 and run["steps_equal"] == 0 and run["largest_frame_difference"] >= 1
    assert run["equal_s"] == run["expected_s"]  # the tapes were the right one's


def test_a_request_for_each_thing_a_model_can_do():
    base = family("qwen3_tts", size="tiny-base").spec
    assert set(requests(base, 5)) == {"clone"} and requests(base, 5)["clone"].reference is not None
    assert set(requests(family("qwen3_tts", size="tiny-1.7b-design").spec, 5)) == {"design"}
    assert set(requests(replace(base, modes=("voice", "clone"), voices=("a",)), 5)) == {"voice", "clone"}
    assert buzz().samples.dtype == np.float32 and np.abs(buzz().samples).max() < 1


def test_two_renderings_are_compared_sample_by_sample():
    sound = np.sin(np.arange(1000) / 7).astype(np.float32)
    other = sound.copy()
    other[600] += 0.1
    same, differs = compare(sound, sound, 1000), compare(other, sound, 1000)
    assert (same["equal_s"], same["largest_sample_difference"], same["snr_db"]) == (1.0, 0.0, float("inf"))
    assert differs["equal_s"] == 0.6 and differs["largest_sample_difference"] == pytest.approx(0.1, abs=1e-6)
    assert differs["snr_db"] == pytest.approx(10 * np.log10(np.square(sound).sum() / 0.01), abs=0.01)
    assert compare(sound[:400], sound, 1000)["audio_s"] == 0.4


def test_the_reference_is_asked_the_same_and_compared(tmp_path, monkeypatch):
    """Its script gets the requests and a place for the samples; here it says what we say, but for one sample."""
    plain = family("qwen3_tts")
    request = replace(requests(plain.spec, 4)["voice"], voice=plain.spec.voices[0])
    samples = zoo.generate(plain, request).samples.numpy().copy()
    samples[1920] += 0.5
    np.save(tmp_path / "said.npy", samples)
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env python3\n"
        "import json, shutil, sys, zipfile\n"
        "order = json.loads(sys.argv[2])\n"
        "assert order['requests']['voice']['max_frames'] == 4 and order['requests']['voice']['temperature'] == 0.0\n"
        f"with zipfile.ZipFile(order['out'], 'w') as out: out.write({str(tmp_path / 'said.npy')!r}, 'voice.npy')\n"
        "print(json.dumps({'name': 'a reference'}))\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    result = parity(TINY, device="cpu", compile=False, frames=4, reference_python=str(python))
    assert result["reference"]["name"] == "a reference"
    assert result["reference"]["runs"]["voice"]["equal_s"] == pytest.approx(1920 / 24000)


def test_a_reference_that_cannot_run_is_one_line(monkeypatch):
    with pytest.raises(ValueError, match="did not run"):
        measured.reference(TINY, family("qwen3_tts").spec, "/bin/false", {}, torch.zeros(0))
    with pytest.raises(ValueError, match=r"reference_toy\.py does not exist"):
        measured.reference(TINY, family("toy").spec, "/bin/true", {}, torch.zeros(0))


def test_warm_says_what_it_made(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "serving.engine.runner.lower", lambda verb, how: torch.compile(verb, backend="eager", fullgraph=True) if how == Whole() else verb
    )
    torch._dynamo.reset()
    monkeypatch.setattr(zoo, "load", lambda directory, device, dtype: Toy())
    steps: list[tuple[float, str]] = []
    done = warm("toy", device="cpu", max_slots=2, say=lambda fraction, stage: steps.append((fraction, stage)))
    assert (done["graphs"], done["found"], done["compiled"]) == (1, 0, 0)  # this backend has no kernels to keep
    assert done["cache"].startswith(str(tmp_path / "cache")) and done["warm_s"] > 0
    assert steps[0][0] == 0 and steps[-1] == (1.0, "warm")
