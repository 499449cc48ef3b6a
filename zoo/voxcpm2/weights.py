"""Tables from published tensor names to ours (see zoo.checkpoint.loading)."""

from __future__ import annotations

from zoo.checkpoint.names import decoder_block
from zoo.voxcpm2.config import Config, VaeConfig

BOUNDARIES = "decoder.sr_bin_boundaries"  # int32 in the VAE's file; the config states them too
VAE_FILES = ("audiovae.safetensors", "audiovae.pth")  # the first one found is read


def root(config: Config) -> dict[str, str]:
    """Return the names of model.safetensors -> those of zoo.voxcpm2.model.Net."""
    table = {"base_lm.embed_tokens.weight": "embedding.weight", "stop_head.weight": "stop.weight"}
    table |= _stack("base_lm", "base", config.lm.layers)
    table |= _stack("residual_lm", "residual", config.residual.layers)
    table |= _stack("feat_encoder.encoder", "encoder.stack", config.encoder.layers)
    table |= _stack("feat_decoder.estimator.decoder", "solver.stack", config.dit.layers)
    table["feat_encoder.special_token"] = "encoder.special"
    dit = "feat_decoder.estimator"
    pairs = {
        "feat_encoder.in_proj": "encoder.input",
        "enc_to_lm_proj": "from_code",
        "fsq_layer.in_proj": "fsq.narrow",
        "fsq_layer.out_proj": "fsq.widen",
        **({} if config.is_first_generation else {"fusion_concat_proj": "fusion"}),
        "lm_to_dit_proj": "lm_to_solver",
        "res_to_dit_proj": "residual_to_solver",
        "stop_proj": "stop_input",
        f"{dit}.in_proj": "solver.input",
        f"{dit}.cond_proj": "solver.condition",
        f"{dit}.out_proj": "solver.output",
    }
    for theirs, ours in (("time_mlp", "time"), ("delta_time_mlp", "delta_time")):
        pairs |= {f"{dit}.{theirs}.linear_{n}": f"solver.{ours}.fc{n}" for n in (1, 2)}
    return table | {
        f"{theirs}.{leaf}": f"{ours}.{leaf}" for theirs, ours in pairs.items() for leaf in ("weight", "bias")
    }


def _stack(theirs: str, ours: str, layers: int) -> dict[str, str]:
    table = {f"{theirs}.norm.weight": f"{ours}.norm.weight"}
    for i in range(layers):
        table |= decoder_block(f"{theirs}.layers.{i}", f"{ours}.layers.{i}", has_qk_norm=False)
    return table


def vae(config: VaeConfig) -> dict[str, str]:
    """Return the names of the VAE's file, with weight norm folded -> those of zoo.voxcpm2.vae.Vae."""
    table: dict[str, str] = {}

    def conv(theirs: str, ours: str) -> None:
        table.update({f"{theirs}.{leaf}": f"{ours}.{leaf}" for leaf in ("weight", "bias")})

    def residual(theirs: str, ours: str) -> None:
        for n, (snake, convolution) in enumerate(((0, 1), (2, 3)), 1):
            table[f"{theirs}.block.{snake}.alpha"] = f"{ours}.snake{n}.alpha"
            conv(f"{theirs}.block.{convolution}", f"{ours}.conv{n}")

    conv("encoder.block.0", "encoder.conv")
    for i in range(len(config.encoder_rates)):
        theirs, ours = f"encoder.block.{i + 1}.block", f"encoder.blocks.{i}"
        for j in range(3):
            residual(f"{theirs}.{j}", f"{ours}.residuals.{j}")
        table[f"{theirs}.3.alpha"] = f"{ours}.snake.alpha"
        conv(f"{theirs}.4", f"{ours}.down")
    conv("encoder.fc_mu", "encoder.mean")
    conv("encoder.fc_logvar", "encoder.log_variance")

    conv("decoder.model.0", "decoder.conv")
    conv("decoder.model.1", "decoder.widen")
    num_blocks = len(config.decoder_rates)
    for i in range(num_blocks):
        theirs, ours = f"decoder.model.{i + 2}.block", f"decoder.blocks.{i}"
        table[f"{theirs}.0.alpha"] = f"{ours}.snake.alpha"
        conv(f"{theirs}.1", f"{ours}.up")
        for j in range(3):
            residual(f"{theirs}.{j + 2}", f"{ours}.residuals.{j}")
        for leaf in ("scale", "bias") if config.boundaries else ():
            table[f"decoder.sr_cond_model.{i + 2}.{leaf}_embed.weight"] = f"{ours}.rate.{leaf}.weight"
    table[f"decoder.model.{num_blocks + 2}.alpha"] = "decoder.snake.alpha"
    conv(f"decoder.model.{num_blocks + 3}", "decoder.tail")
    return table
