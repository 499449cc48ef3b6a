"""A LoRA adapter, added to the weights while they are read: W + (alpha / r) B A.

    lora_config.json           {"base_model": …, "lora_config": {"r": 32, "alpha": 32, "enable_lm": true,
                                "target_modules_lm": ["q_proj", …], …}}, as fine-tuning writes it
    lora_weights.safetensors   base_lm.layers.0.self_attn.q_proj.lora_A [r, in], ….lora_B [out, r], …

Source: OpenBMB/VoxCPM, modules/layers/lora.py; model/voxcpm2.py, _apply_lora;
scripts/train_voxcpm_finetune.py, save_checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from zoo.nn.checkpoint import Expected, Shape, check
from zoo.nn.config import WIDTH, ConfigBlock
from zoo.nn.json_files import read_json
from zoo.nn.tensor_files import open_file

CONFIG, FILES = (
    "lora_config.json",
    ("lora_weights.safetensors", "lora_weights.ckpt"),
)  # the first that is there
MAX_ALPHA = 1e6
EMBEDDING = "base_lm.embed_tokens"  # a table as wide as a linear, and none
# What switches a part of the model on, what lists its linears by their last names, and which modules it has.
PARTS = (
    ("enable_lm", "target_modules_lm", r"(?:base_lm|residual_lm)\.(?:.+\.)?(\w+)"),
    ("enable_dit", "target_modules_dit", r"feat_decoder\.estimator\.(?:.+\.)?(\w+)"),
    ("enable_proj", "target_proj_modules", r"(\w+)"),
)


@dataclass(frozen=True)
class Adapter:
    scale: float
    tensors: dict[
        str, Tensor
    ]  # MODULE.lora_A [r, in] and MODULE.lora_B [out, r], by the published module's name

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """A published tensor -> what it is with the adapter: in fp32 where it is changed, else as it came."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" not in self.tensors:
            return tensor
        a, b = (self.tensors[f"{module}.lora_{part}"].float() for part in "AB")
        return tensor.float() + self.scale * (b @ a)


def read_adapter(directory: Path, published: Mapping[str, Shape]) -> Adapter:
    """published: name -> shape of the model's tensors. Raises ValueError for anything but the tensors, and
    all of them, that the adapter's config says it changes."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory; an adapter is one with {CONFIG} and {FILES[0]}")
    config = ConfigBlock(read_json(directory / CONFIG), file=str(directory / CONFIG)).block("lora_config")
    r, alpha = config.integer("r", *WIDTH), config.number("alpha", 0, MAX_ALPHA)
    expected: dict[str, Expected] = {}
    for module in targets(config, published):
        num_out, num_in = published[f"{module}.weight"]
        expected[f"{module}.lora_A"] = Expected((r, num_in))
        expected[f"{module}.lora_B"] = Expected((num_out, r))
    file = open_file(weights_file(directory))
    check(expected, file.headers, file.path)
    return Adapter(alpha / r, {name: file.read(name) for name in expected})


def targets(config: ConfigBlock, published: Mapping[str, Shape]) -> list[str]:
    """The linears that an adapter changes, by their published names. Raises ValueError."""
    weights = [name for name, shape in published.items() if name.endswith(".weight") and len(shape) == 2]
    linears = [name.removesuffix(".weight") for name in weights if not name.startswith(EMBEDDING)]
    chosen: list[str] = []
    for switch, key, pattern in PARTS:
        if config.flag(switch):
            names = config.get(key)
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise config.refuse(key, "a list of linears' names is possible")
            found = [re.fullmatch(pattern, linear) for linear in linears]
            chosen += [match[0] for match in found if match and match[1] in names]
    if not chosen:
        switches = ", ".join(switch for switch, _, _ in PARTS)
        raise ValueError(
            f"{config.file} changes nothing: none of {switches} is on with a linear of the model's"
        )
    return chosen


def weights_file(directory: Path) -> Path:
    for name in FILES:
        if (directory / name).exists():
            return directory / name
    raise ValueError(f"{directory} has neither {' nor '.join(FILES)}; one of them is needed")
