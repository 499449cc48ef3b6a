"""Runs Fish Audio S2 as a plain loop around published classes, for `zoo bench --against reference` and `zoo
parity`. serving/tools/reference.py starts this script in a separate environment, which
tests/parity/environments.sh builds.

The LM is the DualARTransformer of fish-speech 0.1.0 (Apache-2.0), which was made for the previous model,
OpenAudio S1. Two of its switches and one line turn it into S2: the fast AR gets the hidden state after
the final norm. The codec is that of vllm-omni 0.30.0 (Apache-2.0), whose modules are imported without the
server around them. S2's own code is not free, so prompts, masks and draws are written here from published
facts of the model. fish-speech's own functions run OpenAudio S1-mini. `streams` requests form one static
batch; the codec decodes each one at the end.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
import time
import types
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fish_speech.models.text2semantic.inference import decode_one_token_ar, generate_long
from fish_speech.models.text2semantic.llama import DualARModelArgs, DualARTransformer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from zoo.fish_s2.config import CodecConfig, TransformerConfig
from zoo.reference_script import answer, speed
from zoo.request import AudioClip
from zoo.voices.references import mono_by_sinc

NAME = "fish-speech 0.1.0, vllm-omni 0.30.0"
RATE_HZ = 44_100
BUFFERS = ("freqs_cis", "causal_mask")
SPEAKER = r"<\|speaker:\d+\|>"
PENALTY = 1.1  # S1's repetition penalty


# --- the classes ---


@cache
def dac_modules() -> types.ModuleType:
    """Import the codec's modules without their package, which would import a server."""
    parent = "vllm_omni.model_executor.models.fish_speech"
    spec = importlib.util.find_spec("vllm_omni")
    assert spec is not None and spec.submodule_search_locations
    root, names = Path(spec.submodule_search_locations[0]), parent.split(".")
    for i in range(1, len(names) + 1):
        package = types.ModuleType(".".join(names[:i]))
        package.__path__ = [str(root.joinpath(*names[1:i]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(f"{parent}.dac_modules")


def make_codec(config: CodecConfig, positions: int) -> Any:
    """Return the codec's class. positions: the length of its position buffers."""
    dac = dac_modules()

    def arguments(part: TransformerConfig, **changes: Any) -> Any:
        values = {
            "block_size": positions,
            "n_layer": part.layers,
            "n_head": part.width // part.head_dim,
            "dim": part.width,
            "intermediate_size": part.inner,
            "head_dim": part.head_dim,
            "dropout_rate": 0.0,
            "attn_dropout_rate": 0.0,
            "norm_eps": 1e-5,
            "rope_base": 10000,
        }
        return dac.ModelArgs(**values | changes)

    def transformer(part: TransformerConfig) -> Any:
        sizes = {"input_dim": part.width, "window_size": 128, "config": arguments(part)}
        return dac.WindowLimitedTransformer(causal=True, **sizes)

    assert config.hear is not None
    quantizer = dac.DownsampleResidualVectorQuantize(
        input_dim=config.latent,
        n_codebooks=len(config.codebook_sizes) - 1,
        codebook_size=config.codebook_sizes[1],
        codebook_dim=config.codebook_dim,
        quantizer_dropout=0.0,
        downsample_factor=list(config.ratios),
        pre_module=transformer(config.pre),
        post_module=transformer(config.post),
        semantic_codebook_size=config.codebook_sizes[0],
    )
    return dac.DAC(
        encoder_dim=config.channels,
        encoder_rates=list(config.strides),
        latent_dim=config.latent,
        decoder_dim=config.decoder_channels,
        decoder_rates=list(config.rates),
        quantizer=quantizer,
        causal=True,
        encoder_transformer_layers=[0, 0, 0, config.hear.layers],
        transformer_general_config=partial(arguments, config.hear),
    )


def make_lm(config: dict[str, Any]) -> DualARTransformer:
    text, audio = config["text_config"], config["audio_decoder_config"]
    first, last = config["semantic_start_token_id"], config["semantic_end_token_id"]
    ids = {i: first + i for i in range(audio["vocab_size"])}
    tokenizer = types.SimpleNamespace(
        semantic_id_to_token_id=ids, semantic_begin_id=first, semantic_end_id=last
    )
    shared = "dim n_layer n_head n_local_heads head_dim intermediate_size max_seq_len rope_base norm_eps "
    shared += "vocab_size tie_word_embeddings attention_qk_norm"
    args = DualARModelArgs(
        **{key: text[key] for key in shared.split()},
        codebook_size=audio["vocab_size"],
        num_codebooks=audio["num_codebooks"],
        use_gradient_checkpointing=False,
        n_fast_layer=audio["n_layer"],
        fast_dim=audio["dim"],
        fast_n_head=audio["n_head"],
        fast_n_local_heads=audio["n_local_heads"],
        fast_head_dim=audio["head_dim"],
        fast_intermediate_size=audio["intermediate_size"],
        fast_attention_qk_norm=audio["attention_qk_norm"],
    )
    # As in S2. The code reads this field, but the class does not declare it.
    args.scale_codebook_embeddings = True
    return DualARTransformer(args, tokenizer)


def published_name(name: str) -> str:
    """Return the name in the shards of an LM tensor of the class."""
    if name == "codebook_embeddings.weight":
        return f"audio_decoder.{name}"
    if name.startswith("fast_"):
        return f"audio_decoder.{name.removeprefix('fast_')}"
    return f"text_model.model.{name}"


def load_codec(directory: Path) -> Any:
    codec = torch.load(directory / "codec.pth", weights_only=True)
    sizes = CodecConfig.read({name: tuple(value.shape) for name, value in codec.items()})
    own = {name: value for name, value in codec.items() if not name.endswith(BUFFERS)}
    made = make_codec(sizes, positions=8192).eval()
    missing, unexpected = made.load_state_dict(own, strict=False)
    assert not unexpected and all(name.endswith(BUFFERS) for name in missing), (missing, unexpected)
    return made


def decode(codec: Any, codes: Tensor) -> Tensor:
    """Decode codes [F, K] to samples [N] in one call. The codec clamps its argument in place, so it gets a
    copy."""
    return codec.decode(codes.T[None].clone(), torch.tensor([len(codes)]))[0][0, 0]


class Model:
    """A checkpoint of S2 in the references' own classes."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32):
        self.config = json.loads((directory / "config.json").read_text())
        self.codebooks = self.config["audio_decoder_config"]["num_codebooks"]
        self.start, self.end = self.config["semantic_start_token_id"], self.config["eos_token_id"]
        self.size = self.config["audio_decoder_config"]["vocab_size"]
        self.allowed = torch.tensor([*range(self.start, self.start + self.size), self.end])
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tensors: dict[str, Tensor] = {}
        for shard in sorted(directory.glob("*.safetensors")):
            tensors |= load_file(shard)
        self.lm = make_lm(self.config).eval()
        names = {name: published_name(name) for name in self.lm.state_dict()}
        assert set(names.values()) == set(tensors)
        self.lm.load_state_dict({name: tensors[theirs] for name, theirs in names.items()})
        self.lm = self.lm.to(dtype)
        self.codec = load_codec(directory)

    # prompts

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, *segments: str) -> Tensor:
        """Return the columns [1 + K, T] of segments that are tokenized separately."""
        ids = torch.tensor([token for segment in segments for token in self.encode(segment)])
        return torch.cat((ids[None], ids.new_zeros(self.codebooks, len(ids))))

    def speech(self, codes: Tensor) -> Tensor:
        """Return the columns of codes [K, F]."""
        return torch.cat((codes[:1] + self.start, codes))

    def system(self, references: list[tuple[str, Tensor]]) -> Tensor:
        """Return the columns of the system message. references: transcripts and samples [N]."""
        if not references:
            segments = ("<|im_start|>system\n", "convert the provided text to speech", "<|im_end|>\n")
            return self.text(*segments)
        texts = [
            text if re.search(SPEAKER, text) else f"<|speaker:{i}|>{text}"
            for i, (text, _) in enumerate(references)
        ]
        codes = [self.codec.encode(samples[None, None])[0][0] for _, samples in references]
        task = "convert the provided text to speech reference to the following:\n\nText:\n"
        before = self.text("<|im_start|>system\n", task, "\n".join(texts), "\n\nSpeech:\n")
        return torch.cat((before, self.speech(torch.cat(codes, 1)), self.text("<|im_end|>\n")), 1)

    def user(self, text: str) -> Tensor:
        segments = ("<|im_start|>user\n", text, "<|im_end|>\n", "<|im_start|>assistant\n<|voice|>")
        return self.text(*segments)

    # frames

    def begin(self, streams: int) -> None:
        """Set up empty caches for all positions, as in the original."""
        self.lm.max_seq_len = self.lm.max_batch_size = -1
        dtype = self.lm.embeddings.weight.dtype
        self.lm.setup_caches(streams, self.config["text_config"]["max_seq_len"], dtype)

    def step(self, columns: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Run columns [B, 1 + K, T] from position `at` on. Return the last hidden state after the final norm
        [B, D], and the logits [B, V + 1] of the semantic codes and the end."""
        made = self.lm.forward_generate(columns, torch.arange(at, at + columns.shape[2]))
        return self.lm.norm(made.hidden_states)[:, -1], made.logits[:, -1, self.allowed]

    def frame(self, hidden: Tensor, first: Tensor, pick: Any) -> tuple[Tensor, Tensor]:
        """Return the frame's codes [B, K], and the logits of all codes except the first [B, K - 1, V]."""
        for layer in self.lm.fast_layers:
            layer.attention.kv_cache.k_cache.fill_(0)
            layer.attention.kv_cache.v_cache.fill_(0)
        self.lm.forward_generate_fast(hidden, torch.tensor([0]))
        codes, kept = [first], []
        for k in range(1, self.codebooks):
            x = self.lm.fast_embeddings(codes[-1])
            logits = self.lm.forward_generate_fast(x, torch.tensor([k]))[:, -1]
            kept.append(logits)
            codes.append(pick(logits))
        return torch.stack(codes, 1), torch.stack(kept, 1)

    def decode(self, codes: Tensor) -> Tensor:
        return decode(self.codec, codes)

    # speaking

    @torch.inference_mode()
    def say(self, request: dict[str, Any]) -> np.ndarray:
        """Return the samples [N] of a greedy request."""
        context, heard = self.system(references(request)), []
        for text in batches(request["text"], request["options"].get("chunk_length", 200)):
            context = torch.cat((context, self.user(text)), 1)
            codes = speak(self, context[None], request["max_frames"], greedy=True)[0]
            heard.append(self.decode(codes))
            context = torch.cat((context, self.speech(codes.T), self.text("<|im_end|>\n")), 1)
        return torch.cat(heard).numpy()

    @torch.inference_mode()
    def measure(self, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
        prompt = torch.cat((self.system(references(request)), self.user(request["text"])), 1)
        columns = prompt.repeat(streams, 1, 1)
        speak(self, columns, 4, greedy=False)
        began_s, samples = time.perf_counter(), 0
        for _ in range(rounds):
            made = speak(self, columns, request["max_frames"], greedy=False)
            samples += sum(len(self.decode(codes)) for codes in made)
        return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


class ModelS1:
    """OpenAudio S1-mini, run by fish-speech's own loader, prompt and loop, one text at a time. Three things
    differ from fish-speech: code 0 is a semantic code or, after the first frame, the end; a greedy draw keeps
    only the likeliest code; and the penalty is not rounded to bf16."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32):
        self.lm = DualARTransformer.from_pretrained(str(directory), load_weights=True).eval().to(dtype)
        self.codec = load_codec(directory)
        tokenizer = self.lm.tokenizer
        self.end = tokenizer.get_token_id("<|im_end|>")
        self.allowed = torch.arange(tokenizer.semantic_begin_id, tokenizer.semantic_end_id + 1)
        self.num_drawn, self.may_end = 0, True
        self.seen: list[Tensor] = []  # logits of code 0, before masking
        self.lm.output.register_forward_hook(self._allow)

    def _allow(self, module: Any, args: Any, out: Tensor) -> Tensor:
        self.seen.append(out[0, -1, [*self.allowed, self.end]])
        kept = torch.full_like(out, -torch.inf)
        kept[..., self.allowed] = out[..., self.allowed]
        if self.num_drawn and self.may_end:
            kept[..., self.end] = out[..., self.end]
        self.num_drawn += 1
        return kept

    def speak(self, text: str, heard: list[tuple[str, Tensor]], frames: int, greedy: bool) -> Tensor:
        """Return codes [F, K]. heard: transcripts and samples [N] of the references. Without `greedy` the
        speech cannot end early, because a benchmark's length is fixed. fish-speech drops the last frame, so
        it gets one more."""
        self.num_drawn, self.may_end, self.seen = 0, greedy, []
        texts, clips = [text for text, _ in heard], [samples for _, samples in heard]
        codes = [self.codec.encode(samples[None, None])[0][0] for samples in clips]
        sampling = {"temperature": 0.8, "top_p": 1e-6 if greedy else 0.8, "repetition_penalty": PENALTY}
        prompt = {"text": text, "prompt_text": texts, "prompt_tokens": codes}
        how = {"device": "cpu", "decode_one_token": _decode_one_token, "max_new_tokens": frames + 1}
        return next(generate_long(model=self.lm, **how, **prompt, **sampling)).codes.T.long()

    @torch.inference_mode()
    def say(self, request: dict[str, Any]) -> np.ndarray:
        codes = self.speak(request["text"], references(request), request["max_frames"], greedy=True)
        return decode(self.codec, codes).numpy()

    @torch.inference_mode()
    def measure(self, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
        text, heard, frames = request["text"], references(request), request["max_frames"]
        self.speak(text, heard, 4, greedy=False)
        began_s, samples = time.perf_counter(), 0
        for _ in range(rounds * streams):
            samples += len(decode(self.codec, self.speak(text, heard, frames, greedy=False)))
        return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


def _decode_one_token(**arguments: Any) -> Tensor:
    return decode_one_token_ar(**arguments | {"repetition_penalty": torch.tensor(PENALTY)})


def batches(text: str, chunk_length: int) -> list[str]:
    """Split a text with speaker tags into groups of at most five turns and `chunk_length` bytes."""
    turns: list[str] = []
    for part in re.split(f"({SPEAKER})", text):
        if re.fullmatch(SPEAKER, part):
            turns.append(part)
        elif turns:
            turns[-1] = (turns[-1] + part).strip()
    groups: list[list[str]] = []
    for turn in turns:
        held = sum(len(other.encode()) for other in groups[-1]) if groups else 0
        if not groups or len(groups[-1]) == 5 or held + len(turn.encode()) > chunk_length:
            groups.append([])
        groups[-1].append(turn)
    return ["\n".join(group) for group in groups] or [text]


# --- speaking ---


def draw(logits: Tensor, temperature: float = 0.8, top_k: int = 30, top_p: float = 0.8) -> Tensor:
    """Draw one token [B] per row of logits [B, V]."""
    logits = logits.float()
    ranked, order = logits.sort(-1, descending=True)
    dropped = ranked.softmax(-1).cumsum(-1) > top_p
    dropped[:, top_k:], dropped[:, 0] = True, False
    kept = ranked.masked_fill(dropped, -torch.inf) / temperature
    return order.gather(-1, torch.multinomial(kept.softmax(-1), 1))[:, 0]


@torch.inference_mode()
def speak(model: Model, columns: Tensor, frames: int, greedy: bool) -> Tensor:
    """Speak prompts of columns [B, 1 + K, T]. Return codes [B, F, K]. With `greedy`, which needs one stream,
    the end stops the speech. Otherwise it is banned, because a benchmark's length is fixed."""
    model.begin(len(columns))
    pick = (lambda logits: logits.argmax(-1)) if greedy else draw
    codes: list[Tensor] = []
    recent = torch.full((len(columns), 10), -1)
    at = 0
    while len(codes) < frames:
        hidden, logits = model.step(columns, at)
        if not (greedy and codes):
            logits[:, -1] = -torch.inf
        first = pick(logits)
        if greedy and int(first[0]) == model.size:
            break
        if not greedy:
            again = draw(logits, 1.0, top_p=0.9)
            first = torch.where((recent == first[:, None]).any(-1), again, first)
            recent = torch.cat((recent[:, 1:], first[:, None]), 1)
        codes.append(model.frame(hidden, first, pick)[0])
        at += columns.shape[2]
        columns = torch.cat((codes[-1][:, :1] + model.start, codes[-1]), 1)[..., None]
    return torch.stack(codes, 1)


def references(request: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the transcript and the samples [N] of each reference. A named speaker becomes a tag."""
    made = []
    for reference in request["references"]:
        clip, text = np.load(reference["clip"]), reference["transcript"] or ""
        recorded = AudioClip(clip["samples"], int(clip["rate_hz"]))
        # by `zoo`'s own copy of torchaudio's resampler, which the original uses
        samples = mono_by_sinc(recorded, RATE_HZ, (0, 1000))
        if reference.get("speaker") is not None and not re.search(SPEAKER, text):
            text = f"<|speaker:{reference['speaker']}|>{text}"
        made.append((text, samples))
    return made


def load(directory: Path, dtype: torch.dtype) -> Model | ModelS1:
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    return (ModelS1 if model_type == "dual_ar" else Model)(directory, dtype)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = load(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))
    print(json.dumps(answer(order, NAME, model.say, model.measure)))


if __name__ == "__main__":
    main()
