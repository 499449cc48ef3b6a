"""Encodings of stored recordings are made once for all processes, and never read from another encoder's
file."""

import os
import shutil
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from models import directory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import zoo
from compile_cache.source import meaning
from zoo.request import AudioClip, Reference, Request
from zoo.voices import encoded_files
from zoo.voices.encoded_files import FORMAT, MAX_FILES, Encoded, EncodedFile, EncodedFiles, encoder_key
from zoo.voices.references import References, content

CLONERS = {
    "qwen3_tts": "tiny-base",
    "voxcpm2": "tiny",
    "higgs_v3": "tiny",
    "fish_s2": "tiny",
    "cosyvoice2": "tiny",
}
SAMPLES = np.sin(np.arange(24000) ** 1.3 / 30).astype(np.float32) / 4


@dataclass(frozen=True)
class Voice(Encoded):
    codes: Tensor
    speaker: Tensor


VOICE = Voice(torch.arange(12).reshape(4, 3), torch.tensor([0.5, -1.0, 2.0], dtype=torch.bfloat16))


def never():
    raise AssertionError("it was kept, and was encoded again")


@pytest.fixture
def clip(tmp_path):
    return AudioClip(SAMPLES, 24000, kept_in=tmp_path)


def file_of(clip, family="toy", encoder="0123456789abcdef") -> EncodedFile[Voice]:
    file = EncodedFiles(family, encoder).of(clip, content(clip), lambda found: Voice(**found))
    assert file is not None
    return file


def test_another_process_reads_an_encoded_recording(clip):
    References().get(content(clip), lambda: VOICE, file_of(clip))
    assert os.listdir(clip.kept_in) == [f"toy-0123456789abcdef-{content(clip).hex()[:8]}.safetensors"]
    store = References()
    found = store.get(content(clip), never, file_of(clip))
    assert store.num_encoded == 0 and found.tensors().keys() == VOICE.tensors().keys()
    for name, tensor in VOICE.tensors().items():
        assert found.tensors()[name].dtype == tensor.dtype and torch.equal(found.tensors()[name], tensor)


def test_the_file_format_is_as_documented(clip):
    file_of(clip).write(VOICE)
    with safe_open(file_of(clip).path, "pt") as file:
        metadata = file.metadata()
        assert set(file.keys()) == {"codes", "speaker"}
    assert len(metadata.pop("blake2b")) == 32
    assert metadata == {
        "format": FORMAT,
        "version": "1",
        "family": "toy",
        "encoder": "0123456789abcdef",
        "recording": content(clip).hex(),
    }


def test_a_clip_of_a_request_is_not_stored():
    assert EncodedFiles("toy", "0").of(AudioClip(SAMPLES, 24000), b"x", lambda found: Voice(**found)) is None


def damage(path, how):
    content = bytearray(path.read_bytes())
    match how:
        case "empty":
            content = bytearray()
        case "half":
            del content[len(content) // 2 :]
        case "a bit":
            content[-1] ^= 1
        case "no safetensors":
            content = bytearray(b"\xff" * 100)
        case "no metadata":
            save_file(VOICE.tensors(), path)
            return
        case "one tensor more":
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
            save_file(VOICE.tensors() | {"more": torch.zeros(1)}, path, metadata)
            return
    path.write_bytes(content)


@pytest.mark.parametrize(
    "how", ["empty", "half", "a bit", "no safetensors", "no metadata", "one tensor more"]
)
def test_a_damaged_file_is_encoded_again_with_a_warning(clip, caplog, how):
    file_of(clip).write(VOICE)
    damage(file_of(clip).path, how)
    assert file_of(clip).read() is None and "is encoded again" in caplog.text
    store = References()
    assert store.get(content(clip), lambda: VOICE, file_of(clip)) is VOICE and store.num_encoded == 1
    assert torch.equal(file_of(clip).read().codes, VOICE.codes)  # the file was replaced


@pytest.mark.parametrize("other", [{"family": "fish_s2"}, {"encoder": "f" * 16}])
def test_a_file_of_another_encoder_is_not_read_under_any_name(clip, caplog, other):
    theirs = file_of(clip, **other)
    theirs.write(VOICE)
    assert file_of(clip).read() is None and not caplog.text  # the other encoder's file has another name
    os.replace(theirs.path, file_of(clip).path)
    assert file_of(clip).read() is None and f"its {next(iter(other))} is" in caplog.text


def test_a_file_of_another_recording_is_not_read(clip, caplog):
    another = replace(clip, samples=SAMPLES[::-1].copy())
    file_of(another).write(VOICE)
    os.replace(file_of(another).path, file_of(clip).path)
    assert file_of(clip).read() is None and "its recording is" in caplog.text


def test_a_deleted_voice_is_not_an_error(clip):
    gone = replace(clip, kept_in=clip.kept_in / "gone")
    assert References().get(content(gone), lambda: VOICE, file_of(gone)) is VOICE
    assert not gone.kept_in.exists()


def test_the_latest_files_are_kept(clip):
    (clip.kept_in / "voice.safetensors").write_bytes(b"the recording")
    for i in range(MAX_FILES + 3):
        file = file_of(clip, encoder=f"{99 - i:016}")  # the last name is the oldest file's
        file.write(VOICE)
        os.utime(file.path, (i, i))
    file_of(clip, encoder="f" * 16).write(VOICE)
    names = sorted(os.listdir(clip.kept_in))
    assert len(names) == MAX_FILES + 1 and "voice.safetensors" in names
    assert [99 - int(name.split("-")[1]) for name in names[-3::-1]] == list(range(4, MAX_FILES + 3))


def test_settings_weights_and_shapes_identify_an_encoder():
    torch.manual_seed(0)
    linear, same, other = nn.Linear(300, 40), nn.Linear(300, 40), nn.Linear(300, 40)
    same.load_state_dict(linear.state_dict())
    key = encoder_key("fish_s2", (1, 2), linear)
    assert key == encoder_key("fish_s2", (1, 2), same) and len(key) == 16
    keys = {
        key,
        encoder_key("fish_s2", (1, 3), linear),
        encoder_key("higgs_v3", (1, 2), linear),
        encoder_key("fish_s2", (1, 2), other),
        encoder_key("fish_s2", (1, 2), linear.bfloat16()),
        encoder_key("fish_s2", (1, 2)),
    }
    assert len(keys) == 6


@pytest.mark.slow
def test_a_changed_comment_keeps_the_key_of_an_encoder_and_changed_code_does_not(tmp_path, monkeypatch):
    for folder in ("fish_s2", "nn", "kernels", "voices"):
        shutil.copytree(encoded_files.ZOO / folder, tmp_path / folder)
    monkeypatch.setattr(encoded_files, "ZOO", tmp_path)
    # a process keeps what it has read
    monkeypatch.setattr(encoded_files, "meaning_of", lambda file: meaning(file.read_bytes()))
    key = encoder_key("fish_s2", ())
    for file in ("fish_s2/encoder.py", "nn/conv.py", "kernels/cpu.py", "voices/references.py"):
        source = (tmp_path / file).read_text()
        (tmp_path / file).write_text('"""Another docstring."""\n# a comment\n' + source.split('"""', 2)[2])
        assert encoder_key("fish_s2", ()) == key
        (tmp_path / file).write_text(source + "\nNUMBER = 1\n")
        assert encoder_key("fish_s2", ()) != key
        (tmp_path / file).write_text(source)


@pytest.mark.parametrize("name", CLONERS)
def test_every_family_speaks_the_same_from_file_and_recording(name, clip, monkeypatch):
    where = directory(name, CLONERS[name])
    reference = Reference(clip, "What I say.")
    request = Request(text="Good morning.", references=(reference,), seed=1, max_frames=4)
    first = zoo.load(where, "cpu", "float32")
    asked = first.prompt(request)
    [file] = clip.kept_in.iterdir()
    assert file.name.startswith(f"{name}-")
    monkeypatch.setattr(EncodedFile, "write", lambda *_: never())
    second = zoo.load(where, "cpu", "float32")
    again = second.prompt(request)
    assert again.prefix_keys == asked.prefix_keys and torch.equal(again.inputs, asked.inputs)
    speech, same = zoo.generate(first, request), zoo.generate(second, request)
    assert torch.equal(speech.frames, same.frames) and torch.equal(speech.samples, same.samples)
