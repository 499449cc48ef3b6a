"""OpusLM by ESPnet's own code, as serving/tools/reference.py orders it: for `zoo bench --against reference` and
`zoo parity`. It runs as a script in an environment of its own, which tests/parity/environments.sh builds.

The LM's loop, its masks and the preprocessor are those of ESPnet's SpeechLM at 5f0a39a, the codec that of espnet
202611, the body transformers'. Packages of ESPnet are replaced by empty ones, because they would import the
trainer; of two files only one class or function each is read. The random window of a long voice prompt begins
at its first frame. Speech of ten frames or less is decoded, too.
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

from zoo.checkpoint.yaml_files import read_yaml
from zoo.opuslm.config import BODIES, CodecFiles, find_tokenizer, find_weights
from zoo.reference_script import answer, speed

NAME = "ESPnet SpeechLM 5f0a39a"
RATE_HZ, FRAME_SAMPLES, STREAMS = 16_000, 320, 9
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
for name, place in PACKAGES.items():
    package = ModuleType(name)
    package.__path__ = [str(place)]
    sys.modules[name] = package
inference_utils = ModuleType("espnet2.speechlm.inference_utils")
inference_utils.AbsInferenceConfig = object  # type: ignore[attr-defined]
sys.modules[inference_utils.__name__] = inference_utils

ARDelayLM = importlib.import_module("espnet2.speechlm.core_lm.ar_delay").ARDelayLM
definitions = importlib.import_module("espnet2.speechlm.definitions")
SEANetDecoder = importlib.import_module("espnet2.gan_codec.shared.decoder.seanet").SEANetDecoder
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


def build_codec(conf: dict[str, Any]) -> tuple[Any, Any]:
    """Return the codec's decoder and quantizer. conf: `generator_params` of its config.yaml."""
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
    decoder = SEANetDecoder(dimension=conf["hidden_dim"], activation_params={}, **own)
    sizes = {name: conf[f"quantizer_{name}"] for name in ("n_q", "bins")}
    dims = {"dimension": conf["hidden_dim"], "codebook_dim": conf["codebook_dim"]}
    return decoder, quantizer.ResidualVectorQuantizer(**dims, **sizes, quantizer_dropout=True)


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
        self.mask = build_mask(SimpleNamespace(**self.values), "codec_ssl")
        self._load_codec()

    def _load_codec(self) -> None:
        files = CodecFiles.find(self.directory)
        conf = read_yaml(files.config)["codec_conf"]["generator_params"]
        self.decoder, self.quantizer = build_codec(conf)
        tensors = torch.load(files.weights, map_location="cpu", weights_only=True)
        for module, part in ((self.decoder, "decoder"), (self.quantizer, "quantizer")):
            prefix = f"codec.generator.{part}."
            module.load_state_dict(
                {
                    name.removeprefix(prefix): value
                    for name, value in tensors.items()
                    if name.startswith(prefix)
                }
            )
            module.eval()

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
            # ESPnet's files count the codes on through clusters and codebooks
            task = "codec_ssl_tts"
            first = torch.cat((torch.zeros(1, dtype=torch.int64), self.sizes().cumsum(0)[:-1]))
            data["utt2spk"] = (voice + first).numpy().flatten()
        found = self.preprocess(f"{task} ", data)["dec_seq"]
        # behind the last marker of audio are the target, the end and pads
        marker = self.tokens.index("<codec_ssl_start/end>")
        length = int(np.nonzero(found[:, 0] == marker)[0][-1]) + 1
        return torch.from_numpy(found[:length])[None]

    @torch.no_grad()
    def generate(self, rows: torch.Tensor, frames: int, **settings: Any) -> list[torch.Tensor]:
        """Return the ids [F, 9] of each of `nbest` speeches of at most so many frames, greedy unless `settings`
        say more."""
        defaults = {"search_algo": "topk_sampling", "topk": 1, "sampling_temperature": 1.0, "nbest": 1}
        defaults |= {"length_method": "absolute", "maxlen": frames + STREAMS, "minlen": MIN_STEPS}
        eos = self.tokens.index("<sos/eos>")
        config = SimpleNamespace(**(defaults | settings), nq=STREAMS, eos=eos, device="cpu", mask=self.mask)
        self.lm.decoders.cache = None
        found, _ = self.lm.inference(rows.expand(config.nbest, -1, -1), None, config)
        return found

    def sizes(self) -> torch.Tensor:
        """Return the number of codes of each stream [9]."""
        return self.mask.logical_not().sum(1) - 1

    def codes(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids [F, 9] as codes; what is no code counts as code 0."""
        first = torch.tensor([self.bias["ssl"][0], *[self.bias["codec"][0]] * (STREAMS - 1)])
        first[2:] += self.sizes()[1:-1].cumsum(0)
        codes = ids - first
        return torch.where((codes >= 0) & (codes < self.sizes()), codes, 0)

    @torch.no_grad()
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the samples [N] of codes [F, 9]."""
        vectors = self.quantizer.vq.decode(codes[:, 1:].T[:, None].contiguous())
        return self.decoder(vectors)[0, 0]


def speak(model: Model, request: dict[str, Any]) -> np.ndarray:
    """Return the samples [N] of a greedy request."""
    rows = model.prompt(request["text"], model.voice(request["voice"]))
    [ids] = model.generate(rows, request["max_frames"])
    return model.decode(model.codes(ids)).numpy()


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
