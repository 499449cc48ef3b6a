"""Chatterbox (Resemble AI, MIT): text and a recording of a voice to 24 kHz speech, one code per 40 ms, flow
matching and a HiFT vocoder. See README.md in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.chatterbox.clone import Encoders
    from zoo.chatterbox.config import Config
    from zoo.chatterbox.flow import Flow
    from zoo.chatterbox.model import Chatterbox
    from zoo.chatterbox.t3 import T3
    from zoo.contract import Spec
    from zoo.nn.s3.held_pitch import Vocoder

NAME = "chatterbox"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`: the file of the language model decides."""
    from zoo.chatterbox.config import PACKS, T3_FILES

    return any(path.glob(PACKS)) or any((path / name).exists() for name in T3_FILES)


def load(
    directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None
) -> Chatterbox:
    """Load the family: language model and flow in `dtype`, the rest in fp32. Raises ValueError that names the
    file and what is wrong with it."""
    import torch

    from zoo.chatterbox import weights
    from zoo.chatterbox.clone import Cloner, read_voice
    from zoo.chatterbox.config import VOICE_ENCODER_FILES, open_first, open_s3gen, open_t3
    from zoo.chatterbox.model import Chatterbox
    from zoo.chatterbox.prompt import PromptWriter
    from zoo.checkpoint import loading

    if adapter is not None:
        raise ValueError(f"{NAME} takes no adapter, and {adapter} is given: load the model without one")
    config, spec = describe(directory)
    writer = PromptWriter(config, directory)
    t3, flow, vocoder, encoders = build(config)
    fp32 = torch.float32

    file = weights.without(open_t3(directory), weights.UNREAD)
    if config.is_turbo:
        file = weights.turned(file, weights.is_gpt2_matrix)
    loading.load_file(t3, weights.t3(config.t3), file, device, dtype)

    s3gen = open_s3gen(directory)
    weights.check_parts(s3gen)
    loading.load_file(flow, weights.flow(config), weights.part(s3gen, "flow."), device, dtype)
    loading.load_weight_normed(
        vocoder,
        weights.vocoder(config),
        weights.part(s3gen, "mel2wav."),
        device,
        is_weight_normed=weights.names.is_weight_normed,
    )
    file = weights.without(weights.part(s3gen, "tokenizer."), weights.UNREAD_OF_TOKENIZER)
    loading.load_file(encoders.tokenizer, weights.tokenizer(config.tokenizer), file, device, fp32)
    file = weights.folded(weights.part(s3gen, "speaker_encoder."))
    loading.load_file(encoders.timbre, weights.names.campplus(), file, device, fp32)
    hint = "; take that of ResembleAI/chatterbox"
    file = open_first(directory, *VOICE_ENCODER_FILES, hint=hint)
    file = weights.without(file, weights.UNREAD_OF_VOICE)
    loading.load_file(encoders.voice, weights.voice_encoder(), file, device, fp32)

    for module in (t3, flow, vocoder, encoders.voice):
        module.prepare()
    encoders.eval().requires_grad_(False)
    cloner = Cloner(encoders, config.is_turbo, device)
    voice = read_voice(directory, config, device)
    return Chatterbox(config, spec, t3, flow, vocoder, writer, voice, cloner).eval().requires_grad_(False)


def build(config: Config) -> tuple[T3, Flow, Vocoder, Encoders]:
    """Return all networks on the `meta` device: names and shapes, no memory."""
    import torch

    from zoo.chatterbox.clone import Encoders
    from zoo.chatterbox.flow import Flow
    from zoo.chatterbox.t3 import T3
    from zoo.nn.s3.held_pitch import Vocoder

    with torch.device("meta"):
        return T3(config.t3), Flow(config.flow), Vocoder(config.vocoder), Encoders(config)


def describe(directory: Path) -> tuple[Config, Spec]:
    """Return Config and Spec, read from the headers of the files. Raises ValueError."""
    import torch

    from zoo.chatterbox.clone import REFERENCE_S, TURBO_REFERENCE_S, VOICES_FILE
    from zoo.chatterbox.config import HEAD_DIM, Config
    from zoo.chatterbox.prompt import HINTS, PIECE_S, TURBO_HINTS, languages, options
    from zoo.chatterbox.strategy import MAX_FRAMES, MAX_POSITIONS, window
    from zoo.contract import KV, Spec
    from zoo.nn.s3.sizes import FRAME_SAMPLES, MEL_SAMPLES, MELS, RATE_HZ, TOKEN_FRAMES

    config = Config.read(directory)
    t3, has_voice = config.t3, (directory / VOICES_FILE).exists()
    max_positions = min(MAX_POSITIONS, t3.positions or MAX_POSITIONS)
    max_frames = min(MAX_FRAMES, max_positions - 1, (t3.speech_positions or MAX_FRAMES + 1) - 1)
    spec = Spec(
        family=NAME,
        variant=config.kind,
        frame_shape=(1,),
        frame_dtype=torch.int64,
        frame_samples=FRAME_SAMPLES,
        sample_rate_hz=RATE_HZ,
        kv=KV(t3.layers, t3.heads, HEAD_DIM),
        width=t3.hidden,
        max_frames=max_frames,
        max_positions=max_positions,
        window=window(max_frames),
        lanes=1 if config.is_turbo else 2,
        # per mel frame: where the flow starts from, then the noise of the vocoder's source
        noise_shape=(TOKEN_FRAMES, MELS + MEL_SAMPLES * config.vocoder.harmonics),
        voices=("default",) if has_voice else (),
        languages=languages(config),
        modes=("voice", "clone") if has_voice else ("clone",),
        reference_s=TURBO_REFERENCE_S if config.is_turbo else REFERENCE_S,
        options=options(config),
        hints=TURBO_HINTS if config.is_turbo else HINTS,
        name=config.title,
        piece_s=PIECE_S,
    )
    return config, spec


def survey(directory: Path) -> tuple[Spec, int]:
    """Return the Spec and the number of parameters without reading any weights."""
    config, spec = describe(directory)
    return spec, sum(p.numel() for module in build(config) for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout. Raises ValueError and OSError."""
    import torch

    from zoo.chatterbox.demo import write

    return write(directory, size, seed, dtype or torch.float32)
