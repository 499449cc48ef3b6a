"""Makes the CosyVoice 2 fixtures from reference packages: transformers (language model, text tokenizer),
cosyvoice-minicpmo 0.1.0 (flow,
vocoder), s3tokenizer 0.3.0, chatterbox-tts 0.1.7 (CAM++), torchaudio 2.11 (filter banks, resampling).

Runs in the reference environment that remake.sh builds:
    PYTHONPATH=. .venv-parity-cosyvoice2/bin/python tests/parity/oracle_cosyvoice2.py
"""

# ruff: noqa: RUF001  (the Chinese text has Chinese punctuation)

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import omegaconf
import torch
import torchaudio
import transformers
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
FIXTURES = HERE / "cosyvoice2"
SITE = Path(importlib.util.find_spec("s3tokenizer").submodule_search_locations[0]).parent
SEED = 0


def stub(name: str, path: Path | None = None, **values: Any) -> None:
    """A package whose own __init__, which imports training code, is not run."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    if path is not None:
        module.__path__ = [str(path)]
    vars(module).update(values)
    sys.modules[name] = module


for package in (
    "cosyvoice",
    "cosyvoice.utils",
    "cosyvoice.flow",
    "cosyvoice.hifigan",
    "cosyvoice.transformer",
    "cosyvoice.llm",
):
    stub(package, SITE / package.replace(".", "/"))
for package in ("matcha", "matcha.utils", "matcha.models", "matcha.models.components", "matcha.hifigan"):
    stub(package, SITE / package.replace(".", "/"))
for package in ("chatterbox", "chatterbox.models", "chatterbox.models.s3gen"):
    stub(package, SITE / package.replace(".", "/"))
stub("matcha.utils.pylogger", get_pylogger=logging.getLogger)
stub("cosyvoice.utils.losses", tpr_loss=None, mel_loss=None)
stub("cosyvoice.llm.llm", TransformerLM=None, Qwen2LM=None)
stub("cosyvoice.cli", SITE / "cosyvoice/cli")
stub("cosyvoice.cli.model", CosyVoiceModel=None, CosyVoice2Model=None)

import s3tokenizer  # noqa: E402
from chatterbox.models.s3gen.xvector import CAMPPlus  # noqa: E402
from cosyvoice.flow.decoder import CausalConditionalDecoder  # noqa: E402
from cosyvoice.flow.flow import CausalMaskedDiffWithXvec  # noqa: E402
from cosyvoice.flow.flow_matching import CausalConditionalCFM  # noqa: E402
from cosyvoice.hifigan.f0_predictor import ConvRNNF0Predictor  # noqa: E402
from cosyvoice.hifigan.generator import HiFTGenerator  # noqa: E402
from cosyvoice.transformer.upsample_encoder import UpsampleConformerEncoder  # noqa: E402
from cosyvoice.utils import common  # noqa: E402
from s3tokenizer.model_v2 import ModelConfig, S3TokenizerV2  # noqa: E402

from zoo.cosyvoice2 import demo, weights  # noqa: E402
from zoo.cosyvoice2.campplus import CamPlus  # noqa: E402
from zoo.nn import checkpoint, onnx_file, synthetic  # noqa: E402

SIZE = demo.CONFIGS["parity"]
PACKAGES = (
    "transformers",
    "cosyvoice-minicpmo",
    "s3tokenizer",
    "chatterbox-tts",
    "torchaudio",
    "torch",
    "diffusers",
    "librosa",
)
VERSIONS = {name: importlib.metadata.version(name) for name in PACKAGES}
NUM_CODES, FRAMES = 6561, 57  # 57 codes: two chunks and a rest
TEXTS = (
    "Good morning.",
    "It's 7:45, and my iPhone isn't ready [laughter] at all.",
    "你好，世界！今天天气很好，谢谢大家。",
    " <strong>very</strong>  well [breath]",
    "cafe\u0301 x²\n\n12345 !?",
)


def noise(name: str, *shape: int) -> Tensor:
    return torch.from_numpy(synthetic.fill(f"noise {name}", shape, "parity", [("noise", 0.0, 1.0, False)]))


def save(name: str, facts: dict[str, Any], **tensors: Tensor) -> None:
    FIXTURES.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, FIXTURES / f"{name}.safetensors")
    facts |= {"size": "parity", "seed": SEED, "versions": VERSIONS}
    (FIXTURES / f"{name}.json").write_text(
        json.dumps(facts, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    )


# language model


def language_model(directory: Path) -> tuple[transformers.Qwen2Model, dict[str, Tensor]]:
    tensors = torch.load(directory / "llm.pt", weights_only=True)
    config = transformers.Qwen2Config(
        **json.loads((directory / "CosyVoice-BlankEN" / "config.json").read_text())
    )
    model = transformers.Qwen2Model(config).eval()
    prefix = "llm.model.model."
    model.load_state_dict(
        {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    )
    return model, tensors


def greedy(scores: Tensor, said: list[int], win_size: int) -> int:
    """common.ras_sampling with draws that take the likeliest, and what was repeated left out of the second
    one."""

    def likeliest(weights: Tensor, *_: Any, **__: Any) -> Tensor:
        return weights.argmax()[None]

    def without(weighted: Tensor, said: list[int], sampling: int) -> Tensor:
        first = common.nucleus_sampling(weighted)
        return weighted.index_fill(0, first, -torch.inf).softmax(0).multinomial(1)

    with patch.object(Tensor, "multinomial", likeliest), patch.object(common, "random_sampling", without):
        if win_size == 0:
            return int(common.nucleus_sampling(scores))
        return int(common.ras_sampling(scores, said, 25, win_size=win_size, tau_r=0.1))


@torch.inference_mode()
def speak(
    model: transformers.Qwen2Model, tensors: dict[str, Tensor], case: dict[str, Any]
) -> dict[str, Tensor]:
    """As Qwen2LM.inference puts it together; the whole sequence is computed anew for every code."""
    embed, speech = tensors["llm.model.model.embed_tokens.weight"], tensors["speech_embedding.weight"]
    sos, task = tensors["llm_embedding.weight"].split(1)
    inputs = torch.cat((sos, embed[case["text_ids"]], task, speech[case["codes"]]))
    said: list[int] = []
    kept = []
    for step in range(case["max_frames"]):
        whole = torch.cat((inputs, speech[torch.tensor(said, dtype=torch.int64)]))
        hidden = model(inputs_embeds=whole[None]).last_hidden_state[0, -1]
        scores = (tensors["llm_decoder.weight"] @ hidden + tensors["llm_decoder.bias"]).log_softmax(0)
        if step < case["min_frames"]:
            scores[NUM_CODES] = -torch.inf
        if step % 8 == 0:
            kept.append(hidden)
        code = greedy(scores, said, case["win_size"])
        if code >= NUM_CODES:
            break
        said.append(code)
    return {"codes": torch.tensor(said), "hidden": torch.stack(kept), "inputs": inputs[-1]}


def make_language_model(directory: Path) -> None:
    model, tensors = language_model(directory)
    tokenizer = text_tokenizer(directory)
    voices = torch.load(directory / "spk2info.pt", weights_only=True)
    prompt_text = voices["demo"]["prompt_text"][0].tolist()
    prompt_codes = voices["demo"]["flow_prompt_speech_token"][0]
    none = prompt_codes[:0]
    end = tokenizer.convert_tokens_to_ids("<|endofprompt|>")
    spoken = {text: tokenizer(text.strip())["input_ids"] for text in (*TEXTS, "slowly")}
    cases = {
        "zero_shot": (TEXTS[0], prompt_text, prompt_codes, {"voice": "demo"}),
        "chinese": (TEXTS[2], prompt_text, prompt_codes, {"voice": "demo"}),
        "instruct": (TEXTS[1], [*spoken["slowly"], end], none, {"voice": "demo", "instructions": "slowly"}),
        "sound": (TEXTS[0], [], none, {"voice": "sound"}),
    }
    for name, (text, before, codes, asked) in cases.items():
        for win_size in (0, 10):
            ids = spoken[text]
            case = {
                "text_ids": [*before, *ids],
                "codes": codes,
                "max_frames": 40,
                "min_frames": 2 * len(ids),
                "win_size": win_size,
            }
            made = speak(model, tensors, case)
            request = asked | {
                "text": text,
                "temperature": 0.0,
                "max_frames": 40,
                "options": {"ras_win_size": win_size},
            }
            save(f"lm_{name}_{win_size}", {"request": request, "text_ids": case["text_ids"]}, **made)


def text_tokenizer(directory: Path) -> transformers.Qwen2Tokenizer:
    """As cosyvoice/tokenizer/tokenizer.py, QwenTokenizer, adds its special tokens."""
    from zoo.cosyvoice2.prompt import BASE, END_OF_PROMPT, TAGS

    blank = directory / "CosyVoice-BlankEN"
    merges = [tuple(line.split()) for line in (blank / "merges.txt").read_text().splitlines()[1:]]
    words = json.loads((blank / "vocab.json").read_text())
    tokenizer = transformers.Qwen2Tokenizer(vocab=words, merges=merges)
    tokenizer.add_special_tokens(
        {
            "eos_token": BASE[0],
            "pad_token": BASE[0],
            "additional_special_tokens": [*BASE, END_OF_PROMPT, *TAGS],
        }
    )
    return tokenizer


def make_tokens(directory: Path) -> None:
    tokenizer = text_tokenizer(directory)
    tokens = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in TEXTS]
    (FIXTURES / "tokens.json").write_text(json.dumps(tokens, indent=1, ensure_ascii=False) + "\n")


# flow and vocoder


def reference_flow(directory: Path) -> CausalMaskedDiffWithXvec:
    content = {
        "sigma_min": 1e-6,
        "solver": "euler",
        "t_scheduler": "cosine",
        "training_cfg_rate": 0.2,
        "inference_cfg_rate": 0.7,
    }
    estimator = CausalConditionalDecoder(
        in_channels=320, out_channels=80, channels=[SIZE.channels], dropout=0.0, act_fn="gelu",
        attention_head_dim=SIZE.head_dim, num_heads=SIZE.estimator_heads, static_chunk_size=50,
        n_blocks=SIZE.num_blocks, num_mid_blocks=SIZE.num_mid,
    )  # fmt: skip
    params = omegaconf.DictConfig(content | {"reg_loss_type": "l1"})
    encoder = UpsampleConformerEncoder(
        output_size=512, attention_heads=8, linear_units=SIZE.encoder_inner, num_blocks=SIZE.encoder_layers,
        dropout_rate=0.1, positional_dropout_rate=0.1, attention_dropout_rate=0.1, normalize_before=True,
        input_layer="linear", pos_enc_layer_type="rel_pos_espnet", selfattention_layer_type="rel_selfattn",
        input_size=512, use_cnn_module=False, macaron_style=False, static_chunk_size=25,
    )  # fmt: skip
    decoder = CausalConditionalCFM(
        in_channels=240, n_spks=1, spk_emb_dim=80, cfm_params=params, estimator=estimator
    )
    flow = CausalMaskedDiffWithXvec(
        input_size=512,
        output_size=80,
        spk_embed_dim=192,
        vocab_size=NUM_CODES,
        input_frame_rate=25,
        encoder=encoder,
        decoder=decoder,
    )
    flow.load_state_dict(torch.load(directory / "flow.pt", weights_only=True))
    return flow.eval()


def reference_vocoder(directory: Path) -> HiFTGenerator:
    vocoder = HiFTGenerator(
        in_channels=80, base_channels=SIZE.vocoder, nb_harmonics=8, sampling_rate=24000, nsf_alpha=0.1,
        nsf_sigma=0.003, nsf_voiced_threshold=10, upsample_rates=[8, 5, 3], upsample_kernel_sizes=[16, 11, 7],
        istft_params={"n_fft": 16, "hop_len": 4},
        source_resblock_kernel_sizes=[7, 7, 11], source_resblock_dilation_sizes=[[1, 3, 5]] * 3,
        f0_predictor=ConvRNNF0Predictor(num_class=1, in_channels=80, cond_channels=SIZE.f0),
    )  # fmt: skip
    vocoder.load_state_dict(torch.load(directory / "hift.pt", weights_only=True))
    return vocoder.eval()


@torch.inference_mode()
def make_flow(directory: Path) -> None:
    flow, voices = reference_flow(directory), torch.load(directory / "spk2info.pt", weights_only=True)
    codes = (torch.arange(FRAMES)[None] * 997 + 5) % NUM_CODES
    demo_voice, sound = voices["demo"], voices["sound"]
    prompt_codes, prompt_mel = demo_voice["flow_prompt_speech_token"], demo_voice["prompt_speech_feat"]
    prompts = {
        "demo": (prompt_codes, prompt_mel, demo_voice["flow_embedding"]),
        "sound": (prompt_codes[:, :0], prompt_mel[:, :0], sound["embedding"]),
    }
    made = {"codes": codes[0], "noise": flow.decoder.rand_noise[0, :, ::101].clone()}
    for name, (before, mel, speaker) in prompts.items():
        for mode, streaming, finalize in (
            ("chunks", True, True),
            ("chunks_open", True, False),
            ("whole", False, True),
        ):
            lengths = (
                torch.tensor([codes.shape[1]]),
                torch.tensor([before.shape[1]]),
                torch.tensor([mel.shape[1]]),
            )
            mels, _ = flow.inference(
                codes, lengths[0], before, lengths[1], mel, lengths[2], speaker, streaming, finalize
            )
            made[f"{name}_{mode}"] = mels[0].mT
    save("flow", {"chunk": 25}, **made)
    make_vocoder(directory, made)


def make_vocoder(directory: Path, mels: dict[str, Tensor]) -> None:
    """The noise of the source is ours; the random phase has no effect."""
    vocoder = reference_vocoder(directory)
    values = noise("source", FRAMES * 960, 9)
    made = {}
    for name in ("demo_chunks", "sound_chunks"):
        for kind in ("", "_exact"):
            with patch.object(
                torch,
                "randn_like",
                lambda like: values.expand_as(like) if like.shape[-1] == 9 else torch.zeros_like(like),
            ):
                samples, source = vocoder.inference(mels[name].mT[None])
            made[f"{name}_samples{kind}"], made[f"{name}_source{kind}"] = samples[0, ::7], source[0, 0, ::7]
            generator = vocoder.m_source.l_sin_gen
            sum_in_fp64 = generator.forward
            generator.forward = lambda f0, inner=sum_in_fp64: tuple(
                value.float() for value in inner(f0.double())
            )
        del generator.forward
        made[f"{name}_f0"] = vocoder.f0_predictor(mels[name].mT[None])[0]
    save("vocoder", {"stride": 7}, **made)


# voices from clips


def clips() -> dict[str, tuple[Tensor, int]]:
    """Chirps with noise, one of them in stereo."""
    made = {}
    for name, seconds, rate_hz, channels in (
        ("short", 0.7, 16000, 1),
        ("stereo", 1.31, 44100, 2),
        ("long", 2.6, 24000, 1),
    ):
        at = torch.arange(int(seconds * rate_hz)) / rate_hz
        chirp = (2 * torch.pi * (110 + 40 * at) * at).sin() * 0.3 * (1 + (7 * at).sin()) / 2
        samples = torch.stack([chirp + 0.02 * noise(f"{name} {i}", len(at)) for i in range(channels)])
        made[name] = (32768 * samples).round() / 32768, rate_hz
    return made


@torch.inference_mode()
def make_voices(directory: Path) -> None:
    file = directory / weights.TOKENIZER_FILE
    tokenizer = S3TokenizerV2(
        "speech_tokenizer_v2_25hz",
        ModelConfig(
            n_audio_state=SIZE.s3_width, n_audio_head=SIZE.s3_width // 64, n_audio_layer=SIZE.s3_layers
        ),
    )
    tokenizer.load_state_dict(s3tokenizer.utils.onnx2torch(str(file)))
    speaker, made = speaker_encoder(), {}
    speaker.load_state_dict(speaker_tensors(speaker))
    for name, (samples, rate_hz) in clips().items():
        mono = samples.mean(0)
        speech = torchaudio.transforms.Resample(rate_hz, 16000)(mono) if rate_hz != 16000 else mono
        voice = torchaudio.transforms.Resample(rate_hz, 24000)(mono) if rate_hz != 24000 else mono
        mel = s3tokenizer.log_mel_spectrogram(speech, n_mels=128)
        codes, _ = tokenizer.eval().quantize(mel[None], torch.tensor([mel.shape[1]]))
        features = torchaudio.compliance.kaldi.fbank(
            speech[None], num_mel_bins=80, dither=0, sample_frequency=16000
        )
        features = features - features.mean(0, keepdim=True)
        made |= {
            f"{name}_clip": (32768 * samples).to(torch.int16),
            f"{name}_codes": codes[0].long(),
            f"{name}_features": features[::3],
        }
        made |= {f"{name}_speaker": speaker(features[None])[0], f"{name}_mel": prompt_mel(voice[None])[0].mT}
    save("voices", {"rates_hz": {name: rate_hz for name, (_, rate_hz) in clips().items()}}, **made)


def prompt_mel(samples: Tensor) -> Tensor:
    from matcha.utils.audio import mel_spectrogram

    return mel_spectrogram(samples, 1920, 80, 24000, 480, 1920, 0, 8000, center=False)


def speaker_encoder() -> CAMPPlus:
    return CAMPPlus(memory_efficient=False).eval()


def speaker_tensors(model: CAMPPlus) -> dict[str, Tensor]:
    """Unlike any two of them: an exporter merges equal ones."""
    state = model.state_dict()
    filled = {
        name: torch.from_numpy(fill_speaker(name, tuple(value.shape)))
        for name, value in state.items()
        if value.dim()
    }
    return state | filled


def fill_speaker(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return synthetic.fill(name, shape, "cosyvoice2:campplus", demo.RULES)


@torch.inference_mode()
def check_exported_speaker(directory: Path) -> None:
    """What PyTorch's exporter writes of the reference's own CAM++ is read through our table, and gives the
    same vector."""
    model = speaker_encoder()
    model.load_state_dict(speaker_tensors(model))
    path = directory / "exported" / weights.SPEAKER_FILE
    path.parent.mkdir()
    features = noise("features", 1, 250, 80)
    axes = {"input": {1: "frames"}}
    torch.onnx.export(
        model,
        (features,),
        str(path),
        input_names=["input"],
        output_names=["output"],
        dynamic_axes=axes,
        opset_version=14,
        dynamo=False,
    )
    print(len(onnx_file.initializers(path)), "initializers")
    with torch.device("meta"):
        ours = CamPlus()
    checkpoint.load_file(
        ours, weights.campplus(), weights.open_speaker(path.parent), torch.device("cpu"), torch.float32
    )
    difference = (ours(features) - model(features)).abs().max() / model(features).abs().max()
    assert difference < 1e-4, f"the exported speaker encoder differs by {difference}"
    print("exported CAM++ differs by", float(difference))


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        directory = demo.write(Path(place) / "model", "parity", SEED)
        FIXTURES.mkdir(exist_ok=True)
        make_tokens(directory)
        make_language_model(directory)
        make_flow(directory)
        make_voices(directory)
        check_exported_speaker(directory)


if __name__ == "__main__":
    main()
