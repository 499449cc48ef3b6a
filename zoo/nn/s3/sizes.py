"""The rates and sizes of the networks around S3 codes."""

from __future__ import annotations

from dataclasses import dataclass

RATE_HZ = 24_000
MELS = 80
NUM_CODES = 6561  # eight base-3 digits from the tokenizer
NUM_UP_LAYERS = 4
GRID = 25  # tokens of a chunk, which all attend to each other
LOOKAHEAD = 3  # tokens after a chunk that the flow's encoder reads
FRAME_SAMPLES, MEL_SAMPLES, TOKEN_FRAMES = 960, 480, 2
MEL_FFT, MEL_TOP_HZ = 1920, 8000.0  # of the mel that the flow reads of a recording


@dataclass(frozen=True)
class EncoderSizes:
    """The sizes of the flow's encoder and of the tables in front of it."""

    num_codes: int
    width: int
    heads: int
    inner: int
    layers: int  # at the token rate; NUM_UP_LAYERS more follow at the frame rate
    speaker: int  # width of the speaker vector


@dataclass(frozen=True)
class FlowSizes(EncoderSizes):
    """The sizes of the flow, which turns codes into mel frames."""

    channels: int  # of the estimator
    estimator_heads: int
    head_dim: int
    num_blocks: int  # transformer blocks per stage
    num_mid: int  # stages between the first and the last
    guidance: float
    is_meanflow: bool = False  # steps are told their end, and rows come alone, without guidance


@dataclass(frozen=True)
class VocoderSizes:
    """The sizes of HiFT, which turns mel frames into samples."""

    channels: int
    harmonics: int  # including the fundamental
    alpha: float  # amplitude of the source's sines
    sigma: float  # amplitude of the source's noise in voiced frames
    voiced_hz: float
    rates: tuple[int, ...]
    kernels: tuple[int, ...]
    fft: int
    hop: int
    resblock_kernels: tuple[int, ...]
    resblock_dilations: tuple[int, ...]
    source_kernels: tuple[int, ...]
    slope: float
    limit: float
    f0_channels: int
    mel_samples: int = MEL_SAMPLES
    rate_hz: int = RATE_HZ


def vocoder_sizes(channels: int = 512, harmonics: int = 9, f0_channels: int = 512) -> VocoderSizes:
    """Return the sizes of a HiFT that no file describes; the other ones are the same in every checkpoint.

    Source: stepaudio2-minicpmo 0.1.1, flashcosyvoice/modules/hifigan.py, HiFTGenerator; chatterbox-tts 0.1.7,
    models/s3gen/hifigan.py.
    """
    return VocoderSizes(
        channels=channels,
        harmonics=harmonics,
        alpha=0.1,
        sigma=0.003,
        voiced_hz=10.0,
        rates=(8, 5, 3),
        kernels=(16, 11, 7),
        fft=16,
        hop=4,
        resblock_kernels=(3, 7, 11),
        resblock_dilations=(1, 3, 5),
        source_kernels=(7, 7, 11),
        slope=0.1,
        limit=0.99,
        f0_channels=f0_channels,
    )


assert FRAME_SAMPLES == TOKEN_FRAMES * MEL_SAMPLES
