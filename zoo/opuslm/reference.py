"""OpusLM by ESPnet's own code, as serving/tools/reference.py orders it: for `zoo bench --against reference` and
`zoo parity`. It runs as a script in a separate environment, which tests/parity/environments.sh builds.

The LM's loop, its masks and the preprocessor are those of ESPnet's SpeechLM at 5f0a39a, the codec and XEUS those of
espnet 202611, the body transformers'. Packages of ESPnet are replaced by empty ones, because they would import the
trainer; of two files only one class or function each is read. The random window of a long voice prompt begins
at its first frame. Speech of ten frames or less is decoded, too. A continued recording is not in the reference: its
loop runs with the recording's own ids in the place of the first pads.
"""

from __future__ import annotations

import ast
import importlib
import json
import logging
import sys
import time
import typing
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaModel, Olmo2Config, Olmo2Model

from zoo.checkpoint.joblib_files import read_array
from zoo.checkpoint.yaml_files import read_yaml
from zoo.opuslm.config import BODIES, CodecFiles, find_tokenizer, find_weights
from zoo.opuslm.delay import DELAY
from zoo.opuslm.ids import STREAMS
from zoo.opuslm.listener import CENTERS, CLIP_S, XeusFiles
from zoo.opuslm.prompt import MAX_WORDS
from zoo.reference_script import answer, speed
from zoo.request import AudioClip
from zoo.voices.references import mono

NAME = "ESPnet SpeechLM 5f0a39a"
RATE_HZ, FRAME_SAMPLES = 16_000, 320
MIN_STEPS = 3
SOURCES = Path(sys.prefix)
SPEECHLM, GAN_CODEC = SOURCES / "speechlm" / "espnet2", SOURCES / "espnet" / "espnet2"
PACKAGES = {
    "espnet2": SPEECHLM,
    "espnet2.speechlm": SPEECHLM / "speechlm",
    "espnet2.speechlm.core_lm": SPEECHLM / "speechlm" / "core_lm",
    "espnet2.gan_codec": GAN_CODEC / "gan_codec",
} | {
    f"espnet2.gan_codec.shared{name}": GAN_CODEC / "gan_codec" / "shared" / name.strip(".").replace(".", "/")
    for name in ("", ".decoder", ".encoder", ".quantizer", ".quantizer.modules")
}
for folder in (
    *(
        "asr",
        "asr/encoder",
        "asr/layers",
        "asr/frontend",
        "asr/preencoder",
        "legacy",
        "legacy/nets",
        "legacy/utils",
    ),
    *(f"legacy/nets/pytorch_backend{name}" for name in ("", "/transformer", "/conformer")),
    "torch_utils",
):
    PACKAGES["espnet2." + folder.replace("/", ".")] = GAN_CODEC / folder
for name, place in PACKAGES.items():
    package = ModuleType(name)
    package.__path__ = [str(place)]
    sys.modules[name] = package
typeguard, ctc = ModuleType("typeguard"), ModuleType("espnet2.asr.ctc")
typeguard.typechecked, ctc.CTC = (lambda function: function), object  # type: ignore[attr-defined]
sys.modules |= {"typeguard": typeguard, ctc.__name__: ctc}
inference_utils = ModuleType("espnet2.speechlm.inference_utils")
inference_utils.AbsInferenceConfig = object  # type: ignore[attr-defined]
sys.modules[inference_utils.__name__] = inference_utils

ARDelayLM = importlib.import_module("espnet2.speechlm.core_lm.ar_delay").ARDelayLM
logits_to_tokens = importlib.import_module("espnet2.speechlm.net_utils").logits_to_tokens
definitions = importlib.import_module("espnet2.speechlm.definitions")
SEANetDecoder = importlib.import_module("espnet2.gan_codec.shared.decoder.seanet").SEANetDecoder
SEANetEncoder = importlib.import_module("espnet2.gan_codec.shared.encoder.seanet").SEANetEncoder
CNNFrontend = importlib.import_module("espnet2.asr.frontend.cnn").CNNFrontend
LinearProjection = importlib.import_module("espnet2.asr.preencoder.linear").LinearProjection
EBranchformer = importlib.import_module("espnet2.asr.encoder.e_branchformer_encoder").EBranchformerEncoder
quantizer = importlib.import_module("espnet2.gan_codec.shared.quantizer.residual_vq")


def extracted(path: Path, name: str, known: dict[str, Any]) -> Any:
    """Return one class or function of a file whose imports are not installed."""
    source = path.read_text()
    [node] = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    code = ast.unparse(node)
    known = known | {"__name__": f"extracted {name}"}
    exec(compile(code, str(path), "exec"), known)
    return known[name]


class Words:
    """The tokenizer by strings, as ESPnet's wrapper of transformers' tokenizers has it."""

    def __init__(self, path: Path):
        self.tokenizer = Tokenizer.from_file(str(path))

    def text2tokens(self, text: str) -> list[str]:
        return self.tokenizer.encode(text, add_special_tokens=False).tokens


class Ids:
    def __init__(self, token_list: list[str], unk_symbol: str):
        self.ids, self.unknown = (
            {token: i for i, token in enumerate(token_list)},
            token_list.index(unk_symbol),
        )

    def tokens2ids(self, tokens: list[str]) -> list[int]:
        return [self.ids.get(token, self.unknown) for token in tokens]


PREPROCESSOR = {
    **{kind: getattr(typing, kind) for kind in ("Any", "Dict", "Iterable", "List", "Optional", "Union")},
    "AbsPreprocessor": object,
    "typechecked": lambda function: function,
    "np": np,
    "random": SimpleNamespace(randint=lambda low, high: low),
    "logging": logging,
    "Path": Path,
    "speechlm_definitions": definitions,
    "TokenIDConverter": Ids,
    "TextCleaner": lambda name: lambda text: text,
    "build_tokenizer": lambda token_type, bpemodel: Words(bpemodel),
}


class Body(torch.nn.Module):
    """The interface of ESPnet's wrapper around a model of transformers."""

    def __init__(self, model: Any, n_ctx: int):
        super().__init__()
        self.model, self.d_model, self.n_ctx = model, model.config.hidden_size, n_ctx
        self.cache = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.model(inputs_embeds=x, past_key_values=self.cache, use_cache=True)
        self.cache = output.past_key_values
        return output.last_hidden_state


def build_lm(values: dict[str, Any], body: dict[str, Any] | None) -> Any:
    """Return the LM of a config.yaml. body: the content of backbone/config.json, None without it."""
    tag, bias = values["transformer_conf"]["hf_model_tag"], values["token_bias"]
    body = body or next(known for name, known in BODIES.items() if tag.startswith(name))
    make, model = {"olmo2": (Olmo2Config, Olmo2Model), "llama": (LlamaConfig, LlamaModel)}[body["model_type"]]
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = make(vocab_size=1, attn_implementation="eager", **special, **body)
    built = model(config)
    built.set_input_embeddings(None)
    inside = Body(built, values["transformer_conf"]["n_ctx"])
    num_codes = bias["codec"][1] - bias["codec"][0]
    return ARDelayLM(inside, {}, len(values["token_list"]), num_codes, STREAMS)


def build_codec(conf: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the codec's decoder, quantizer and encoder. conf: `generator_params` of its config.yaml."""
    names = (
        "n_filters",
        "n_residual_layers",
        "ratios",
        "activation",
        "norm",
        "kernel_size",
        "last_kernel_size",
    )
    more = ("residual_kernel_size", "dilation_base", "causal", "pad_mode", "true_skip", "compress", "lstm")
    own = {name: conf[f"encdec_{name}"] for name in (*names, *more)}
    decoder, encoder = (
        make(dimension=conf["hidden_dim"], activation_params={}, **own)
        for make in (SEANetDecoder, SEANetEncoder)
    )
    sizes = {name: conf[f"quantizer_{name}"] for name in ("n_q", "bins")}
    dims = {"dimension": conf["hidden_dim"], "codebook_dim": conf["codebook_dim"]}
    return decoder, quantizer.ResidualVectorQuantizer(**dims, **sizes, quantizer_dropout=True), encoder


class Xeus(torch.nn.Module):
    """The parts of ESPnet's SSL model that its `inference_encode` runs, and the search for a cluster."""

    def __init__(self, values: dict[str, Any], centers: torch.Tensor | None = None):
        super().__init__()
        self.frontend = CNNFrontend(**values["frontend_conf"])
        self.preencoder = LinearProjection(**values["preencoder_conf"])
        width = values["preencoder_conf"]["output_size"]
        self.encoder = EBranchformer(width, use_flash_attn=False, **values["encoder_conf"])
        self.centers = centers

    @torch.no_grad()
    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """samples [N] -> the last output [T, D]"""
        x, lengths = self.preencoder(*self.frontend(samples[None], torch.tensor([len(samples)])))
        masks = torch.zeros(1, x.shape[1], dtype=torch.bool)
        return self.encoder(x, lengths, masks=masks, return_all_hs=True)[0][0][0]

    def clusters(self, samples: torch.Tensor) -> torch.Tensor:
        x, centers = self(samples), self.centers
        assert centers is not None, "there are no clusters"
        return (x.pow(2).sum(1, keepdim=True) - 2 * x @ centers.T + centers.pow(2).sum(1)).argmin(1)


class Model:
    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32):
        self.directory, self.values = directory, read_yaml(directory / "config.yaml")
        self.tokens, self.bias = self.values["token_list"], self.values["token_bias"]
        backbone = directory / "backbone" / "config.json"
        self.lm = build_lm(self.values, json.loads(backbone.read_text()) if backbone.exists() else None)
        tensors = torch.load(find_weights(directory), map_location="cpu", weights_only=True)
        prefix = "corelm."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self.lm.load_state_dict(own, strict=True)
        self.lm.to(dtype).eval()
        names = ("codec_token_per_frame", "codec_token_in_use", "speaker_prompt_length", "pad_speaker_prompt")
        preprocessor = extracted(SPEECHLM / "train" / "preprocessor.py", "SpeechLMPreprocessor", PREPROCESSOR)
        self.preprocess = preprocessor(
            token_list=self.tokens,
            token_bias=self.bias,
            train=False,
            subword_model=find_tokenizer(directory),
            subword_model_type="huggingface",
            n_ctx=self.values["transformer_conf"]["n_ctx"],
            inter_segment_pad=STREAMS - 1,
            **{name: self.values[name] for name in names},
        )
        build_mask = extracted(SPEECHLM / "speechlm" / "inference_utils.py", "build_mask", {"torch": torch})
        kinds = ("codec_ssl", "text_bpe")
        self.masks = {kind: build_mask(SimpleNamespace(**self.values), kind) for kind in kinds}
        self.mask = self.masks["codec_ssl"]
        self._load_codec()
        self._load_xeus()

    def _load_codec(self) -> None:
        files = CodecFiles.find(self.directory)
        conf = read_yaml(files.config)["codec_conf"]["generator_params"]
        self.decoder, self.quantizer, self.encoder = build_codec(conf)
        tensors = torch.load(files.weights, map_location="cpu", weights_only=True)
        for part in ("decoder", "quantizer", "encoder"):
            module = getattr(self, part)
            prefix = f"codec.generator.{part}."
            module.load_state_dict(
                {
                    name.removeprefix(prefix): value
                    for name, value in tensors.items()
                    if name.startswith(prefix)
                }
            )
            module.eval()

    def _load_xeus(self) -> None:
        self.xeus = None
        if (files := XeusFiles.find(self.directory)) is None:
            return
        centers = torch.from_numpy(read_array(files.clusters, CENTERS))
        self.xeus = Xeus(read_yaml(files.config), centers).eval()
        tensors = torch.load(files.weights, map_location="cpu", weights_only=True)
        # the older release of the file names one convolution in another way
        tensors = {
            name.replace("embed.0.conv.", "embed.0.convs.0."): value for name, value in tensors.items()
        }
        parts = ("frontend.", "preencoder.", "encoder.")
        own = {name: value for name, value in tensors.items() if name.startswith(parts)}
        self.xeus.load_state_dict(own, strict=True)

    @torch.no_grad()
    def heard(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the codes [F, 9] of a clip [N] at 16 kHz."""
        assert self.xeus is not None, "XEUS is not there"
        clusters = self.xeus.clusters(samples)
        codes = self.quantizer.vq.encode(self.encoder(samples[None, None]))[:, 0].T
        num = min(len(clusters), len(codes))
        return torch.cat((clusters[:num, None], codes[:num]), 1)

    def flat(self, codes: torch.Tensor) -> np.ndarray:
        """Return codes [F, 9] as ESPnet's files have them: they count on through clusters and codebooks."""
        first = torch.cat((torch.zeros(1, dtype=torch.int64), self.sizes().cumsum(0)[:-1]))
        return (codes + first).numpy().flatten()

    def voice(self, name: str | None) -> torch.Tensor | None:
        """Return the codes [F, 9] of a voice, None for the random one."""
        if name in (None, "default"):
            return None
        return load_file(self.directory / "voices" / f"{name}.safetensors")["codes"]

    def prompt(self, text: str, voice: torch.Tensor | None) -> torch.Tensor:
        """Return the rows [1, T, 9] before the first frame, not delayed."""
        data: dict[str, Any] = {"text": text, "wav.scp": np.ones((1, STREAMS), np.int64)}
        task = "codec_ssl_plain_tts"
        if voice is not None:
            task = "codec_ssl_tts"
            data["utt2spk"] = self.flat(voice)
        return self._up_to("<codec_ssl_start/end>", self.preprocess(f"{task} ", data)["dec_seq"])

    def _up_to(self, token: str, found: np.ndarray) -> torch.Tensor:
        """Return the rows [1, T, 9] up to the last marker. Behind it are the target, the end and pads."""
        length = int(np.nonzero(found[:, 0] == self.tokens.index(token))[0][-1]) + 1
        return torch.from_numpy(found[:length])[None]

    def prompt_of_clip(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, T, 9] before the words of a clip."""
        data = {"text": "a", "wav.scp": self.flat(codes)}
        return self._up_to("<text_bpe_start/end>", self.preprocess("codec_ssl_asr ", data)["dec_seq"])

    def prompt_of_text(self, text: str) -> torch.Tensor:
        """Return the rows [1, T, 9] of a text to continue, without the end and the pads behind it."""
        found = self.preprocess("textlm ", {"text": text})["dec_seq"]
        return torch.from_numpy(found[: -1 - DELAY])[None]

    def prompt_to_continue(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the rows [1, T, 9] of a recording to continue, without the end and the pads behind it."""
        found = self.preprocess("codec_ssl_audiolm ", {"wav.scp": self.flat(codes)})["dec_seq"]
        return torch.from_numpy(found[: -1 - DELAY])[None]

    def prompt_of_dialogue(
        self, turns: list[tuple[str, str, Any]], voice: torch.Tensor | None, is_text: bool = False
    ) -> torch.Tensor:
        """Return the rows [1, T, 9] of a dialogue up to the answer. turns: role, and "text_bpe" with a text or
        "codec_ssl" with codes [F, 9]."""
        dialogue = [[role, kind, str(role == "assistant"), content] for role, kind, content in turns]
        if voice is not None:
            dialogue = [["system", "codec_ssl", "False", voice], *dialogue]
        flat = [
            [role, kind, target, self.flat(content) if kind == "codec_ssl" else content]
            for role, kind, target, content in [*dialogue, ["assistant", "text_bpe", "True", "a"]]
        ]
        task = "text_dialogue" if is_text else "audio_dialogue"
        return self._up_to("<text_bpe_start/end>", self.preprocess(f"{task} ", {"dialogue": flat})["dec_seq"])

    def settings(self, kind: str, most: int, **given: Any) -> SimpleNamespace:
        """Return ESPnet's settings of a greedy segment of at most `most` frames or tokens. `given` goes
        first."""
        defaults = {"search_algo": "topk_sampling", "topk": 1, "sampling_temperature": 1.0, "nbest": 1}
        least = MIN_STEPS if kind == "codec_ssl" else 1
        defaults |= {"length_method": "absolute", "maxlen": most + STREAMS, "minlen": least}
        eos = self.tokens.index("<sos/eos>")
        return SimpleNamespace(**(defaults | given), nq=STREAMS, eos=eos, device="cpu", mask=self.masks[kind])

    @torch.no_grad()
    def generate(self, rows: torch.Tensor, frames: int, **given: Any) -> list[torch.Tensor]:
        """Return the ids [F, 9] of each of `nbest` speeches of at most `frames` frames."""
        config = self.settings("codec_ssl", frames, **given)
        self.lm.decoders.cache = None
        found, _ = self.lm.inference(rows.expand(config.nbest, -1, -1), None, config)
        return found

    @torch.no_grad()
    def words(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the ids [N] of at most `tokens` tokens."""
        self.lm.decoders.cache = None
        [found], _ = self.lm.inference(rows, None, self.settings("text_bpe", tokens))
        return found[:, 0]

    @torch.no_grad()
    def reply(self, rows: torch.Tensor, tokens: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an answer's ids of text [N], and of speech [F, 9], as ESPnet's chat makes one after the other."""
        words = self.words(rows, tokens)
        opening = torch.zeros(1, 2, STREAMS, dtype=torch.int64)
        opening[0, :, 0] = torch.tensor(
            [self.tokens.index(name) for name in ("<assistant_output>", "<codec_ssl_start/end>")]
        )
        [ids], _ = self.lm.inference(opening, None, self.settings("codec_ssl", frames))
        return words, ids

    @torch.no_grad()
    def go_on(self, rows: torch.Tensor, frames: int) -> torch.Tensor:
        """Return the ids [F, 9] of a greedy continuation of rows [1, T, 9]: ESPnet's loop, but for the ids that the
        rows still have to give when it begins."""
        length, most = rows.shape[1], frames + STREAMS
        config, stream = self.settings("codec_ssl", frames), torch.arange(STREAMS)
        whole = torch.cat((rows, torch.zeros(1, most, STREAMS, dtype=torch.int64)), 1)
        known = self.lm.delay_interleave(whole)[0]
        self.lm.decoders.cache = None
        self.lm.decoders(self.lm.emb(known[:, : length - 1]).sum(2))
        finish = -1
        for step in range(most):
            at = length + step
            h = self.lm.decoders(self.lm.emb(known[:, at - 1 : at]).sum(2))
            logits = self.lm.lm_head(h[:, :, None] + self.lm.head_emb.weight[:STREAMS])
            drawn = logits_to_tokens(logits, config, allow_eos=step >= config.minlen)[0][0, 0]
            row = torch.where(stream > step, known[0, at], drawn)
            if finish >= 0:
                row = torch.where(step - finish + 1 > stream, 0, row)
            elif known[0, at - 1, 0] == config.eos and step > 0:
                finish = step
            elif step == most - DELAY:
                row[0], finish = config.eos, step
            known[0, at] = row
            if finish >= 0 and step - finish >= DELAY:
                break
        made = known[0, length : at + 1]
        whole = torch.stack([made[s : len(made) - DELAY + s, s] for s in range(STREAMS)], 1)
        return whole[: finish - 1]

    def text_of(self, ids: torch.Tensor) -> str:
        """Return the text of ids [N], special tokens skipped."""
        first, end = self.bias["text_bpe"]
        own = [int(i) - first for i in ids if first <= i < end]
        return self.preprocess.bpe.tokenizer.decode(own, skip_special_tokens=True)

    def sizes(self) -> torch.Tensor:
        """Return the number of codes of each stream [9]."""
        return self.mask.logical_not().sum(1) - 1

    def codes(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids [F, 9] as codes. Ids that are not codes count as code 0."""
        first = torch.tensor([self.bias["ssl"][0], *[self.bias["codec"][0]] * (STREAMS - 1)])
        first[2:] += self.sizes()[1:-1].cumsum(0)
        codes = ids - first
        return torch.where((codes >= 0) & (codes < self.sizes()), codes, 0)

    @torch.no_grad()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the samples [N] of codes [F, 9]."""
        vectors = self.quantizer.vq.decode(codes[:, 1:].T[:, None].contiguous())
        return self.decoder(vectors)[0, 0]


def clip_of(path: str) -> torch.Tensor:
    """Return a clip [N] at 16 kHz, resampled as the server does."""
    with np.load(path) as found:
        clip = AudioClip(found["samples"], int(found["rate_hz"]))
    return torch.from_numpy(mono(clip, RATE_HZ, CLIP_S).copy())


def speak(model: Model, request: dict[str, Any]) -> np.ndarray | str | tuple[np.ndarray, str]:
    """Return the samples [N] of a greedy request, its text, or both."""
    turns: list[tuple[str, str, Any]] = [
        (turn["role"], turn["text"], None if turn["clip"] is None else model.heard(clip_of(turn["clip"])))
        for turn in request.get("turns", ())
    ]
    output, frames = request.get("output", "speech"), request["max_frames"]
    voice = model.voice(request["voice"])
    for reference in request.get("references", ()):
        voice = model.heard(clip_of(reference["clip"]))
    if model.values["model"] == "dpo":
        return answered(model, request, turns, voice)
    if output in ("transcript", "text"):
        is_clip = output == "transcript"
        rows = model.prompt_of_clip(turns[0][2]) if is_clip else model.prompt_of_text(request["text"])
        return model.text_of(model.words(rows, request["options"].get("max_tokens", MAX_WORDS)))
    if output == "continuation":
        codes = [codes for _, _, codes in turns] or [torch.zeros(0, STREAMS, dtype=torch.int64)]
        ids = model.go_on(model.prompt_to_continue(codes[0]), frames)
    else:
        [ids] = model.generate(model.prompt(request["text"], voice), frames)
    return model.decode(model.codes(ids)).numpy()


def answered(
    model: Model,
    request: dict[str, Any],
    turns: list[tuple[str, str, Any]],
    voice: Any,
) -> str | tuple[np.ndarray, str]:
    """Return the answer of OpusLM-Dialogue to a greedy request: its text, and its samples [N] if it speaks."""
    segments: list[tuple[str, str, Any]] = []
    for role, text, codes in [*turns, *([("user", request["text"], None)] if request["text"] else [])]:
        spoken = [] if codes is None else [(role, "codec_ssl", codes)]
        written = [(role, "text_bpe", text)] if text else []
        segments += written + spoken if role == "assistant" else spoken + written
    is_text, most = request.get("output") == "text", request["options"].get("max_tokens", MAX_WORDS)
    rows = model.prompt_of_dialogue(segments, None if is_text else voice, is_text)
    if is_text:
        return model.text_of(model.words(rows, most))
    words, ids = model.reply(rows, most, request["max_frames"] or most)
    return model.decode(model.codes(ids)).numpy(), model.text_of(words)


def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """The end is never drawn, since the length of a benchmark is fixed. All streams are decoded."""
    rows = model.prompt(request["text"], model.voice(request["voice"]))
    frames = request["max_frames"]
    settings = {"topk": 30, "sampling_temperature": 0.8, "nbest": streams, "minlen": frames + STREAMS}
    model.generate(rows, 2, **settings)
    began_s = time.perf_counter()
    for _ in range(rounds):
        for ids in model.generate(rows, frames, **settings):
            model.decode(model.codes(ids))
    return speed(streams, time.perf_counter() - began_s, rounds * streams * frames * FRAME_SAMPLES / RATE_HZ)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))
    print(json.dumps(answer(order, NAME, partial(speak, model), partial(measure, model))))


if __name__ == "__main__":
    main()
