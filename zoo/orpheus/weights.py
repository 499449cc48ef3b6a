"""Published name -> our name, as tables (see zoo.checkpoint.loading)."""

from __future__ import annotations

from zoo.nn.llama import names
from zoo.orpheus.config import LEVELS, Config, SnacConfig

HEAD = "lm_head.weight"


def lm(config: Config, has_head: bool) -> dict[str, str]:
    """The LM's shards -> `Llama`."""
    table = {"model.embed_tokens.weight": "embedding.weight"} | names(config.stack, "model", "stack")
    return table | ({HEAD: "head.weight"} if has_head else {})


def codec(config: SnacConfig) -> dict[str, str]:
    """SNAC's file, its weight norms folded -> `Snac`."""
    table: dict[str, str] = {}

    def conv(theirs: str, ours: str, has_bias: bool = True) -> None:
        table[f"{theirs}.weight"] = f"{ours}.weight"
        if has_bias:
            table[f"{theirs}.bias"] = f"{ours}.bias"

    def residual(theirs: str, ours: str) -> None:
        for theirs_at, snake, convolution in ((0, "snake1", "conv1"), (2, "snake2", "conv2")):
            table[f"{theirs}.block.{theirs_at}.alpha"] = f"{ours}.{snake}.alpha"
            conv(f"{theirs}.block.{theirs_at + 1}", f"{ours}.{convolution}")

    for level in range(len(LEVELS)):
        theirs, ours = f"quantizer.quantizers.{level}", f"quantizer.books.{level}"
        conv(f"{theirs}.in_proj", f"{ours}.project_in")
        conv(f"{theirs}.out_proj", f"{ours}.project_out")
        table[f"{theirs}.codebook.weight"] = f"{ours}.rows"

    conv("decoder.model.0", "decoder.stem")
    conv("decoder.model.1", "decoder.widen")
    for i in range(len(config.decoder_rates)):
        theirs, ours = f"decoder.model.{i + 2}.block", f"decoder.blocks.{i}"
        table[f"{theirs}.0.alpha"] = f"{ours}.snake.alpha"
        conv(f"{theirs}.1", f"{ours}.up")
        units = 2
        if config.has_noise:
            conv(f"{theirs}.2.linear", f"{ours}.noise", has_bias=False)
            units = 3
        for j in range(3):
            residual(f"{theirs}.{units + j}", f"{ours}.residuals.{j}")
    last = len(config.decoder_rates) + 2
    table[f"decoder.model.{last}.alpha"] = "decoder.snake.alpha"
    conv(f"decoder.model.{last + 1}", "decoder.tail")

    conv("encoder.block.0", "encoder.stem")
    for i in range(len(config.encoder_rates)):
        theirs, ours = f"encoder.block.{i + 1}.block", f"encoder.blocks.{i}"
        for j in range(3):
            residual(f"{theirs}.{j}", f"{ours}.residuals.{j}")
        table[f"{theirs}.3.alpha"] = f"{ours}.snake.alpha"
        conv(f"{theirs}.4", f"{ours}.down")
    conv(f"encoder.block.{len(config.encoder_rates) + 1}", "encoder.tail")
    return table
