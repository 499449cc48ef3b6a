"""The sizes of a checkpoint, read off the names and shapes of its tensors.

The directory has no config.json: the reference keeps every size in its code. Values that no shape shows (the
head size, the strides of the vocoder, the norms' eps) are constants here, as there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zoo.checkpoint.tensor_files import Header, TensorFile, of_tensors, open_file, read_pickle
from zoo.nn.llama import LlamaConfig, RopeScaling
from zoo.nn.s3.sizes import MELS, NUM_CODES, FlowSizes, VocoderSizes, vocoder_sizes
from zoo.nn.s3.tokenizer import S3Config

Kind = Literal["english", "multilingual", "turbo"]
# The file of the language model says which variant it is. The first one that exists is read.
T3_FILES: dict[str, Kind] = {
    "t3_turbo_v1.safetensors": "turbo",
    "t3_nano_v1.safetensors": "turbo",
    "t3_cfg.safetensors": "english",
    "t3_mtl23ls_v2.safetensors": "multilingual",
    "t3_mtl23ls_v3.safetensors": "multilingual",
    "t3_23lang.safetensors": "multilingual",  # of the first release
    "t3_cfg.pt": "english",  # of the first release, in fp16
}
TITLES = {
    "t3_turbo_v1.safetensors": "Chatterbox Turbo",
    "t3_nano_v1.safetensors": "Chatterbox Nano",
    "t3_cfg.safetensors": "Chatterbox",
    "t3_mtl23ls_v2.safetensors": "Chatterbox Multilingual",
    "t3_mtl23ls_v3.safetensors": "Chatterbox Multilingual",
    "t3_23lang.safetensors": "Chatterbox Multilingual",
    "t3_cfg.pt": "Chatterbox",
}
# Any other one is Multilingual tuned for one language, such as t3_pt_br.safetensors.
PACKS = "t3_*.safetensors"
FIRST_MULTILINGUAL = "t3_23lang.safetensors"
VOICE_ENCODER_FILES = ("ve.safetensors", "ve.pt")
BEGIN, END = NUM_CODES, NUM_CODES + 1  # of speech, in the table of codes
HEAD_DIM = 64
EPS = 1e-5
SPEAKER = 256  # width of the voice encoder's vector


@dataclass(frozen=True)
class T3Config:
    """The sizes of the language model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    text_vocab: int
    num_outputs: int  # rows of the table of codes
    text_positions: int
    speech_positions: int
    positions: int  # of GPT-2's table; 0 for Llama
    queries: int  # of the perceiver; 0 without one

    @property
    def is_gpt2(self) -> bool:
        return self.positions > 0

    @property
    def llama(self) -> LlamaConfig:
        return LlamaConfig(
            hidden=self.hidden,
            inner=self.inner,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=HEAD_DIM,
            eps=EPS,
            rope_theta=500_000.0,
            scaling=RopeScaling(factor=8.0, low=1.0, high=4.0, positions=8192),
        )


@dataclass(frozen=True)
class Config:
    """All sizes of a model directory."""

    kind: Kind
    title: str
    t3: T3Config
    flow: FlowSizes
    vocoder: VocoderSizes
    tokenizer: S3Config
    keeps_case: bool = False  # whether it reads capitals, and accents as they are written

    @property
    def is_turbo(self) -> bool:
        return self.kind == "turbo"

    @property
    def tokenizer_file(self) -> str:
        """The name of the text's tokenizer. Turbo has GPT-2's files instead."""
        assert not self.is_turbo, "Turbo has no file of this kind"
        if self.kind == "english":
            return "tokenizer.json"
        return "mtl_tokenizer.json" if self.keeps_case else "grapheme_mtl_merged_expanded_v1.json"

    @classmethod
    def read(cls, directory: Path) -> Config:
        """Read the headers of a directory's files. Raises ValueError that names the file and the tensor."""
        name = t3_file(directory)
        t3 = Shapes.of(open_t3(directory))
        s3gen = Shapes.of(open_s3gen(directory))
        config = cls(
            kind=T3_FILES.get(name, "multilingual"),
            title=TITLES.get(name, "Chatterbox Multilingual"),
            t3=_t3(t3),
            flow=_flow(s3gen),
            vocoder=_vocoder(s3gen),
            tokenizer=_tokenizer(s3gen),
            keeps_case=name == FIRST_MULTILINGUAL,
        )
        if config.is_turbo != config.flow.is_meanflow:
            has = "has" if config.flow.is_meanflow else "lacks"
            raise ValueError(f"{s3gen.path} {has} a time_embed_mixer, which belongs to Chatterbox Turbo")
        return config


def t3_file(directory: Path) -> str:
    """Return the name of the language model's file. Raises ValueError."""
    for name in T3_FILES:
        if (directory / name).exists():
            return name
    if packs := sorted(path.name for path in directory.glob(PACKS)):
        return packs[0]
    raise ValueError(f"{directory} has no language model; possible files: {', '.join(T3_FILES)}")


def open_t3(directory: Path) -> TensorFile:
    """Open the language model's file. A pickle may hold its tensors as {"model": [tensors]}. Raises ValueError."""
    path = directory / t3_file(directory)
    if path.suffix != ".pt":
        return open_file(path)
    content = read_pickle(path)
    if isinstance(content, dict) and isinstance(content.get("model"), list) and content["model"]:
        content = content["model"][0]
    return of_tensors(path, content)


def open_first(directory: Path, *names: str, hint: str = "") -> TensorFile:
    """Open the first of these files that exists. Raises ValueError."""
    for name in names:
        if (directory / name).exists():
            return open_file(directory / name)
    raise ValueError(f"{directory / names[0]} does not exist{hint}")


def open_s3gen(directory: Path) -> TensorFile:
    if T3_FILES.get(t3_file(directory)) == "turbo":
        return open_first(directory, "s3gen_meanflow.safetensors")
    packs = ("s3gen_v3.safetensors", "s3gen_v3.pt")
    return open_first(directory, "s3gen.safetensors", "s3gen.pt", *packs)


@dataclass(frozen=True)
class Shapes:
    """The shapes of a file's tensors."""

    path: Path
    headers: Mapping[str, Header]

    @classmethod
    def of(cls, file: TensorFile) -> Shapes:
        return cls(file.path, file.headers)

    def __call__(self, name: str, dims: int) -> tuple[int, ...]:
        """Return a tensor's shape. Raises ValueError if it is missing, empty, or has another number of
        axes."""
        header = self.headers.get(name)
        if header is None:
            raise ValueError(f"{self.path} has no tensor {name}, which says sizes of the model")
        if len(header.shape) != dims or 0 in header.shape:
            raise ValueError(f"{self.path}: {name} has shape {list(header.shape)}; {dims} axes are needed")
        return header.shape

    def heads(self, name: str) -> int:
        """Return the attention heads of a matrix of queries."""
        rows, _ = self(name, 2)
        if rows % HEAD_DIM:
            raise ValueError(f"{self.path}: {name} has {rows} rows; a multiple of {HEAD_DIM} is needed")
        return rows // HEAD_DIM

    def count(self, pattern: str) -> int:
        """Return the number of different indices that stand at the only group of a pattern."""
        found = {match[1] for name in self.headers if (match := re.match(pattern, name)) is not None}
        if not found:
            raise ValueError(f"{self.path} has no tensors {pattern}")
        return len(found)


def _t3(shapes: Shapes) -> T3Config:
    num_outputs, hidden = shapes("speech_emb.weight", 2)
    text_vocab, _ = shapes("text_emb.weight", 2)
    if num_outputs <= END:
        raise ValueError(f"{shapes.path}: speech_emb.weight has {num_outputs} rows; {END + 1} are needed")
    if "tfmr.wpe.weight" in shapes.headers:
        if hidden % HEAD_DIM:
            raise ValueError(
                f"{shapes.path}: speech_emb.weight is {hidden} wide; not a multiple of {HEAD_DIM}"
            )
        return T3Config(
            hidden=hidden,
            inner=shapes("tfmr.h.0.mlp.c_fc.weight", 2)[1],
            layers=shapes.count(r"tfmr\.h\.(\d+)\."),
            heads=hidden // HEAD_DIM,
            text_vocab=text_vocab,
            num_outputs=num_outputs,
            text_positions=0,
            speech_positions=0,
            positions=shapes("tfmr.wpe.weight", 2)[0],
            queries=0,
        )
    return T3Config(
        hidden=hidden,
        inner=shapes("tfmr.layers.0.mlp.gate_proj.weight", 2)[0],
        layers=shapes.count(r"tfmr\.layers\.(\d+)\."),
        heads=shapes.heads("tfmr.layers.0.self_attn.q_proj.weight"),
        text_vocab=text_vocab,
        num_outputs=num_outputs,
        text_positions=shapes("text_pos_emb.emb.weight", 2)[0],
        speech_positions=shapes("speech_pos_emb.emb.weight", 2)[0],
        positions=0,
        queries=shapes("cond_enc.perceiver.pre_attention_query", 3)[1],
    )


def _flow(shapes: Shapes) -> FlowSizes:
    estimator = "flow.decoder.estimator"
    num_codes, width = shapes("flow.input_embedding.weight", 2)
    if num_codes != NUM_CODES:
        raise ValueError(f"{shapes.path}: flow.input_embedding.weight has {num_codes} rows, not {NUM_CODES}")
    return FlowSizes(
        num_codes=num_codes,
        width=width,
        heads=shapes("flow.encoder.encoders.0.self_attn.pos_bias_u", 2)[0],
        inner=shapes("flow.encoder.encoders.0.feed_forward.w_1.weight", 2)[0],
        layers=shapes.count(r"flow\.encoder\.encoders\.(\d+)\."),
        speaker=shapes("flow.spk_embed_affine_layer.weight", 2)[1],
        channels=shapes(f"{estimator}.final_proj.weight", 3)[1],
        estimator_heads=shapes.heads(f"{estimator}.mid_blocks.0.1.0.attn1.to_q.weight"),
        head_dim=HEAD_DIM,
        num_blocks=shapes.count(r"flow\.decoder\.estimator\.mid_blocks\.0\.1\.(\d+)\."),
        num_mid=shapes.count(r"flow\.decoder\.estimator\.mid_blocks\.(\d+)\."),
        guidance=0.7,
        is_meanflow=f"{estimator}.time_embed_mixer.weight" in shapes.headers,
    )


def _vocoder(shapes: Shapes) -> VocoderSizes:
    direction = "parametrizations.weight.original1"
    channels, mels, _ = shapes(f"mel2wav.conv_pre.{direction}", 3)
    if mels != MELS or channels % 8:
        given = f"mel2wav.conv_pre has {channels} channels of {mels} mels"
        raise ValueError(f"{shapes.path}: {given}; a multiple of 8 and {MELS} are needed")
    harmonics = shapes("mel2wav.m_source.l_linear.weight", 2)[1]
    return vocoder_sizes(channels, harmonics, shapes(f"mel2wav.f0_predictor.condnet.0.{direction}", 3)[0])


def _tokenizer(shapes: Shapes) -> S3Config:
    width, mels, _ = shapes("tokenizer.encoder.conv1.weight", 3)
    shapes.heads("tokenizer.encoder.blocks.0.attn.query.weight")
    return S3Config(mels, width, shapes.count(r"tokenizer\.encoder\.blocks\.(\d+)\."))
