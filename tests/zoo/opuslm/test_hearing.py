"""OpusLM: files of encoders and converted files, recordings, and what is refused without XEUS."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import pytest
import torch
from models import directory, family
from safetensors.torch import load_file

import zoo
from zoo.checkpoint.joblib_files import read_array
from zoo.opuslm import demo, demo_xeus, listener, weights
from zoo.opuslm.model import OpusLM
from zoo.request import AudioClip, Reference, Request, RequestError, Turn


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(directory("opuslm", "tiny"), tmp_path / "model")


def model(size="tiny") -> OpusLM:
    loaded = family("opuslm", size=size)
    assert isinstance(loaded, OpusLM)
    return loaded


def clip(seconds=1.0, seed=0) -> AudioClip:
    random = np.random.default_rng(seed)
    return AudioClip(random.uniform(-0.5, 0.5, int(seconds * 16_000)).astype(np.float32), 16_000)


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


# files


@pytest.mark.parametrize("size", ["tiny", "tiny_dialogue"])
def test_espnets_and_converted_files_load_to_the_same_tensors(tmp_path, size, monkeypatch):
    """A tensor's random values follow from its name, so those of the converted files are read from ESPnet's."""
    espnet = zoo.load(directory("opuslm", size), "cpu", "float32")
    path = shutil.copytree(directory("opuslm", size), tmp_path / "converted")
    tensors = torch.load(path / "model.pth", weights_only=True)
    del tensors["criterion.lm_head.weight"]
    demo.convert(path, espnet.config, tensors)
    (path / "model.pth").unlink()
    converted = zoo.load(path, "cpu", "float32")
    assert equal(espnet.backbone, converted.backbone) and equal(espnet.codec, converted.codec)
    assert converted.config.is_converted and converted.spec == espnet.spec
    asked = Request(text="Good morning.", voice="anna")
    assert torch.equal(espnet.writer(asked).rows, converted.writer(asked).rows)


def test_a_converted_olmo_with_another_eps_is_read_with_a_warning(tmp_path, caplog):
    values = demo.converted(model().config)
    assert type(model().config).of_converted(values).body.eps == 1e-6 and not caplog.messages
    assert type(model().config).of_converted(values | {"rms_norm_eps": 1e-5}).body.eps == 1e-5
    assert "OLMo-2 and ESPnet have 1e-06" in caplog.text


def test_a_second_head_that_differs_is_named(copy, caplog):
    tensors = torch.load(copy / "model.pth", weights_only=True)
    known = model().config.vocabulary
    own = tensors[weights.ESPNET.head][known.codec : known.codec + 8 * known.num_codes]
    for other, is_named in ((own.clone(), False), (own + 1, True)):
        torch.save(tensors | {weights.AUXILIARY: other}, copy / "model.pth")
        zoo.load(copy, "cpu")
        assert ("differs from the rows" in caplog.text) == is_named


def test_both_releases_of_xeus_load_to_the_same_network(copy):
    """The newer file names one convolution and its weight norm in another way."""
    folder = copy / listener.FOLDER
    tensors = torch.load(folder / listener.WEIGHTS[1], weights_only=True)
    newer = {demo_xeus.newer(name): value for name, value in tensors.items()}
    assert newer.keys() != tensors.keys()
    torch.save(newer, folder / listener.WEIGHTS[0])
    (folder / listener.WEIGHTS[1]).unlink()
    assert equal(model().encoders, zoo.load(copy, "cpu").encoders)


def test_a_missing_or_foreign_tensor_of_xeus_is_named(copy):
    path = copy / listener.FOLDER / listener.WEIGHTS[1]
    tensors = torch.load(path, weights_only=True)
    torch.save(tensors | {"encoder.extra": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match=r"unknown encoder\.extra \[2\]"):
        zoo.load(copy, "cpu")
    del tensors["encoder.after_norm.bias"]
    torch.save(tensors, path)
    with pytest.raises(ValueError, match=r"missing encoder\.after_norm\.bias"):
        zoo.load(copy, "cpu")
    path.unlink()
    with pytest.raises(
        ValueError, match=r"xeus_checkpoint_new\.pth is missing; the directory needs the files of"
    ):
        zoo.inspect(copy)


def test_clusters_of_another_size_are_refused(copy):
    (copy / listener.FOLDER / listener.CLUSTERS).write_bytes(demo_xeus.clustering(np.zeros((3, 32))))
    with pytest.raises(
        ValueError, match=r"cluster_centers_ is float32 \[3, 32\]; floats \[50, 32\] are needed"
    ):
        zoo.load(copy, "cpu")


class Evil:
    def __reduce__(self):
        return print, ("this was run",)


def test_a_file_of_joblib_runs_nothing(tmp_path, capsys):
    path = tmp_path / "clusters.mdl"
    path.write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(ValueError, match="not an uncompressed file of joblib"):
        read_array(path, "cluster_centers_")
    path.write_bytes(b"\x80\x03cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(ValueError, match="holds no array 'cluster_centers_'"):
        read_array(path, "cluster_centers_")
    assert capsys.readouterr().out == ""


def test_an_array_survives_a_file_of_joblib(tmp_path):
    array = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
    path = tmp_path / "clusters.mdl"
    path.write_bytes(demo_xeus.clustering(array))
    assert np.array_equal(read_array(path, "cluster_centers_"), array)
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ValueError, match="an array is cut short"):
        read_array(path, "cluster_centers_")


# recordings


def test_a_recording_is_a_voice_and_its_frames_may_be_stored(tmp_path):
    ours, given = model(), clip()
    codes = ours.writer.ear(given)
    assert codes.shape == (49, 9) and codes.max() < 50
    cloned = ours.writer(Request(text="It hums.", references=(Reference(given),))).rows
    voices = ours.writer.voices
    ours.writer.voices = {**voices, "bea": codes}
    assert torch.equal(cloned, ours.writer(Request(text="It hums.", voice="bea")).rows)
    ours.writer.voices = voices
    kept = AudioClip(given.samples, given.sample_rate_hz, kept_in=tmp_path)
    ours.writer.ear.heard.__init__()
    assert torch.equal(ours.writer.ear(kept), codes)
    [file] = tmp_path.glob("opuslm-*.safetensors")
    assert torch.equal(load_file(file)["codes"], codes)


def test_clips_of_wrong_lengths_are_refused_by_their_field():
    ours, short = model(), clip(0.1)
    with pytest.raises(RequestError, match=r"the reference lasts 0\.1 s; from 0\.2 to 120") as caught:
        ours.prompt(Request(text="a", references=(Reference(short),)))
    assert caught.value.param == "references"
    with pytest.raises(RequestError, match=r"the clip lasts 0\.1 s") as caught:
        ours.prompt(Request(text="", turns=(Turn("user", clip=short),), output="transcript"))
    assert caught.value.param == "turns"


def test_without_xeus_recordings_are_refused_with_advice_and_all_else_works(tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "cached_directory", lambda repository: None)
    ours = zoo.load(demo.write(tmp_path / "a", "tiny", 0, torch.float32, has_xeus=False), "cpu")
    assert ours.spec.outputs == ("speech", "text", "continuation") and ours.spec.modes == ("voice",)
    ours.prompt(Request(text="Good morning.", voice="anna"))
    with pytest.raises(RequestError, match="run `hf download espnet/xeus`"):
        ours.prompt(Request(text="a", references=(Reference(clip()),)))
    with pytest.raises(RequestError, match="run `hf download espnet/xeus`"):
        ours.prompt(Request(text="", turns=(Turn("user", clip=clip()),), output="continuation"))
    with pytest.raises(RequestError, match="possible: speech, text, continuation"):
        ours.prompt(Request(text="", turns=(Turn("user", clip=clip()),), output="transcript"))


def test_xeus_is_found_next_to_the_model_and_in_the_hubs_cache(copy, monkeypatch):
    asked = []
    monkeypatch.setattr(
        listener, "cached_directory", lambda name: asked.append(name) or copy.parent / "cache"
    )
    (copy / listener.FOLDER).rename(copy.parent / listener.FOLDER)
    assert listener.XeusFiles.find(copy).config == copy.parent / listener.FOLDER / listener.CONFIG
    assert not asked
    (copy.parent / listener.FOLDER).rename(copy.parent / "cache")
    assert listener.XeusFiles.find(copy).config == copy.parent / "cache" / listener.CONFIG
    assert asked == ["espnet/xeus"]
