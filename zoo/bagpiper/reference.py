"""Bagpiper by ESPnet's own code, as serving/tools/reference.py orders it: for `zoo bench --against reference` and
`zoo parity`. It runs as a script in a separate environment, which tests/parity/environments.sh builds.

Vocabulary, preprocessor, LM, guidance, delay and codec are those of espnet 202611 (espnet2.speechlm), body, codec and
audio encoder transformers'. Packages of ESPnet are replaced by empty ones, because they would import the trainer;
so are torchaudio, whose resampling these requests do not need, and a kernel that only training needs. The text is
tokenized by the checkpoint's own tokenizer.json.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, XcodecConfig, XcodecModel

from zoo.bagpiper.config import (
    BACKBONE,
    CODEC,
    DELAY,
    FIRST_WORD,
    SAMPLE_RATE_HZ,
    STREAMS,
    Config,
    TowerConfig,
    find_tokenizer,
    find_weights,
)
from zoo.checkpoint.tensor_files import contents, open_file
from zoo.nn.resample import Resample
from zoo.reference_script import answer, speed

NAME = "ESPnet SpeechLM 202611"
SPECIAL = re.compile(r"<\|.*\|>")  # a converted tokenizer.json does not mark them
SOURCES = Path(sys.prefix) / "espnet" / "espnet2"
for name in (
    "",
    ".speechlm",
    ".speechlm.model",
    ".speechlm.model.speechlm",
    ".speechlm.model.speechlm.lm",
    ".speechlm.model.speechlm.multimodal_io",
    ".speechlm.utils",
):
    package = ModuleType(f"espnet2{name}")
    package.__path__ = [str(SOURCES.joinpath(*name.strip(".").split(".")))]
    sys.modules[package.__name__] = package
STUBS: dict[str, dict[str, Any]] = {
    "torchaudio": {},
    "liger_kernel": {},
    "liger_kernel.ops": {},
    "liger_kernel.ops.fused_linear_cross_entropy": {"LigerFusedLinearCrossEntropyFunction": None},
    "espnet2.speechlm.model.speechlm.lm.parallel_pp": {"ParallelPPHFModel": None},
    "espnet2.speechlm.model.abs_job": {"AbsJobTemplate": object},
    "espnet2.speechlm.model.speechlm.task_conf_speechlm": {"SPEECHLM_TASK_CONFIGS": {}},
}
for name, content in STUBS.items():
    stub = ModuleType(name)
    vars(stub).update(content)
    sys.modules[name] = stub

lm = importlib.import_module("espnet2.speechlm.model.speechlm.lm.parallel")
audio: Any = importlib.import_module("espnet2.speechlm.model.speechlm.multimodal_io.audio")
abs_io: Any = importlib.import_module("espnet2.speechlm.model.speechlm.multimodal_io.abs_io")
job = importlib.import_module("espnet2.speechlm.model.speechlm.speechlm_job")


class OverError(BaseException):
    """The answer has all its parts. ESPnet would begin another one behind an <|eot|>."""


class Parts(list[str]):
    """The modalities of an answer, and nothing behind them."""

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise OverError
        return super().__getitem__(index)


class TextIO(abs_io.AbsIO):
    """ESPnet's text input and output, with a tokenizer from a file instead of a repository."""

    def __init__(self, path: Path, config: Config):
        super().__init__(modality="text", is_discrete=True)
        self.tokenizer, self.rows = Tokenizer.from_file(str(path)), config.num_words
        self.shift = FIRST_WORD if config.is_converted else 0
        self.decoded: list[torch.Tensor] = []

    def preprocess(self, data: str) -> tuple[np.ndarray, None, np.ndarray]:
        ids = np.array(self.tokenizer.encode(data).ids, np.int32).reshape(-1, 1) - self.shift
        return ids, None, np.ones_like(ids, np.float32)

    def decode_batch(self, tokens: torch.Tensor, lengths: torch.Tensor) -> list[str]:
        self.decoded += [row[:length, 0].clone() for row, length in zip(tokens, lengths, strict=True)]
        return [""] * len(tokens)

    def text_of(self, words: torch.Tensor) -> str:
        """Return the text of words [W], special tokens skipped."""
        ids = [int(word) + self.shift for word in words]
        tokens = {id: self.tokenizer.id_to_token(id) or "" for id in ids}
        return self.tokenizer.decode([id for id in ids if not SPECIAL.fullmatch(tokens[id])])

    def copy_for_worker(self) -> TextIO:
        return self

    def num_stream(self) -> int:
        return 1

    def get_vocabulary(self) -> list[str]:
        return [f"word {i}" for i in range(self.rows)]

    def get_stream_interval(self) -> list[tuple[int, int]]:
        return [(0, self.rows)]

    def get_stream_weight(self) -> list[float]:
        return [1.0]


def read(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    path = find_weights(directory)
    assert path is not None, f"{directory} has no weights"
    headers = contents(path)
    files = {where: open_file(where) for where in {header.path for header in headers.values()}}
    return {name: files[header.path].read(name) for name, header in headers.items()}


def xcodec_config(tensors: dict[str, torch.Tensor], config: Config) -> XcodecConfig:
    """Return the codec's config, from the shapes of its tensors."""
    codec = config.codec
    encoder = tensors[f"{CODEC}.acoustic_encoder.conv1.weight"].shape[0]
    hidden = tensors[f"{CODEC}.fc1.weight"].shape[0]
    prefix = f"{CODEC}.semantic_model.encoder.layers."
    layers = {name.removeprefix(prefix).split(".")[0] for name in tensors if name.startswith(prefix)}
    convs = f"{CODEC}.semantic_model.feature_extractor.conv_layers."
    inner = tensors[f"{prefix}0.feed_forward.intermediate_dense.weight"].shape[0]
    bits = (codec.num_codes - 1).bit_length()
    rates = list(codec.rates)
    return XcodecConfig(
        target_bandwidths=[STREAMS * 50 * bits / 1000],
        codebook_size=codec.num_codes,
        codebook_dim=codec.width,
        acoustic_model_config={
            "model_type": "dac",
            "encoder_hidden_size": encoder,
            "downsampling_ratios": rates,
            "decoder_hidden_size": codec.channels,
            "upsampling_ratios": rates,
            "hidden_size": codec.latent,
        },
        semantic_model_config={
            "model_type": "hubert",
            "hidden_size": hidden,
            "num_hidden_layers": len(layers),
            "num_attention_heads": 12 if hidden == 768 else 4,
            "intermediate_size": inner,
            "conv_dim": [tensors[f"{convs}{i}.conv.weight"].shape[0] for i in range(7)],
        },
    )


class Thinker(torch.nn.Module):
    """The audio encoder with the interface of Qwen3-Omni's thinker, which releases of transformers moved."""

    def __init__(self, tower: TowerConfig):
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

        super().__init__()
        sizes = omni.Qwen3OmniMoeAudioEncoderConfig(
            num_mel_bins=tower.mels,
            d_model=tower.width,
            encoder_ffn_dim=tower.inner,
            encoder_layers=tower.layers,
            encoder_attention_heads=tower.heads,
            downsample_hidden_size=tower.channels,
            output_dim=tower.out,
            n_window=tower.chunk,
            n_window_infer=tower.seen,
        )
        self.config = SimpleNamespace(audio_config=sizes, return_dict=True)
        self.audio_tower = omni.Qwen3OmniMoeAudioEncoder(sizes)
        self.features = partial(omni.Qwen3OmniMoeThinkerModel.get_audio_features, self)

    def get_audio_features(self, features: torch.Tensor, feature_attention_mask: torch.Tensor) -> Any:
        return self.features(features, feature_attention_mask, return_dict=True)


class Heard(audio.ContinuousAudioIO):
    """ESPnet's audio input, with an encoder of this checkpoint's sizes instead of a repository's."""

    def __init__(self, tower: TowerConfig):
        from transformers import WhisperFeatureExtractor

        abs_io.AbsIO.__init__(self, modality="audio", is_discrete=False)
        self.device, self.dtype = "cpu", torch.float32
        self.encoder_hf_model_tag = "Qwen/Qwen3-Omni-30B-A3B-Instruct"
        self.model = Thinker(tower)
        self.processor = WhisperFeatureExtractor(feature_size=tower.mels, sampling_rate=SAMPLE_RATE_HZ)
        self.d_model = self.model.audio_tower.config.output_dim
        self.sample_rate, self.hop_length = self.processor.sampling_rate, self.processor.hop_length


class Model:
    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32):
        self.config = config = Config.of(directory)
        tensors = read(directory)
        with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
            self._build(config, tensors, find_tokenizer(directory), Path(temporary))
        self.lm.load_state_dict(tensors, strict=True)
        self.lm.prepare_inference()
        self.lm.to(dtype).eval()
        self.preprocess = job.SpeechLMPreprocessor(
            is_train=False,
            multimodal_io={name: each.copy_for_worker() for name, each in self.io.items()},
            vocab=self.meta["vocab"],
            vocab_intervals=self.meta["vocab_intervals"],
        )

    def _build(
        self, config: Config, tensors: dict[str, torch.Tensor], tokenizer: Path, temporary: Path
    ) -> None:
        body = config.body
        shape = Qwen3Config(
            vocab_size=config.num_words,
            hidden_size=body.hidden,
            intermediate_size=body.inner,
            num_hidden_layers=body.layers,
            num_attention_heads=body.heads,
            num_key_value_heads=body.kv_heads,
            head_dim=body.head_dim,
            rms_norm_eps=body.eps,
            rope_parameters={"rope_type": "default", "rope_theta": body.rope_theta},
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=False,
            architectures=["Qwen3ForCausalLM"],
        )
        Qwen3ForCausalLM(shape).save_pretrained(temporary / BACKBONE)
        XcodecModel(xcodec_config(tensors, config)).save_pretrained(temporary / "codec")
        self.io: dict[str, Any] = {
            "text": TextIO(tokenizer, config),
            "discrete_audio": audio.DiscreteAudioIO(
                "Xcodec", str(temporary / "codec"), delay_interleave=True
            ),
        }
        if config.tower is not None:
            self.io["continuous_audio"] = Heard(config.tower)
        with mock.patch.object(job.SpeechLMJobTemplate, "__init__", lambda *_: None):
            built = job.SpeechLMJobTemplate()
        built.config, built.multimodal_io = {}, self.io
        built._build_vocabulary()
        self.meta = built.vocab_meta
        self.lm = lm.ParallelHFModel(
            str(temporary / BACKBONE), multimodal_io=self.io, vocab_meta=self.meta, is_train=False
        )

    def data(self, messages: list[tuple[str, str, Any]]) -> dict[str, Any]:
        """Return the input of a conversation: (role, "text" or "audio", a text or samples) each."""
        rows = [
            (role, kind, (content[None], SAMPLE_RATE_HZ) if kind == "audio" else content)
            for role, kind, content in messages
        ]
        return self.preprocess.collate_fn([(("dialogue", "name", "id"), {"dialogue": rows})])

    def settings(self, parts: Sequence[str] = ("text", "audio"), **more: Any) -> dict[str, Any]:
        """Return a greedy inference config with the checkpoint's limits. more: `text` and `audio`, what differs."""
        found: dict[str, Any] = {"num_hypo": 1, "enforce_modality": Parts(parts)}
        for kind, phase in (("text", self.config.sampling.text), ("audio", self.config.sampling.audio)):
            limits = {"min_step": phase.min_steps, "max_step": phase.max_steps}
            found[kind] = {"temperature": 0, "topk": phase.top_k, "cfg": 1} | limits | more.get(kind, {})
        return found

    @torch.no_grad()
    def generate(self, messages: list[tuple[str, str, Any]], settings: dict[str, Any]) -> SimpleNamespace:
        """Return the rows of the prompt, words [W] of the text, codes [F, 8] and samples [N] of an answer."""
        data = self.data(messages)
        rows, found = data["seqs"].clone(), SimpleNamespace(words=[], codes=[], samples=[])
        speech, text = self.io["discrete_audio"], self.io["text"]

        def decode(codes: torch.Tensor, lengths: torch.Tensor) -> Any:
            found.codes.append(codes[0])
            samples, sizes = decode_codes(codes, lengths)
            found.samples.append(samples[0, 0])
            return samples, sizes

        decode_codes, text.decoded = speech._codec_decode_batch, found.words
        with mock.patch.object(speech, "_codec_decode_batch", decode), contextlib.suppress(OverError):
            self.lm.inference(settings, **{name: value for name, value in data.items() if name != "keys"})
        return SimpleNamespace(
            rows=rows[0],
            words=torch.cat(found.words),
            codes=torch.cat(found.codes) if found.codes else torch.zeros(0, STREAMS, dtype=torch.int64),
            samples=torch.cat(found.samples) if found.samples else torch.zeros(0),
        )


def audio_limit(frames: int) -> dict[str, int]:
    return {"max_step": frames + DELAY}


def clip_of(path: str) -> np.ndarray:
    """Return a clip [N] at 16 kHz. Other rates are resampled as the server does, since torchaudio is not here."""
    with np.load(path) as found:
        samples, rate_hz = torch.from_numpy(found["samples"]), int(found["rate_hz"])
    if rate_hz != SAMPLE_RATE_HZ:
        samples = Resample(rate_hz, SAMPLE_RATE_HZ)(samples[None])[0]
    return samples.numpy()


def messages_of(request: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Return a request as messages: of each turn its clip and its text, then the request's own text."""
    found: list[tuple[str, str, Any]] = []
    for turn in request.get("turns", ()):
        if turn["clip"] is not None:
            found.append((turn["role"], "audio", clip_of(turn["clip"])))
        if turn["text"]:
            found.append((turn["role"], "text", turn["text"]))
    return found + ([("user", "text", request["text"])] if request["text"] else [])


def speak(model: Model, request: dict[str, Any]) -> str | tuple[np.ndarray, str]:
    """Return the text of a greedy request, and the samples [N] if it speaks."""
    options, is_text = request.get("options", {}), request.get("output") == "text"
    settings = model.settings(
        ["text"] if is_text else ["text", "audio"],
        audio=audio_limit(request["max_frames"] or 1)
        | {"cfg": options.get("guidance", model.config.sampling.guidance)},
        text={"max_step": options["max_tokens"]} if "max_tokens" in options else {},
    )
    made = model.generate(messages_of(request), settings)
    text = model.io["text"].text_of(made.words)
    return text if is_text else (made.samples.numpy(), text)


def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Answer one request after the other, which is all that the reference can. No end is drawn, since the lengths
    of a benchmark are fixed."""
    frames = request["max_frames"]
    steps = {"max_step": frames + DELAY, "min_step": frames + DELAY}
    options = request["options"]
    audio = {"cfg": options.get("guidance", model.config.sampling.guidance)} | steps
    text = {"max_step": options["max_tokens"], "min_step": options["max_tokens"]}
    settings = model.settings(audio=audio, text=text)
    asked: list[tuple[str, str, Any]] = [("user", "text", request["text"])]
    model.generate(asked, model.settings(audio={"max_step": DELAY + 2}, text={"max_step": 2}))
    began_s = time.perf_counter()
    for _ in range(rounds * streams):
        model.generate(asked, settings)
    return speed(streams, time.perf_counter() - began_s, rounds * streams * frames / 50)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))
    print(json.dumps(answer(order, NAME, partial(speak, model), partial(measure, model))))


if __name__ == "__main__":
    main()
