"""The tiny codec: streamed audio equals one-shot audio, and the encoder is causal. The published names and
shapes are checked too."""

import copy
import hashlib
from functools import partial

import pytest
import torch
from one_pass import decode
from torch._dynamo.decorators import mark_unbacked

from zoo.checkpoint.loading import load, published
from zoo.checkpoint.synthetic import write_tensors
from zoo.nn.mimi_encoder import Encoder
from zoo.nn.vq import SplitVQ
from zoo.qwen3_tts import weights
from zoo.qwen3_tts.codec import Codec, DecoderConfig
from zoo.qwen3_tts.demo import CODEC, TINY_CODEC, fill
from zoo.qwen3_tts.encoder import EncoderConfig

# Source: hashes of the published file's header, from kadirnar/voicehub,
# voicehub/models/qwen3tts/native/metadata.py.
FINGERPRINTS = {
    "": (496, "b0493e243c89bbf06ef06ecf80e2a06152fcf2802add4da2915992db4de3542e"),
    "encoder.": (225, "5e8d7354d9c30a170d083126d8f73ed15e48395cc12814f1eb9cabe8a320e6e2"),
    "decoder.": (271, "804f87cf403a839dd152466b8a53afaef776aacfdf90b6ad0f246534d9c5d5c9"),
}
FRAMES = 53  # in a stream; the tiny window is 6


def configs(config):
    return DecoderConfig.from_json(config), EncoderConfig.from_json(config)


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    """A tiny codec with random weights. The decoder is in fp64, the encoder in fp32."""
    directory = tmp_path_factory.mktemp("codec")
    decoder, encoder = configs(TINY_CODEC)
    with torch.device("meta"):
        codec = Codec(decoder, encoder).eval()
    table = weights.codec(decoder, encoder)
    write_tensors(
        directory / "model.safetensors", published(codec, table), partial(fill, seed=0), torch.float32
    )
    load(codec, table, directory, torch.device("cpu"), torch.float32)
    codec.decoder.double().prepare()
    return codec.requires_grad_(False)


def random_codes(*shape):
    return torch.randint(TINY_CODEC["decoder_config"]["codebook_size"], shape)


def fresh(decoder, batch):
    return torch.zeros(batch, decoder.state_size, dtype=decoder.dtype), torch.zeros(batch, dtype=torch.int64)


def one_shot(decoder, codes):
    past, start = fresh(decoder, codes.shape[0])
    return decode(decoder, codes, past, start, torch.full_like(start, codes.shape[1]))[0]


def test_names_and_shapes_are_the_published_ones():
    decoder, encoder = configs(CODEC)
    with torch.device("meta"):
        codec = Codec(decoder, encoder)
    assert not list(codec.buffers())
    shapes = published(codec, weights.codec(decoder, encoder))
    for prefix, (count, fingerprint) in FINGERPRINTS.items():
        rows = sorted(
            f"{name}|F32|{'x'.join(map(str, shape))}"
            for name, shape in shapes.items()
            if name.startswith(prefix)
        )
        assert (len(rows), hashlib.sha256("\n".join(rows).encode()).hexdigest()) == (count, fingerprint)
    # keys and values of 8 layers, the ends of the plain convolutions' inputs, and the last inputs of the
    # transposed ones
    assert codec.decoder.state_size == 8 * 71 * 2 * 1024 + (2 * 512 + 18 * 1024 + 78 * 1440 + 6 * 96) + 2880


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [(1,), (2,), (4,), (25,), (1, 4, 25), (60,)])
def test_streamed_equals_one_shot(codec, shapes):
    """Three streams get different numbers of frames per call, sometimes none. Random frames follow the valid
    ones. Then three new streams reuse the rows."""
    decoder = codec.decoder
    torch.manual_seed(1)
    for _ in range(2):
        codes = random_codes(3, FRAMES, 16)
        whole = one_shot(decoder, codes)
        assert whole.shape == (3, FRAMES * decoder.config.frame_samples)
        assert whole.std() > 0.01 and whole.abs().max() < 1
        past, start = fresh(decoder, 3)
        parts = [[] for _ in range(3)]
        calls = 0
        while (start < FRAMES).any():
            frames = shapes[calls % len(shapes)]
            wish = torch.tensor([frames, calls % (frames + 1), max(frames - 1, calls % 2)])
            count = torch.minimum(wish, FRAMES - start)
            part = random_codes(3, frames, 16)
            for b in range(3):
                part[b, : count[b]] = codes[b, start[b] : start[b] + count[b]]
            samples, past = decode(decoder, part, past, start, count)
            for b in range(3):
                parts[b].append(samples[b, : count[b] * decoder.config.frame_samples])
            start, calls = start + count, calls + 1
        for b in range(3):
            torch.testing.assert_close(torch.cat(parts[b]), whole[b], rtol=0, atol=1e-10)


def test_a_call_without_valid_frames_leaves_the_state_unchanged(codec):
    torch.manual_seed(2)
    past = torch.randn(2, codec.decoder.state_size, dtype=torch.float64)
    _, after = decode(codec.decoder, random_codes(2, 4, 16), past, torch.tensor([9, 3]), torch.tensor([0, 2]))
    assert torch.equal(after[0], past[0]) and not torch.equal(after[1], past[1])


@pytest.mark.parametrize(("window", "last"), [(5, 20), (6, 22), (FRAMES, FRAMES - 1)])
def test_decoder_looks_back_exactly_one_window(codec, window, last):
    """`last` is the last frame that the first one affects: 2 frames through the first convolution, window - 1
    through each of two layers, and 10 through the other convolutions."""
    config = copy.deepcopy(TINY_CODEC)
    config["decoder_config"]["sliding_window"] = window
    decoder = Codec(*configs(config)).decoder.double().eval().requires_grad_(False)
    table = codec.decoder.quantizer.table.flatten(0, 1)  # prepare() freed what it is made of
    rows = {"quantizer.sums": table, "quantizer.usage": table.new_ones(len(table))}
    decoder.load_state_dict(codec.decoder.state_dict() | rows)
    decoder.prepare()
    torch.manual_seed(3)
    codes = random_codes(1, FRAMES, 16)
    other = codes.clone()
    other[:, 0] = (codes[:, 0] + 1) % 64
    changed = (one_shot(decoder, codes) != one_shot(decoder, other)).unflatten(1, (FRAMES, -1)).any(-1)[0]
    assert changed.nonzero().max() == last


def test_decoder_masks_the_zeros_before_a_stream(codec):
    """Zeros after the start of the stream are not masked."""
    decoder = codec.decoder
    codes = random_codes(1, 1, 16).expand(2, -1, -1)
    past, _ = fresh(decoder, 2)
    samples, _ = decode(decoder, codes, past, torch.tensor([0, 5]), torch.tensor([1, 1]))
    assert (samples[0] - samples[1]).abs().max() > 1e-4


@pytest.mark.compile
def test_one_graph_for_every_batch_size(codec):
    decoder = codec.decoder

    def arguments(batch):
        past = torch.randn(batch, decoder.state_size, dtype=torch.float64)
        return random_codes(batch, 4, 16), past, torch.arange(batch), torch.arange(batch) % 5

    compiled = torch.compile(partial(decode, decoder), fullgraph=True, backend="eager")
    first = arguments(3)
    for tensor in first:
        mark_unbacked(tensor, 0, shape_id="batch")
    compiled(*first)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (1, 2, 7):
            values = arguments(batch)
            for ours, plain in zip(compiled(*values), decode(decoder, *values), strict=True):
                torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("samples", [1, 960, 1919, 1920, 1921, 40000])
def test_encoder_rounds_up_to_whole_frames(codec, samples):
    codes = codec.encoder(torch.randn(2, samples))
    assert codes.shape == (2, -(-samples // 1920), 16)
    assert codes.dtype == torch.int64 and codes.min() >= 0 and codes.max() < 64


def test_encoder_is_causal(codec):
    torch.manual_seed(4)
    audio = torch.randn(1, 20 * 1920)
    whole = codec.encoder(audio)
    assert len(whole.unique()) > 30
    for frames in (1, 7, 19):
        assert torch.equal(codec.encoder(audio[:, : frames * 1920]), whole[:, :frames])
    # a partial last frame, and its padding
    padded = torch.cat((audio[:, : 7 * 1920 + 500], torch.zeros(1, 5000)), 1)
    assert torch.equal(codec.encoder(padded)[:, :7], whole[:, :7])


def test_encoder_reads_the_whole_past_or_a_window(codec):
    """The codes are the same up to the length of the window (10 positions, two per frame) and differ
    later."""
    torch.manual_seed(5)
    audio = torch.randn(1, 40 * 1920)
    windowed = Encoder(codec.encoder.config, 24_000)
    windowed.load_state_dict(codec.encoder.state_dict())
    whole, near = codec.encoder(audio), windowed(audio)
    assert torch.equal(whole[:, :5], near[:, :5])
    assert not torch.equal(whole, near)


def test_a_codebook_row_with_zero_usage_is_finite():
    """A row that training never used is divided by 1e-5 instead of zero."""
    quantizer = SplitVQ(2, 2, 4, 3, 5).requires_grad_(False)
    quantizer.sums.fill_(2e-5)
    quantizer.usage.copy_(torch.tensor([0.0, 1e-5, 2e-5, 1.0] * 2))
    quantizer.prepare()
    torch.testing.assert_close(quantizer.table[1, :, 0], torch.tensor([2.0, 2.0, 1.0, 2e-5]))


@pytest.mark.parametrize("block", ["decoder_config", "encoder_config"])
def test_errors_name_a_missing_key(block):
    read = DecoderConfig if block == "decoder_config" else EncoderConfig
    for key in ("hidden_size", "sliding_window", "num_quantizers"):
        config = copy.deepcopy(CODEC)
        del config[block][key]
        with pytest.raises(ValueError, match=f"{block} has no '{key}'"):
            read.from_json(config)
    with pytest.raises(ValueError, match=f"has no '{block}'"):
        read.from_json({})


@pytest.mark.parametrize(
    ("block", "key", "value", "message"),
    [
        ("decoder_config", "upsample_rates", [8, 5, 4], "^speech_tokenizer/config.json: .*=1920; .* 640"),
        ("decoder_config", "num_key_value_heads", 8, "only num_attention_heads, 16, is supported"),
        ("encoder_config", "upsampling_ratios", [8, 6, 5], "encode_downsample_rate=1920; .* 480"),
        ("encoder_config", "num_key_value_heads", 4, "only num_attention_heads, 8, is supported"),
        ("encoder_config", "use_causal_conv", False, "use_causal_conv=False; only True is known"),
    ],
)
def test_unsupported_configs_are_refused(block, key, value, message):
    config = copy.deepcopy(CODEC)
    config[block][key] = value
    read = DecoderConfig if block == "decoder_config" else EncoderConfig
    with pytest.raises(ValueError, match=message):
        read.from_json(config)
