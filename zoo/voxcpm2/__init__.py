"""VoxCPM2 (OpenBMB, Apache-2.0): text to 48 kHz speech, one patch of 4 continuous latents per 160 ms.

The family also loads the first generation, VoxCPM 0.5B and 1.5. See README.md in this folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zoo.checkpoint.tensor_files import TensorFile
    from zoo.voxcpm2.model import VoxCPM2

NAME = "voxcpm2"


def claims(path: Path) -> bool:
    """Return whether this family reads the model directory `path`.

    Raises ValueError if config.json cannot be read.
    """
    from zoo.checkpoint.json_files import read_config

    config = read_config(path)
    if "residual_lm_no_rope" in config:
        return True
    named = (config.get("architecture"), config.get("model_type"))  # the published config has no model_type
    return any(str(name).lower() in ("voxcpm", "voxcpm2") for name in named)


def load(directory: Path, device: torch.device, dtype: torch.dtype, adapter: Path | None = None) -> VoxCPM2:
    """Load the family: the nets in `dtype` with an optional LoRA adapter merged in, and the VAE in fp32.

    Raises ValueError that names the file and what is wrong with it.
    """
    from zoo.checkpoint import loading, tensor_files
    from zoo.voxcpm2 import weights
    from zoo.voxcpm2.adapter import read_adapter
    from zoo.voxcpm2.clone import Cloner
    from zoo.voxcpm2.model import VoxCPM2
    from zoo.voxcpm2.prompt import PromptWriter

    config, spec = describe(directory, dtype)
    net, vae = build(config)
    table = weights.root(config)
    change = None if adapter is None else read_adapter(adapter, loading.published(net, table))
    loading.load(net, table, directory, device, dtype, change=change)
    net.prepare()
    file = tensor_files.open_file(vae_file(directory))
    check_boundaries(file, config.vae.boundaries)
    beside = frozenset({weights.BOUNDARIES})
    loading.load_weight_normed(vae, weights.vae(config.vae), file, device, beside)
    writer = PromptWriter(
        config, directory, Cloner(config, vae, net.rows, device, dtype, net.encoder, net.from_code)
    )
    return VoxCPM2(config, spec, net, vae, writer).eval().requires_grad_(False)


def check_boundaries(file: TensorFile, boundaries: tuple[int, ...]) -> None:
    """Raise ValueError if the VAE file and the config state different sample-rate boundaries."""
    from zoo.voxcpm2.weights import BOUNDARIES

    found = file.read(BOUNDARIES).tolist() if BOUNDARIES in file.headers else []
    if tuple(found) != boundaries:
        raise ValueError(f"{file.path} has {BOUNDARIES} {found}, but config.json says {list(boundaries)}")


def vae_file(directory: Path) -> Path:
    """Return the path of the VAE file. Raises ValueError if there is none."""
    from zoo.voxcpm2.weights import VAE_FILES

    for name in VAE_FILES:
        if (directory / name).exists():
            return directory / name
    raise ValueError(f"{directory} has neither {' nor '.join(VAE_FILES)}; one of them is needed")


def build(config):
    """Return the net and the VAE on the `meta` device: names and shapes, no memory."""
    import torch

    from zoo.voxcpm2.model import Net
    from zoo.voxcpm2.vae import Vae

    with torch.device("meta"):
        return Net(config), Vae(config.vae)


def describe(directory: Path, dtype=None):
    """Return Config and Spec, read from config.json alone. dtype: the model's, which the tape shares."""
    import torch

    from zoo.checkpoint.json_files import read_json
    from zoo.contract import KV, Spec
    from zoo.voxcpm2.clone import reference_s
    from zoo.voxcpm2.config import Config
    from zoo.voxcpm2.model import MAX_PATCHES
    from zoo.voxcpm2.prompt import HINTS, OPTIONS, PIECE_S, VOICE
    from zoo.voxcpm2.strategy import WINDOW

    config = Config.read(read_json(directory / "config.json"))
    frame_shape = (config.patch, config.vae.latent)
    spec = Spec(
        family=NAME,
        variant=config.name.lower(),
        frame_shape=frame_shape,
        frame_dtype=dtype or torch.bfloat16,
        frame_samples=config.frame_samples,
        sample_rate_hz=config.vae.out_rate_hz,
        kv=KV(config.lm.layers + config.residual.layers, config.lm.kv_heads, config.lm.head_dim),
        width=config.lm.hidden,
        max_frames=min(MAX_PATCHES, config.max_positions),
        max_positions=config.max_positions,
        window=WINDOW,
        noise_shape=frame_shape,
        voices=(VOICE,),
        modes=("voice", "clone") if config.is_first_generation else ("voice", "design", "clone"),
        reference_s=reference_s(config),
        max_references=1 if config.is_first_generation else 2,
        options=OPTIONS,
        hints=HINTS,
        name=config.name,
        piece_s=PIECE_S,
        keeps_voice=True,
    )
    return config, spec


def survey(directory: Path):
    """Return the Spec and the number of parameters without reading any weights."""
    config, spec = describe(directory)
    return spec, sum(p.numel() for module in build(config) for p in module.parameters())


def write_demo(directory: Path, size: str = "tiny", seed: int = 0, dtype: torch.dtype | None = None) -> Path:
    """Write a random checkpoint in the published layout. Raises ValueError and OSError."""
    import torch

    from zoo.voxcpm2.demo import write

    return write(directory, size, seed, dtype or torch.bfloat16)
