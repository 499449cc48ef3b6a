"""The codec of Qwen3-TTS compared with the reference implementation, in float32: codec.safetensors, which
oracle_qwen3_tts.py makes."""

import json
from pathlib import Path

import pytest
import torch
from one_pass import decode
from safetensors.torch import load_file

from zoo.checkpoint.json_files import read_json
from zoo.checkpoint.loading import load
from zoo.qwen3_tts import weights
from zoo.qwen3_tts.codec import Codec, DecoderConfig
from zoo.qwen3_tts.demo import write
from zoo.qwen3_tts.encoder import EncoderConfig

HERE = Path(__file__).parent / "qwen3_tts"
FACTS = json.loads((HERE / "codec.json").read_text())
FOUND = load_file(HERE / "codec.safetensors")


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    directory = (
        write(tmp_path_factory.mktemp("demo") / "tiny", FACTS["size"], FACTS["seed"]) / "speech_tokenizer"
    )
    config = read_json(directory / "config.json")
    configs = DecoderConfig.from_json(config), EncoderConfig.from_json(config)
    with torch.device("meta"):
        codec = Codec(*configs).eval()
    load(codec, weights.codec(*configs), directory, torch.device("cpu"), torch.float32)
    codec.decoder.prepare()
    return codec.requires_grad_(False)


def output_of(module, call):
    """Return the output of `module` during `call()`, and the result of `call()`."""
    seen = []
    hook = module.register_forward_hook(lambda module, args, output: seen.append(output))
    result = call()
    hook.remove()
    (inner,) = seen
    return inner, result


def test_codebooks_equal_the_reference(codec):
    theirs = codec.encoder.module.quantizer
    first, rest = theirs.semantic_residual_vector_quantizer, theirs.acoustic_residual_vector_quantizer
    for k, layer in ((0, first.layers[0]), (15, rest.layers[14])):
        assert torch.equal(layer.codebook.embed, FOUND[f"encoder.codebook_{k}"])
        assert torch.equal(codec.decoder.quantizer.table[k], FOUND[f"decoder.codebook_{k}"])


@pytest.mark.parametrize("frames", [1, 7, 40, 120])  # the window is 6
def test_the_decoder_equals_the_reference(codec, frames):
    """Measured: transformer 2e-6, samples 2e-5. In float64 both agree to 1e-14, so this is rounding."""
    codes = FOUND[f"decode_{frames}.codes"].long()[None]
    past, start = torch.zeros(1, codec.decoder.state_size), torch.zeros(1, dtype=torch.int64)
    transformer, (samples, _) = output_of(
        codec.decoder.transformer, lambda: decode(codec.decoder, codes, past, start, start + frames)
    )
    torch.testing.assert_close(transformer[0], FOUND[f"decode_{frames}.transformer"], rtol=1e-5, atol=1e-5)
    stride = 1 if frames < 10 else FACTS["stride"]
    torch.testing.assert_close(samples[0, ::stride], FOUND[f"decode_{frames}.samples"], rtol=0, atol=5e-5)


# the last one exceeds the window, which the reference does not apply
@pytest.mark.parametrize("samples", [1920, 3940, 30001])
def test_the_encoder_equals_the_reference(codec, samples):
    audio = FOUND[f"encode_{samples}.audio"].float()[None] / 32768
    latent, codes = output_of(codec.encoder.module.encoder.downsample, lambda: codec.encoder(audio))
    torch.testing.assert_close(latent[0].T, FOUND[f"encode_{samples}.latent"], rtol=1e-5, atol=1e-5)
    assert torch.equal(codes[0], FOUND[f"encode_{samples}.codes"].long())
