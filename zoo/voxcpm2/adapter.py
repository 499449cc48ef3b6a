"""LoRA adapters, merged into the weights as they are read: W + (alpha / r) B A.

    lora_config.json           {"base_model": …, "lora_config": {"r": 32, "alpha": 32, "enable_lm": true,
                                "target_modules_lm": ["q_proj", …], …}}, as the fine-tuning script writes it
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

from zoo.checkpoint.config import WIDTH, ConfigBlock
from zoo.checkpoint.json_files import read_json
from zoo.checkpoint.loading import Expected, Shape, check
from zoo.checkpoint.tensor_files import open_file

CONFIG = "lora_config.json"
FILES = ("lora_weights.safetensors", "lora_weights.ckpt")  # the first one found is read
MAX_ALPHA = 1e6
EMBEDDING = "base_lm.embed_tokens"  # its weight is 2-D like a linear's, but it is not a linear
# For each part of the model: the key that enables it, the key that lists its linears by last name, and a
# pattern for the names of its modules.
PARTS = (
    ("enable_lm", "target_modules_lm", r"(?:base_lm|residual_lm)\.(?:.+\.)?(\w+)"),
    ("enable_dit", "target_modules_dit", r"feat_decoder\.estimator\.(?:.+\.)?(\w+)"),
    ("enable_proj", "target_proj_modules", r"(\w+)"),
)


@dataclass(frozen=True)
class Adapter:
    """A change to published tensors, applied while they are read."""

    scale: float
    # MODULE.lora_A [r, in] and MODULE.lora_B [out, r], keyed by the published name of the module
    tensors: dict[str, Tensor]

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """Return a published tensor with the adapter merged in: in fp32 if it changes, else as given."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_A" not in self.tensors:
            return tensor
        a, b = (self.tensors[f"{module}.lora_{part}"].float() for part in "AB")
        return tensor.float() + self.scale * (b @ a)


def read_adapter(directory: Path, published: Mapping[str, Shape]) -> Adapter:
    """Read an adapter from its directory. published: name -> shape of the model's tensors.

    Raises ValueError unless the file holds exactly the tensors that the adapter's config promises.
    """
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
    """Return the published names of the linears that an adapter changes.

    Raises ValueError if there are none.
    """
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
            f"{config.file} changes nothing: none of {switches} is true and selects a linear of the model"
        )
    return chosen


def weights_file(directory: Path) -> Path:
    for name in FILES:
        if (directory / name).exists():
            return directory / name
    raise ValueError(f"{directory} has neither {' nor '.join(FILES)}; one of them is needed")
