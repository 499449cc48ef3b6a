"""The speaker encoder and its mel spectrogram, compared with their definitions. The parity tests compare them
with the reference."""

from __future__ import annotations

import math

import pytest
import torch
from models import family

from zoo.checkpoint.config import ConfigBlock
from zoo.nn.mel import LogMel, slaney_filters
from zoo.qwen3_tts.config import SPEAKER, SpeakerConfig
from zoo.qwen3_tts.speaker import SpeakerEncoder

BASE = family("qwen3_tts", size="tiny-base")
ENCODER = BASE.talker.speaker


# mel


def mel_of(hz: float) -> float:
    return hz * 3 / 200 if hz < 1000 else 15 + 27 * math.log(hz / 1000) / math.log(6.4)


def test_filters_are_triangles_of_equal_area_evenly_spaced_in_mel():
    filters = slaney_filters(24000, 8192, 40)  # bins narrow enough to see the shapes
    hz = torch.linspace(0, 12000, 4097, dtype=torch.float64)
    torch.testing.assert_close(filters.sum(1) * hz[1], torch.ones(40, dtype=torch.float64), rtol=0.02, atol=0)
    tops = [mel_of(float(hz[i])) for i in filters.argmax(1)]
    steps = torch.tensor(tops).diff()
    assert (steps / steps.mean() - 1).abs().max() < 0.1
    assert mel_of(12000) == pytest.approx(tops[-1] + float(steps.mean()), rel=0.02)


@pytest.mark.parametrize("samples", [385, 511, 512, 1280, 24001])
def test_the_mel_has_one_frame_per_whole_hop(samples):
    mel = LogMel(24000, 1024, 256, 128, torch.device("cpu"))
    assert mel(torch.randn(2, samples)).shape == (2, 128, samples // 256)


def test_a_tone_is_loudest_in_its_filter_and_silence_is_the_floor():
    mel = LogMel(24000, 1024, 256, 128, torch.device("cpu"))
    tone = torch.sin(2 * torch.pi * 2000 * torch.arange(24000) / 24000)[None]
    edges = torch.linspace(0, mel_of(12000), 130)
    nearest = int((edges[1:-1] - mel_of(2000)).abs().argmin())
    assert (mel(tone)[0, :, 10:-10].argmax(0) == nearest).all()
    assert (mel(torch.zeros(1, 24000)) == math.log(1e-5)).all()


# encoder


def test_the_speaker_encoder_stays_in_float32():
    rounded = family("qwen3_tts", "bfloat16", size="tiny-base")
    assert {p.dtype for p in rounded.talker.speaker.parameters()} == {torch.float32}
    assert rounded.talker.codec_head.weight.dtype == torch.bfloat16


def test_the_fewest_mel_frames_are_enough():
    least = ENCODER.config.min_frames
    assert least == 5 and ENCODER(torch.randn(2, 128, least)).shape == (2, 32)
    with pytest.raises(RuntimeError, match="Padding size should be less"):
        ENCODER(torch.randn(1, 128, least - 1))


def test_rows_of_a_batch_are_independent():
    mel = torch.randn(3, 128, 40)
    together = ENCODER(mel)
    for row, alone in zip(together, mel.split(1), strict=True):
        torch.testing.assert_close(row, ENCODER(alone)[0], rtol=0, atol=1e-5)
    assert torch.pdist(together).min() > 0.01


# config


def test_keys_missing_from_published_configs_default_to_the_references():
    config = SpeakerConfig.read(ConfigBlock({"enc_dim": 2048, "sample_rate": 24000}), 2048)
    with torch.device("meta"):
        assert sum(p.numel() for p in SpeakerEncoder(config).parameters()) == 12_001_088  # as published, 1.7B
    assert (config.channels, config.parts, config.gate, config.attention) == (
        (512, 512, 512, 512, 1536),
        8,
        128,
        128,
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sample_rate": 24000}, "speaker_encoder_config has no 'enc_dim'"),
        ({"enc_dim": 32}, "speaker_encoder_config has no 'sample_rate'"),
        ({"enc_dim": 32, "sample_rate": 16000}, "sample_rate=16000; only 24000 is known"),
        ({"enc_dim": 64, "sample_rate": 24000}, "enc_dim=64; it must equal the talker's hidden_size, 32"),
        (
            {"enc_dim": 32, "sample_rate": 24000, "enc_res2net_scale": 7},
            "channels do not divide into that many equal parts",
        ),
        (
            {"enc_dim": 32, "sample_rate": 24000, "enc_channels": [512, 256, 512, 512, 1536]},
            "only equal blocks",
        ),
        (
            {"enc_dim": 32, "sample_rate": 24000, "enc_channels": [512, 512, 512, 512, 1024]},
            "only equal blocks",
        ),
        (
            {"enc_dim": 32, "sample_rate": 24000, "enc_dilations": SPEAKER["enc_dilations"][:-1]},
            "and 4 enc_dilations; only equal blocks",
        ),
    ],
)
def test_inconsistent_configs_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        SpeakerConfig.read(ConfigBlock(config, "speaker_encoder_config"), 32)
