"""VoxCPM2: loading model directories, and the errors for unusable ones.

The reference loads all of these without an error.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from models import change_json, directory, family
from one_pass import decode_latents
from safetensors.torch import load_file, save_file

import zoo
from zoo import AudioClip, Reference, Request
from zoo.nn.resample import resampled
from zoo.voxcpm2 import claims, demo

TINY = directory("voxcpm2", "tiny")


@pytest.fixture
def copied(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        zoo.load(path, "cpu")
    assert "\n" not in str(error.value)


def vae_tensors() -> dict[str, torch.Tensor]:
    return torch.load(TINY / "audiovae.pth", weights_only=True)["state_dict"]


def sounds(path: Path) -> torch.Tensor:
    latents, decoder = torch.linspace(-2, 2, 64).view(1, 8, 8), zoo.load(path, "cpu").vae.decoder
    return decode_latents(decoder, latents, 2)[0]


# valid directories


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architecture": "voxcpm2"}, True),
        ({"architecture": "VoxCPM"}, True),
        ({"model_type": "voxcpm2"}, True),
        ({"residual_lm_no_rope": True}, True),
        ({"model_type": "minicpm"}, False),
        ({}, False),
    ],
)
def test_directories_are_claimed_by_their_config(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert claims(tmp_path) is expected


@pytest.mark.parametrize(
    "change_to", [{"architecture": None}, {"model_type": "voxcpm"}, {"architecture": "VoxCPM2"}]
)
def test_a_re_upload_is_recognised_by_its_content(change_to, copied):
    change_json(copied / "config.json", **change_to)
    assert zoo.load(copied, "cpu").spec.family == "voxcpm2"


def test_inspect_reads_no_weights(tmp_path):
    found = zoo.inspect(demo.write_texts(tmp_path / "model", "full"))
    assert found["parameters"] == 2_290_004_544 + 94_180_097  # as in the published files
    assert (found["sample_rate_hz"], found["frame_rate_hz"], found["kv_bytes_per_audio_s"]) == (
        48000,
        6.25,
        230_400,
    )
    assert found["modes"] == ["voice", "design", "clone"] and found["reference_s"] == [0.16, 60.0]
    assert found["max_audio_s"] == 4096 * 0.16


def test_the_vae_is_read_in_every_form(copied):
    """The forms are a flat pickle, PyTorch's newer names, and safetensors, which takes precedence."""
    tensors, heard = vae_tensors(), sounds(TINY)
    for is_zip in (True, False):
        torch.save(tensors, copied / "audiovae.pth", _use_new_zipfile_serialization=is_zip)
        assert torch.equal(sounds(copied), heard)
    newer = {
        name.replace("weight_g", "parametrizations.weight.original0").replace(
            "weight_v", "parametrizations.weight.original1"
        ): value
        for name, value in tensors.items()
    }
    torch.save({"state_dict": newer}, copied / "audiovae.pth")
    assert torch.equal(sounds(copied), heard)
    save_file(tensors, copied / "audiovae.safetensors")
    (copied / "audiovae.pth").write_bytes(b"")
    assert torch.equal(sounds(copied), heard)


# the first generation


def test_the_first_generation_is_described():
    old = family("voxcpm2", size="tiny-1.5")
    spec = old.spec
    assert (spec.variant, spec.sample_rate_hz, spec.modes, spec.frame_shape) == (
        "voxcpm1.5",
        44100,
        ("voice", "clone"),
        (4, 8),
    )
    assert (
        old.net.fusion is None
        and old.net.residual.rope is not None
        and family("voxcpm2").net.residual.rope is None
    )


def test_the_first_generation_resamples_by_a_windowed_sinc():
    """As by torchaudio, which its own code calls. VoxCPM2's calls librosa."""
    encode = family("voxcpm2", size="tiny-1.5").writer.cloner
    noise = (np.random.default_rng(0).normal(size=4000) / 9).astype(np.float32)
    wide = resampled(torch.from_numpy(noise), 16_000, 44_100).numpy()
    ours, expected = encode(AudioClip(noise, 16_000), False), encode(AudioClip(wide, 44_100), False)
    assert torch.equal(ours.patches, expected.patches)


def test_a_first_generation_with_two_latents_a_patch_in_a_pickle(tmp_path):
    """0.5B has this layout, and its config omits the patch size."""
    path = demo.write(tmp_path / "model", "tiny-1.5", dtype=torch.float32, patch_size=2)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    change_json(path / "config.json", patch_size=None)
    loaded = zoo.load(path, "cpu")
    assert (loaded.spec.frame_shape, loaded.spec.frame_samples) == ((2, 8), 60)
    speech = zoo.generate(loaded, Request(text="hello world", max_frames=5))
    assert speech.frames.shape[1:] == (2, 8) and torch.isfinite(speech.samples).all()
    del tensors["stop_head.weight"]
    torch.save(tensors, path / "pytorch_model.bin")
    refused(path, "missing stop_head.weight")


def test_the_first_generation_refuses_what_it_cannot_do():
    old, clip = (
        family("voxcpm2", size="tiny-1.5"),
        AudioClip(np.sin(np.arange(4000, dtype=np.float32)), 44100),
    )
    for fields, param, message in (
        ({"instructions": "slowly"}, "instructions", r"VoxCPM1\.5 takes no instructions: use VoxCPM2"),
        (
            {"references": (Reference(clip),)},
            "transcript",
            r"a transcript .* needed: VoxCPM1\.5 can only continue a reference",
        ),
        (
            {"references": (Reference(clip), Reference(clip, "a"))},
            "references",
            r"2 .* given; VoxCPM1\.5 takes up to 1",
        ),
        ({"temperature": 0.5}, "temperature", r"VoxCPM1\.5 takes no temperature"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            old.prompt(Request(text="hello", **fields))
        assert error.value.param == param


def test_a_re_upload_without_an_architecture_is_recognised_by_its_other_keys(tmp_path):
    path = demo.write(tmp_path / "model", "tiny-1.5")
    change_json(path / "config.json", architecture=None, model_type="voxcpm2")
    assert zoo.load(path, "cpu").spec.variant == "voxcpm1.5"


# errors


@pytest.mark.parametrize(
    ("block", "values", "message"),
    [
        ("lm_config", {"use_mup": True}, "use_mup=True; only False is known"),
        ("lm_config", {"use_mup": None}, "lm_config has no 'use_mup'"),
        (
            "lm_config",
            {"kv_channels": 8},
            "lm_config has heads of 8 values, but lm_config.rope_scaling has 8 factors",
        ),
        ("lm_config", {"num_attention_heads": 5}, "num_attention_heads=5; a multiple of 2 from 1 to 1024"),
        ("dit_config", {"num_heads": 3}, "dit_config has num_heads=3; a multiple of 2"),
        ("dit_config", {"kv_channels": 32}, "dit_config has heads of 32 values"),
        ("dit_config", {"dit_mean_mode": True}, "dit_mean_mode=True; only null and false are known"),
        ("dit_config", {"cfm_config": {"solver": "heun"}}, "solver='heun'; only 'euler' is known"),
        ("audio_vae_config", {"latent_dim": 16}, "feat_dim=8; audio_vae_config has latent_dim=16"),
        ("audio_vae_config", {"depthwise": False}, "depthwise=False; only True is known"),
        ("audio_vae_config", {"cond_type": "add"}, "cond_type='add'; only 'scale_bias' is known"),
        ("audio_vae_config", {"decoder_rates": [5, 3, 2, 2]}, "a different duration"),
        ("audio_vae_config", {"sr_bin_boundaries": [30000, 20000]}, "they must ascend"),
        (None, {"patch_size": None}, "the root has no 'patch_size'"),
    ],
)
def test_unsupported_configs_are_refused(block, values, message, copied):
    change_json(copied / "config.json", block, **values)
    refused(copied, message)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(name, copied):
    (copied / name).unlink()
    refused(copied, f"{name} does not exist")


def test_a_missing_vae_is_refused(copied):
    (copied / "audiovae.pth").unlink()
    refused(copied, "has neither audiovae.safetensors nor audiovae.pth; one of them is needed")


def test_a_truncated_vae_is_refused(copied):
    path = copied / "audiovae.pth"
    path.write_bytes(path.read_bytes()[:5000])
    refused(copied, "audiovae.pth is not a whole PyTorch file")
    path.write_bytes(b"")
    refused(copied, "audiovae.pth is not a whole PyTorch file")
    torch.save({"state_dict": {"decoder": [1, 2]}}, path)
    refused(copied, "audiovae.pth does not hold tensors by name: 'decoder' is a list")
    torch.save({"state_dict": vae_tensors() | {"step": np.float64(1)}}, path)
    refused(copied, r"audiovae.pth holds more than tensors \(numpy\._?core\.multiarray\.scalar\); only")


@pytest.mark.parametrize(
    ("name", "renamed", "message"),
    [
        ("decoder.model.0.weight_g", None, "missing decoder.model.0.weight_g"),
        (
            "decoder.model.0.bias",
            "decoder.model.0.Bias",
            r"missing decoder.model.0.bias .*unknown decoder.model.0.Bias",
        ),
        (
            "decoder.sr_bin_boundaries",
            None,
            r"has decoder.sr_bin_boundaries \[\], but config.json says \[20000, 30000, 40000\]",
        ),
    ],
)
def test_a_vae_with_wrong_tensors_is_refused(name, renamed, message, copied):
    tensors = vae_tensors()
    value = tensors.pop(name)
    if renamed:
        tensors[renamed] = value
    torch.save({"state_dict": tensors}, copied / "audiovae.pth")
    refused(copied, message)


def test_a_net_with_wrong_tensors_is_refused(copied):
    tensors = load_file(copied / "model.safetensors")
    tensors["residual_lm.layers.0.mlp.up.weight"] = tensors.pop("residual_lm.layers.0.mlp.up_proj.weight")
    save_file(tensors, copied / "model.safetensors")
    refused(
        copied, "missing residual_lm.layers.0.mlp.up_proj.weight .*unknown residual_lm.layers.0.mlp.up.weight"
    )


# demo checkpoints


def test_the_demo_follows_its_seed_and_dtype(tmp_path):
    half, other = demo.write(tmp_path / "half"), demo.write(tmp_path / "other", seed=1)
    full, halved, changed = (
        load_file(path / "model.safetensors")["stop_proj.weight"] for path in (TINY, half, other)
    )
    assert (
        halved.dtype == torch.bfloat16
        and torch.equal(halved, full.bfloat16())
        and not torch.equal(halved, changed)
    )


def test_the_demo_sizes():
    net, vae = zoo.voxcpm2.build(zoo.voxcpm2.config.Config.read(demo.CONFIGS["mid"]))
    assert 130e6 < sum(p.numel() for module in (net, vae) for p in module.parameters()) < 200e6
    assert family("voxcpm2").spec.max_positions == 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "huge"}, "size 'huge' is not known; sizes: tiny, mid, full, tiny-1.5, 1.5, 0.5b"),
        ({"dtype": torch.int8}, "dtype torch.int8 cannot be written"),
        ({"lm_config": {"layers": 1}}, "lm_config has no 'layers'; it has: .*num_hidden_layers"),
        ({"feat_dim": 16}, "feat_dim=16; audio_vae_config has latent_dim=8"),
    ],
)
def test_a_failed_write_names_the_cause_and_leaves_no_files(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        demo.write(tmp_path / "demo", **arguments)
    assert not (tmp_path / "demo").exists()
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(ValueError, match="exists and is not an empty directory"):
        demo.write(tmp_path)
    with pytest.raises(ValueError, match=r"no rule says how to fill 'nothing'"):
        demo.fill("nothing", (1,), seed=0)
