"""Run the reference implementation of Chatterbox, for `zoo bench --against reference` and `zoo parity`.

serving/tools/reference.py starts this file as a script, in a separate environment that
tests/parity/environments.sh builds. It is chatterbox-tts 0.1.7 with its own classes, at the sizes of the
checkpoint, in fp32: it has no other way. It generates one text at a time and renders it when all codes are
there, so `streams` texts run one after the other.

Three things are replaced. The watermark is left out. The multilingual model has what newer releases of the
original have: no alignment analyser, another repetition penalty, and no samples of the last code. A clip's
gain is a Python float, as with NumPy 1, for which the original was made.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import librosa
import numpy as np
import torch
from torch import Tensor

from zoo.chatterbox.config import VOICE_ENCODER_FILES, Config, open_first, open_s3gen, open_t3
from zoo.checkpoint.tensor_files import TensorFile
from zoo.nn.s3.sizes import FRAME_SAMPLES, NUM_CODES
from zoo.reference_script import answer, speed


class NoWatermark:
    def apply_watermark(self, samples: np.ndarray, sample_rate: int) -> np.ndarray:
        return samples


sys.modules["perth"] = types.ModuleType("perth")
vars(sys.modules["perth"])["PerthImplicitWatermarker"] = NoWatermark

import pyloudnorm  # noqa: E402
import s3tokenizer.model_v2 as s3_model  # noqa: E402
from chatterbox import ChatterboxMultilingualTTS, ChatterboxTTS, mtl_tts, tts, tts_turbo  # noqa: E402
from chatterbox.models.s3gen import hifigan, s3gen  # noqa: E402
from chatterbox.models.t3 import T3  # noqa: E402
from chatterbox.models.t3.llama_configs import LLAMA_CONFIGS  # noqa: E402
from chatterbox.models.t3.modules import cond_enc  # noqa: E402
from chatterbox.models.t3.modules.perceiver import Perceiver  # noqa: E402
from chatterbox.models.t3.modules.t3_config import T3Config  # noqa: E402
from chatterbox.models.tokenizers import EnTokenizer, MTLTokenizer  # noqa: E402
from chatterbox.models.tokenizers import tokenizer as tokenizer_module  # noqa: E402
from chatterbox.models.voice_encoder import VoiceEncoder  # noqa: E402

NAME = "chatterbox-tts 0.1.7"
NEW_PENALTY = 1.2  # of the multilingual model: resemble-ai/chatterbox at 5de7a54, mtl_tts.py
RATE_HZ, MELS = 24_000, 80
SMALLEST = 1e-30  # stands for a cfg_weight of 0, with which the reference fails


def tensors(file: TensorFile) -> dict[str, Tensor]:
    return {name: file.read(name) for name in file.headers}


def make_t3(directory: Path, config: Config) -> T3:
    """Return T3 at the sizes of the checkpoint."""
    sizes, hp = config.t3, T3Config(config.t3.text_vocab)
    known: dict[str, Any] = {"hidden_size": sizes.hidden}
    if sizes.is_gpt2:
        hp.llama_config_name, hp.input_pos_emb = "GPT2_medium", None
        hp.speech_tokens_dict_size, hp.speech_cond_prompt_len = sizes.num_outputs, 375
        hp.use_perceiver_resampler = hp.emotion_adv = False
        known |= {
            "n_embd": sizes.hidden,
            "n_head": sizes.heads,
            "n_layer": sizes.layers,
            "n_inner": sizes.inner,
        }
        known |= {"n_positions": sizes.positions, "n_ctx": sizes.positions, "vocab_size": sizes.text_vocab}
    else:
        hp.max_text_tokens, hp.max_speech_tokens = sizes.text_positions - 2, sizes.speech_positions - 4
        heads = {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads}
        known |= heads | {"intermediate_size": sizes.inner, "num_hidden_layers": sizes.layers}
    perceiver = partial(Perceiver, sizes.queries, sizes.hidden, sizes.hidden)
    entry = LLAMA_CONFIGS[hp.llama_config_name] | known
    with (
        patch.dict(LLAMA_CONFIGS, {hp.llama_config_name: entry}),
        patch.object(cond_enc, "Perceiver", perceiver),
    ):
        t3 = T3(hp)
    t3.load_state_dict(tensors(open_t3(directory)))
    return t3.eval()


def make_s3gen(directory: Path, config: Config) -> s3gen.S3Token2Wav:
    """Return S3Gen at the sizes of the checkpoint: its classes get other arguments."""
    flow, vocoder, tokenizer = config.flow, config.vocoder, config.tokenizer

    def smaller(name: str, **sizes: Any) -> Any:
        original = getattr(s3gen, name)
        return patch.object(s3gen, name, lambda *args, **given: original(*args, **(given | sizes)))

    codes = s3_model.ModelConfig(tokenizer.mels, 1500, tokenizer.width, tokenizer.heads, tokenizer.layers)
    plain = s3_model.S3TokenizerV2.__init__
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(s3_model.S3TokenizerV2, "__init__", lambda self, name, *_: plain(self, name, codes))
        )
        encoder = {"attention_heads": flow.heads, "linear_units": flow.inner, "num_blocks": flow.layers}
        stack.enter_context(smaller("UpsampleConformerEncoder", **encoder))
        estimator = {
            "channels": [flow.channels],
            "num_heads": flow.estimator_heads,
            "n_blocks": flow.num_blocks,
        }
        stack.enter_context(smaller("ConditionalDecoder", **estimator, num_mid_blocks=flow.num_mid))
        stack.enter_context(smaller("ConvRNNF0Predictor", cond_channels=vocoder.f0_channels))
        heard = {"base_channels": vocoder.channels, "nb_harmonics": vocoder.harmonics - 1}
        stack.enter_context(smaller("HiFTGenerator", **heard))
        model = s3gen.S3Token2Wav(meanflow=config.is_turbo)
    file = open_s3gen(directory)
    missing = set(model.load_state_dict(tensors(file), strict=False).missing_keys)
    assert missing <= {"tokenizer.window", "tokenizer._mel_filters"}, f"{file.path} lacks {sorted(missing)}"
    return model.eval()


class Model:
    """A directory, loaded by the reference's classes."""

    def __init__(self, directory: Path):
        self.config = Config.read(directory)
        self.directory = directory
        t3, codes_to_samples = make_t3(directory, self.config), make_s3gen(directory, self.config)
        voice_encoder = VoiceEncoder()
        voice_encoder.load_state_dict(tensors(open_first(directory, *VOICE_ENCODER_FILES)))
        kinds: dict[str, Any] = {"english": tts, "multilingual": mtl_tts, "turbo": tts_turbo}
        module = kinds[self.config.kind]
        conds = directory / "conds.pt"
        self.voice = module.Conditionals.load(conds) if conds.exists() else None
        classes = {"english": ChatterboxTTS, "multilingual": ChatterboxMultilingualTTS}
        wanted = classes.get(self.config.kind, tts_turbo.ChatterboxTurboTTS)
        parts = t3, codes_to_samples, voice_encoder.eval(), make_tokenizer(directory, self.config), "cpu"
        self.tts = wanted(*parts, conds=self.voice)
        self.codes = torch.zeros(0, dtype=torch.int64)

    def prepare(self, request: dict[str, Any]) -> None:
        """Take the voice of a request."""
        if not request["references"]:
            self.tts.conds = self.voice
            return
        clip = np.load(request["references"][0]["clip"])
        samples, rate_hz = np.atleast_2d(clip["samples"]).mean(0), int(clip["rate_hz"])

        def load(path: str, sr: int) -> tuple[np.ndarray, int]:
            return librosa.resample(samples, orig_sr=rate_hz, target_sr=sr), sr

        loudness = pyloudnorm.Meter.integrated_loudness
        with (
            patch.object(librosa, "load", load),
            patch.object(pyloudnorm.Meter, "integrated_loudness", lambda *given: float(loudness(*given))),
        ):
            self.tts.prepare_conditionals("", exaggeration=request["options"].get("exaggeration", 0.5))

    def speak(self, request: dict[str, Any]) -> Tensor:
        """Return samples [N] with the prepared voice; the codes are kept in `codes`."""
        given: dict[str, Any] = dict(request["options"])
        if self.config.is_turbo:
            limit = {"max_gen_len": request["max_frames"] - 1}
        else:
            given["cfg_weight"] = given.get("cfg_weight", 0.5) or SMALLEST
            limit = {"max_new_tokens": request["max_frames"]}
        if self.config.kind == "multilingual":
            given = {"repetition_penalty": NEW_PENALTY} | given
            given["language_id"] = request["language"] or None
        if (temperature := request.get("temperature")) is not None:
            given["temperature"] = temperature or 1.0
        with self._limited(limit), quiet():
            return self.tts.generate(request["text"], **given)[0]

    @contextmanager
    def _limited(self, limit: dict[str, int]) -> Iterator[None]:
        """Make the reference draw only as many ids as `limit` says, and keep its codes."""
        t3, name = self.tts.t3, "inference_turbo" if self.config.is_turbo else "inference"
        draw, render = getattr(t3, name), self.tts.s3gen.inference

        def inference(speech_tokens: Tensor, **given: Any) -> Any:
            self.codes = speech_tokens.flatten()
            return render(speech_tokens=speech_tokens, **given)

        with (
            patch.object(t3, name, lambda **given: draw(**(given | limit))),
            patch.object(self.tts.s3gen, "inference", inference),
            patch.object(T3Config, "is_multilingual", False),
        ):
            yield


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the reference's progress off the standard output, whose last line is the answer."""
    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield


def make_tokenizer(directory: Path, config: Config) -> Any:
    if config.kind == "english":
        return EnTokenizer(str(directory / config.tokenizer_file))
    if config.kind == "multilingual":
        local = str(directory / "Cangjie5_TC.json")
        with patch.object(tokenizer_module, "hf_hub_download", lambda **_: local):
            tokenizer = MTLTokenizer(str(directory / config.tokenizer_file))
        if config.keeps_case:  # as the first release, which had no lower case and no normal form
            tokenizer.preprocess_text = lambda text, **_: text
        return tokenizer
    from transformers import GPT2Tokenizer

    merges: Any = [tuple(line.split()) for line in (directory / "merges.txt").read_text().splitlines()[1:]]
    tokenizer = GPT2Tokenizer(vocab=json.loads((directory / "vocab.json").read_text()), merges=merges)
    tags = json.loads((directory / "added_tokens.json").read_text())
    tokenizer.add_tokens(sorted(tags, key=tags.__getitem__))
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def likeliest(weights: Tensor, num_samples: int) -> Tensor:
    """Replace torch.multinomial."""
    return weights.argmax(-1, keepdim=True)


@contextmanager
def noise_of(start: Tensor, source: Tensor) -> Iterator[None]:
    """Replace all random numbers of S3Gen: by where the flow starts from [2F, MELS], by the noise of the
    source [960 F, H], and otherwise by zeros."""
    harmonics = source.shape[1]

    def like(tensor: Tensor) -> Tensor:
        made = torch.zeros_like(tensor)
        if tensor.shape[1:2] == (MELS,):
            num = min(tensor.shape[2], len(start))
            # the frames of the speech are the last ones; those of the prompt stay zero
            made[:, :, tensor.shape[2] - num :] = start[:num].T
        elif tensor.shape[1] == harmonics:
            made[:] = source[: tensor.shape[2]].T
        return made

    def fresh(*shape: int, **_: Any) -> Tensor:
        return like(torch.zeros(*shape))

    class Still:
        def __init__(self, low: float, high: float):
            pass

        def sample(self, sample_shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(sample_shape)

    with (
        patch.object(torch, "randn_like", like),
        patch.object(torch, "randn", fresh),
        patch.object(hifigan, "Uniform", Still),
    ):
        yield


@torch.inference_mode()
def speak_from(model: Model, request: dict[str, Any], noise: Tensor) -> np.ndarray:
    """Generate a request greedily and return samples [N]. noise [F, 2, MELS + 480 * H]: of flow and
    vocoder."""
    model.prepare(request)
    codes_only = NoRender(model)
    with patch.object(torch, "multinomial", likeliest), codes_only:
        model.speak(request | {"temperature": 1.0})
    model.codes = model.codes[
        model.codes < NUM_CODES
    ]  # the multilingual class leaves the others in, and fails
    num = len(model.codes)
    start, source = noise[:num].flatten(0, 1).split((MELS, noise.shape[-1] - MELS), 1)
    with noise_of(start, source.unflatten(1, (480, -1)).flatten(0, 1)), quiet():
        steps = {"n_cfm_timesteps": 2} if model.config.is_turbo else {}
        samples, _ = model.tts.s3gen.inference(model.codes, ref_dict=model.tts.conds.gen, **steps)
    if model.config.kind == "multilingual":
        samples = samples[:, : FRAME_SAMPLES * max(1, num - 1)]
    return samples[0].numpy()


class NoRender:
    """While it is entered, only codes are drawn."""

    def __init__(self, model: Model):
        self._patch = patch.object(model.tts.s3gen, "inference", lambda **given: (torch.zeros(1, 1), None))

    def __enter__(self) -> None:
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@torch.inference_mode()
def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Time the reference. The voice is encoded before the clock starts; no id ends a speech."""
    model.prepare(request)
    model.tts.t3.hp.stop_speech_token = -1
    model.speak(request | {"max_frames": 4})
    began_s = time.perf_counter()
    samples = sum(len(model.speak(request)) for _ in range(rounds * streams))
    return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]))

    def speak(request: dict[str, Any]) -> np.ndarray:
        return speak_from(model, request, torch.from_numpy(np.load(order["noise"])))

    print(json.dumps(answer(order, NAME, speak, partial(measure, model))))


if __name__ == "__main__":
    main()
