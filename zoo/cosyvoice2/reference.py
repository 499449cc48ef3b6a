"""Run the reference implementation of CosyVoice 2, for `zoo bench --against reference` and `zoo parity`.

serving/tools/reference.py starts this file as a script, in a separate environment that
tests/parity/environments.sh builds. Language model, flow and vocoder are cosyvoice-minicpmo 0.1.0, which
contains the original's files, around transformers' Qwen2. The codes of a recording come from s3tokenizer
0.3.0, its speaker vector from chatterbox-tts 0.1.7.

The reference generates one text at a time, so `streams` texts run one after the other. It does not stream: it
samples all codes first, then flow and vocoder read all of them at once. In streaming mode it would recompute
the whole speech for every chunk, so this is the fairer comparison.

Three things are fixed. A cached step gets no attention mask, because the reference passes a mask of length 1,
with which newer releases of transformers compute wrong results. The first "fill" of an interleaved text is
placed where newer releases of the original place it; in this release the model has to sample it. The last
code before the end of such a text is read once, not twice.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
import sys
import time
import types
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import omegaconf
import torch
import torchaudio
import transformers
from torch import Tensor

from zoo.checkpoint import loading
from zoo.cosyvoice2 import weights
from zoo.cosyvoice2.config import BLANK, Config
from zoo.cosyvoice2.prompt import BASE, END_OF_PROMPT, TAGS, ended
from zoo.nn.s3.campplus import CamPlus
from zoo.nn.s3.sizes import NUM_CODES
from zoo.reference_script import answer, speed

NAME = "cosyvoice-minicpmo 0.1.0"
RATE_HZ, SPEECH_HZ, MELS = 24_000, 16_000, 80
EOS, FILL = NUM_CODES, NUM_CODES + 2
CODE_GROUP = 15
_SPEC = importlib.util.find_spec("s3tokenizer")
assert _SPEC is not None and _SPEC.submodule_search_locations
SITE = Path(_SPEC.submodule_search_locations[0]).parent


def stub(name: str, path: Path | None = None, **values: Any) -> None:
    """Register an empty package, so that its own __init__, which imports training code, is not run."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(values)
    sys.modules[name] = module


for package in (
    *(
        "cosyvoice",
        "cosyvoice.utils",
        "cosyvoice.flow",
        "cosyvoice.hifigan",
        "cosyvoice.transformer",
        "cosyvoice.llm",
    ),
    *("matcha", "matcha.utils", "matcha.models", "matcha.models.components", "matcha.hifigan"),
    *("chatterbox", "chatterbox.models", "chatterbox.models.s3gen"),
):
    stub(package, SITE / package.replace(".", "/"))
stub("matcha.utils.pylogger", get_pylogger=logging.getLogger)
stub("cosyvoice.utils.losses", tpr_loss=None, mel_loss=None)

import s3tokenizer  # noqa: E402
from chatterbox.models.s3gen.xvector import CAMPPlus  # noqa: E402
from cosyvoice.flow.decoder import CausalConditionalDecoder  # noqa: E402
from cosyvoice.flow.flow import CausalMaskedDiffWithXvec  # noqa: E402
from cosyvoice.flow.flow_matching import CausalConditionalCFM  # noqa: E402
from cosyvoice.hifigan.f0_predictor import ConvRNNF0Predictor  # noqa: E402
from cosyvoice.hifigan.generator import HiFTGenerator  # noqa: E402
from cosyvoice.llm.llm import Qwen2Encoder, Qwen2LM  # noqa: E402
from cosyvoice.transformer.upsample_encoder import UpsampleConformerEncoder  # noqa: E402
from cosyvoice.utils import common  # noqa: E402
from matcha.utils.audio import mel_spectrogram  # noqa: E402
from s3tokenizer.model_v2 import ModelConfig, S3TokenizerV2  # noqa: E402

# --- the language model ---


class KeyValues(transformers.DynamicCache):
    """A cache with the interface of older releases of transformers."""

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer; the reference reads the cache's length from them."""
        held: Any = self.layers[layer]
        return held.keys, held.values


def one_step(encoder: Qwen2Encoder, xs: Tensor, masks: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
    """Replace Qwen2Encoder.forward_one_step, without its mask.

    The text head is computed too, as in the original.
    """
    how = {"output_hidden_states": True, "use_cache": True, "past_key_values": cache or KeyValues()}
    made = encoder.model(inputs_embeds=xs, **how)
    return made.hidden_states[-1], made.past_key_values


def make_lm(directory: Path, config: Config) -> Qwen2LM:
    values = json.loads((directory / BLANK / "config.json").read_text())
    qwen = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**values))
    with patch.object(transformers.Qwen2ForCausalLM, "from_pretrained", lambda path: qwen):
        encoder = Qwen2Encoder("")
    encoder.forward_one_step = partial(one_step, encoder)
    sampling = partial(common.ras_sampling, **vars(config.sampling))
    lm = Qwen2LM(config.lm.hidden, config.lm.hidden, NUM_CODES, encoder, sampling)
    lm.load_state_dict(torch.load(directory / weights.LM_FILE, weights_only=True))
    return lm.eval()


def greedy(scores: Tensor, said: list[int], win_size: int) -> int:
    """Return the id of common.ras_sampling with greedy draws, of which the second excludes the first id."""

    def likeliest(weights: Tensor, *_: Any, **__: Any) -> Tensor:
        return weights.argmax()[None]

    def without(weighted: Tensor, said: list[int], sampling: int) -> Tensor:
        first = common.nucleus_sampling(weighted)
        return weighted.index_fill(0, first, -torch.inf).softmax(0).multinomial(1)

    with patch.object(Tensor, "multinomial", likeliest), patch.object(common, "random_sampling", without):
        if win_size == 0:
            return int(common.nucleus_sampling(scores))
        return int(common.ras_sampling(scores, said, 25, win_size=win_size, tau_r=0.1))


def greedy_ids(scores: Tensor, said: list[int], sampling: int, ignore_eos: bool = True) -> Tensor:
    """Replace Qwen2LM.sampling_ids."""
    scores = scores.index_fill(0, torch.tensor([EOS]), -torch.inf) if ignore_eos else scores
    return torch.tensor(greedy(scores, said, 10))


def say_interleaved(lm: Qwen2LM, text: list[int], before: list[int], codes: Tensor) -> Iterator[int]:
    """Run Qwen2LM.inference_bistream on a text that arrives token by token, and yield its codes."""
    draw, step, num_codes = lm.sampling_ids, lm.llm.forward_one_step, codes.shape[1]
    first_fill = -num_codes % CODE_GROUP if num_codes else CODE_GROUP
    last = torch.zeros(0)

    def draw_or_fill(scores: Tensor, said: list[int], sampling: int, ignore_eos: bool = True) -> Tensor:
        is_fill = ignore_eos and FILL not in said and len(said) == first_fill
        return torch.tensor(FILL) if is_fill else draw(scores, said, sampling, ignore_eos)

    def step_once(xs: Tensor, masks: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        nonlocal last
        is_again = cache is not None and xs.shape[1] > 1 and torch.equal(xs[:, 0], last)
        last = xs[:, -1]
        return step(xs[:, 1:] if is_again else xs, masks, cache)

    with patch.object(lm, "sampling_ids", draw_or_fill), patch.object(lm.llm, "forward_one_step", step_once):
        tokens = (torch.tensor([[token]]) for token in text)
        lengths = torch.tensor(len(before)), torch.tensor(num_codes)
        yield from lm.inference_bistream(tokens, ids(before), lengths[0], codes, lengths[1], torch.zeros(0))


def ids(values: list[int]) -> Tensor:
    return torch.tensor([values], dtype=torch.int64)


def make_tokenizer(directory: Path) -> transformers.Qwen2Tokenizer:
    """Return the tokenizer, with the special tokens of cosyvoice/tokenizer/tokenizer.py, QwenTokenizer."""
    blank = directory / BLANK
    merges: Any = [tuple(line.split()) for line in (blank / "merges.txt").read_text().splitlines()[1:]]
    words = json.loads((blank / "vocab.json").read_text())
    tokenizer = transformers.Qwen2Tokenizer(vocab=words, merges=merges)
    special = [*BASE, END_OF_PROMPT, *TAGS]
    tokenizer.add_special_tokens(
        {"eos_token": BASE[0], "pad_token": BASE[0], "additional_special_tokens": special}
    )
    return tokenizer


# --- flow and vocoder ---


def make_flow(directory: Path, config: Config) -> CausalMaskedDiffWithXvec:
    c = config.flow
    estimator = CausalConditionalDecoder(
        in_channels=320, out_channels=80, channels=[c.channels], dropout=0.0, act_fn="gelu",
        attention_head_dim=c.head_dim, num_heads=c.estimator_heads, static_chunk_size=50,
        n_blocks=c.num_blocks, num_mid_blocks=c.num_mid,
    )  # fmt: skip
    params = {
        "sigma_min": 1e-6, "solver": "euler", "t_scheduler": "cosine", "training_cfg_rate": 0.2,
        "inference_cfg_rate": c.guidance, "reg_loss_type": "l1",
    }  # fmt: skip
    encoder = UpsampleConformerEncoder(
        output_size=c.width, attention_heads=c.heads, linear_units=c.inner, num_blocks=c.layers,
        dropout_rate=0.1, positional_dropout_rate=0.1, attention_dropout_rate=0.1, normalize_before=True,
        input_layer="linear", pos_enc_layer_type="rel_pos_espnet", selfattention_layer_type="rel_selfattn",
        input_size=c.width, use_cnn_module=False, macaron_style=False, static_chunk_size=25,
    )  # fmt: skip
    decoder = CausalConditionalCFM(
        in_channels=240,
        n_spks=1,
        spk_emb_dim=80,
        cfm_params=omegaconf.DictConfig(params),
        estimator=estimator,
    )
    flow = CausalMaskedDiffWithXvec(
        input_size=c.width, output_size=80, spk_embed_dim=c.speaker, vocab_size=NUM_CODES, input_frame_rate=25,
        encoder=encoder, decoder=decoder,
    )  # fmt: skip
    flow.load_state_dict(torch.load(directory / weights.FLOW_FILE, weights_only=True))
    return flow.eval()


def make_vocoder(directory: Path, config: Config) -> HiFTGenerator:
    c = config.vocoder
    vocoder = HiFTGenerator(
        in_channels=80, base_channels=c.channels, nb_harmonics=c.harmonics - 1, sampling_rate=RATE_HZ,
        nsf_alpha=c.alpha, nsf_sigma=c.sigma, nsf_voiced_threshold=c.voiced_hz, upsample_rates=list(c.rates),
        upsample_kernel_sizes=list(c.kernels), istft_params={"n_fft": c.fft, "hop_len": c.hop},
        source_resblock_kernel_sizes=list(c.source_kernels), source_resblock_dilation_sizes=[[1, 3, 5]] * 3,
        f0_predictor=ConvRNNF0Predictor(num_class=1, in_channels=80, cond_channels=c.f0_channels),
    )  # fmt: skip
    tensors = torch.load(directory / weights.VOCODER_FILE, weights_only=True)
    vocoder.load_state_dict({name.removeprefix("generator."): value for name, value in tensors.items()})
    return vocoder.eval()


# --- recordings ---


def make_s3_tokenizer(directory: Path) -> S3TokenizerV2:
    _, sizes = weights.open_tokenizer(directory)
    config = ModelConfig(n_audio_state=sizes.width, n_audio_head=sizes.heads, n_audio_layer=sizes.layers)
    model = S3TokenizerV2("speech_tokenizer_v2_25hz", config)
    model.load_state_dict(s3tokenizer.utils.onnx2torch(str(directory / weights.TOKENIZER_FILE)))
    return model.eval()


def make_speaker(directory: Path) -> CAMPPlus:
    """Return the speaker encoder.

    The exported file has folded normalisations: here they scale by 1 and add a bias.
    """
    model, ours = CAMPPlus(memory_efficient=False).eval(), CamPlus()
    table, cpu = weights.campplus(), torch.device("cpu")
    loading.load_file(ours, table, weights.open_speaker(directory), cpu, torch.float32)
    values, state = dict(ours.named_parameters()) | dict(ours.named_buffers()), model.state_dict()
    for name, mine in table.items():
        owner, _, kind = name.rpartition(".")
        norm = weights.folded_norm(owner)
        if norm is not None:
            state[f"{norm}.weight"] = torch.ones_like(state[f"{norm}.weight"])
            state[f"{norm}.running_mean"] = torch.zeros_like(state[f"{norm}.running_mean"])
            state[f"{norm}.running_var"] = torch.full_like(state[f"{norm}.running_var"], 1 - 1e-5)
        state[f"{norm}.bias" if norm and kind == "bias" else name] = values[mine].detach()
    model.load_state_dict(state)
    return model


def prompt_mel(samples: Tensor) -> Tensor:
    """Return the mel [1, MELS, F] of samples [1, N]."""
    return mel_spectrogram(samples, 1920, MELS, RATE_HZ, 480, 1920, 0, 8000, center=False)


# --- speaking ---


class Model:
    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32):
        self.directory, self.dtype, config = directory, dtype, Config.read(directory)
        self.lm = make_lm(directory, config).to(dtype)
        self.flow = make_flow(directory, config).to(dtype)
        self.vocoder, self.tokenizer = make_vocoder(directory, config), make_tokenizer(directory)
        path = directory / "spk2info.pt"
        self.voices = torch.load(path, weights_only=True) if path.exists() else {}

    def autocast(self) -> Any:
        """Return the original's context for half precision: autocast over modules that are already cast."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast("cpu", self.dtype)

    def text(self, text: str) -> list[int]:
        return self.tokenizer(text.strip())["input_ids"]

    def voice(self, request: dict[str, Any]) -> dict[str, Tensor]:
        """Return text, codes, mel and speaker of the voice, the prompt in cosyvoice/cli/frontend.py."""
        if not request["references"]:
            return stored(self.voices[request["voice"] or next(iter(self.voices))])
        [reference] = request["references"]
        return self.recorded(reference["clip"]) | {"text": ids(self.text(reference["transcript"] or ""))}

    @torch.inference_mode()
    def recorded(self, path: str) -> dict[str, Tensor]:
        clip = np.load(path)
        samples, rate_hz = torch.from_numpy(np.atleast_2d(clip["samples"])).mean(0), int(clip["rate_hz"])
        speech, voice = (
            torchaudio.transforms.Resample(rate_hz, to_hz)(samples) if rate_hz != to_hz else samples
            for to_hz in (SPEECH_HZ, RATE_HZ)
        )
        heard = s3tokenizer.log_mel_spectrogram(speech, n_mels=128)
        codes, _ = make_s3_tokenizer(self.directory).quantize(heard[None], torch.tensor([heard.shape[1]]))
        how = {"num_mel_bins": 80, "dither": 0, "sample_frequency": SPEECH_HZ}
        features = torchaudio.compliance.kaldi.fbank(speech[None], **how)
        speaker = make_speaker(self.directory)((features - features.mean(0, keepdim=True))[None])
        mel = prompt_mel(voice[None]).mT
        num = min(codes.shape[1], mel.shape[1] // 2)
        return {"codes": codes[:, :num].long(), "mel": mel[:, : 2 * num], "speaker": speaker}

    def codes(self, request: dict[str, Any], voice: dict[str, Tensor], is_endless: bool = False) -> list[int]:
        """Return the codes of a request. is_endless: as many as requested, without an early end."""
        is_interleaved = request["options"].get("text_mode") == "interleaved"
        text = self.text(request["text"] if is_interleaved else ended(request["text"].strip()))
        before, prompt = voice["text"][0].tolist(), voice["codes"]
        if request["instructions"]:
            instructions = request["instructions"].strip().removesuffix(END_OF_PROMPT)
            before = [*self.text(instructions), self.tokenizer.convert_tokens_to_ids(END_OF_PROMPT)]
        if request["instructions"] or not before:
            prompt = prompt[:, :0]
        if is_interleaved:
            said = say_interleaved(self.lm, text, before, prompt)
        else:
            lengths = (torch.tensor(len(part)) for part in (text, before, prompt[0]))
            num_text, num_before, num_prompt = lengths
            given = (ids(text), num_text, ids(before), num_before, prompt, num_prompt, torch.zeros(0))
            said = self.lm.inference(*given, min_token_text_ratio=20 if is_endless else 2)
        return list(islice(said, request["max_frames"]))

    def samples(self, codes: list[int], voice: dict[str, Tensor], has_masks: bool = False) -> Tensor:
        """Return samples [N] of all codes at once. has_masks: with the streaming mask in every chunk."""
        prompt, mel, speaker = voice["codes"], voice["mel"].to(self.dtype), voice["speaker"].to(self.dtype)
        lengths = (torch.tensor([size]) for size in (len(codes), prompt.shape[1], mel.shape[1]))
        num_codes, num_prompt, num_mel = lengths
        given = (ids(codes), num_codes, prompt, num_prompt, mel, num_mel, speaker)
        with self.autocast():
            frames, _ = self.flow.inference(*given, streaming=has_masks, finalize=True)
        return self.vocoder.inference(speech_feat=frames.float())[0][0]


def stored(voice: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a voice of spk2info.pt: a prompt, or only a speaker vector."""
    if "flow_prompt_speech_token" not in voice:
        none = torch.zeros(1, 0, dtype=torch.int64)
        return {"text": none, "codes": none, "mel": torch.zeros(1, 0, MELS), "speaker": voice["embedding"]}
    codes, mel = voice["flow_prompt_speech_token"].long(), voice["prompt_speech_feat"]
    num = min(codes.shape[1], mel.shape[1] // 2)
    speaker = voice["flow_embedding" if "flow_embedding" in voice else "embedding"]
    return {
        "text": voice["prompt_text"].long(), "codes": codes[:, :num], "mel": mel[:, : 2 * num], "speaker": speaker
    }  # fmt: skip


@torch.inference_mode()
def speak_from(model: Model, request: dict[str, Any], noise: Tensor) -> np.ndarray:
    """Generate a request greedily and return samples [N].

    noise [F, 2, MELS + 480 * H]: of the flow and of the vocoder's source.
    """
    voice = model.voice(request)
    with patch.object(model.lm, "sampling_ids", greedy_ids):
        codes = model.codes(request, voice)
    start, source = noise[: len(codes)].flatten(0, 1).split((MELS, noise.shape[-1] - MELS), 1)
    harmonics = source.unflatten(1, (480, -1)).flatten(0, 1)  # [960 F, H]
    fixed, first = model.flow.decoder.rand_noise.clone(), voice["mel"].shape[1]
    fixed[0, :, first : first + len(start)] = start.T

    def given(like: Tensor) -> Tensor:
        return harmonics.expand_as(like) if like.shape[-1] == harmonics.shape[-1] else torch.zeros_like(like)

    with patch.object(model.flow.decoder, "rand_noise", fixed), patch.object(torch, "randn_like", given):
        return model.samples(codes, voice, has_masks=True).numpy()


@torch.inference_mode()
def measure(model: Model, request: dict[str, Any], streams: int, rounds: int) -> dict[str, float]:
    """Time the reference. The voice is encoded before the clock starts."""
    voice = model.voice(request)

    def speak(max_frames: int) -> int:
        with model.autocast():
            codes = model.codes(request | {"max_frames": max_frames}, voice, is_endless=True)
        return len(model.samples(codes, voice))

    speak(4)
    began_s = time.perf_counter()
    samples = sum(speak(request["max_frames"]) for _ in range(rounds * streams))
    return speed(streams, time.perf_counter() - began_s, samples / RATE_HZ)


def main() -> None:
    order = json.loads(sys.argv[1])
    model = Model(Path(order["directory"]), getattr(torch, order.get("dtype", "float32")))

    def speak(request: dict[str, Any]) -> np.ndarray:
        return speak_from(model, request, torch.from_numpy(np.load(order["noise"])))

    print(json.dumps(answer(order, NAME, speak, partial(measure, model))))


if __name__ == "__main__":
    main()
