"""HiFT's block of a published yaml."""

from __future__ import annotations

from math import prod

from zoo.checkpoint.config import KERNEL, STRIDE, WIDTH, ConfigBlock
from zoo.nn.s3.sizes import MELS, VocoderSizes

DILATIONS = [1, 3, 5]


def read_vocoder(block: ConfigBlock, rate_hz: int, mel_samples: int, num_stages: int) -> VocoderSizes:
    """Return HiFT's sizes. Raises ValueError for a missing, out-of-range or unsupported value."""
    block.expect(in_channels=MELS, sampling_rate=rate_hz, resblock_dilation_sizes=[DILATIONS] * 3)
    block.expect(source_resblock_dilation_sizes=[DILATIONS] * num_stages)
    istft, f0 = block.block("istft_params"), block.block("f0_predictor")
    f0.expect(num_class=1, in_channels=MELS)
    hop = istft.integer("hop_len", 1, 64)
    fft = istft.integer("n_fft", 4, 1024, step=4 * hop)
    if fft != 4 * hop:
        raise istft.refuse("n_fft", f"only {4 * hop}, four times hop_len, is supported")
    rates, kernels = _stages(block, hop, mel_samples, (num_stages, num_stages))
    return VocoderSizes(
        channels=block.integer("base_channels", *WIDTH, step=1 << num_stages),
        harmonics=block.integer("nb_harmonics", 0, 64) + 1,
        alpha=block.number("nsf_alpha", 0.0, 1.0),
        sigma=block.number("nsf_sigma", 0.0, 1.0),
        voiced_hz=block.number("nsf_voiced_threshold", 0.0, 1e4),
        rates=rates,
        kernels=kernels,
        fft=fft,
        hop=hop,
        resblock_kernels=block.integers("resblock_kernel_sizes", *KERNEL, lengths=(3, 3)),
        resblock_dilations=tuple(DILATIONS),
        source_kernels=block.integers(
            "source_resblock_kernel_sizes", *KERNEL, lengths=(num_stages, num_stages)
        ),
        slope=block.number("lrelu_slope", 0.0, 1.0),
        limit=block.number("audio_limit", 0.0, 1.0),
        f0_channels=f0.integer("cond_channels", *WIDTH),
        mel_samples=mel_samples,
        rate_hz=rate_hz,
    )


def _stages(
    block: ConfigBlock, hop: int, mel_samples: int, lengths: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rates and the kernels of the upsampling. Raises ValueError."""
    rates = block.integers("upsample_rates", *STRIDE, lengths=lengths)
    kernels = block.integers("upsample_kernel_sizes", *KERNEL, lengths=lengths)
    if (product := prod(rates) * hop) != mel_samples:
        what = f"together with a hop of {hop} their product is {product}; it must be {mel_samples}"
        raise block.refuse("upsample_rates", what)
    if any(kernel < rate or (kernel - rate) % 2 for kernel, rate in zip(kernels, rates, strict=True)):
        raise block.refuse(
            "upsample_kernel_sizes", f"each must exceed its rate of {list(rates)} by an even number"
        )
    return rates, kernels
