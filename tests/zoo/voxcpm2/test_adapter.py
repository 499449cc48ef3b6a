"""VoxCPM2's LoRA adapters: their effect on the weights, and the errors for adapters that do not fit.

tests/parity compares speech with adapters with the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import directory, family
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo

TINY = directory("voxcpm2", "tiny")
CONFIG: dict[str, Any] = {
    "enable_lm": True,
    "enable_dit": False,
    "enable_proj": True,
    "r": 2,
    "alpha": 3,
    "dropout": 0.0,
    "target_modules_lm": ["q_proj", "down_proj"],
    "target_modules_dit": ["q_proj"],
    "target_proj_modules": ["fusion_concat_proj", "stop_proj"],
}
FUSION = "fusion_concat_proj"


def tensors() -> dict[str, Tensor]:
    """Return the tensors that CONFIG promises: of 3 base layers, 2 residual layers and two projections."""
    published = load_file(TINY / "model.safetensors")
    layers = [f"base_lm.layers.{i}" for i in range(3)] + [f"residual_lm.layers.{i}" for i in range(2)]
    modules = [f"{layer}.{leaf}" for layer in layers for leaf in ("self_attn.q_proj", "mlp.down_proj")]
    random, found = torch.Generator().manual_seed(0), {}
    for module in [*modules, FUSION, "stop_proj"]:
        num_out, num_in = published[f"{module}.weight"].shape
        found[f"{module}.lora_A"] = torch.randn(2, num_in, generator=random)
        found[f"{module}.lora_B"] = torch.randn(num_out, 2, generator=random)
    return found


@pytest.fixture
def adapter(tmp_path) -> Path:
    place = tmp_path / "adapter"
    place.mkdir()
    configure(place)
    save_file(tensors(), place / "lora_weights.safetensors")
    return place


def configure(place: Path, **values: Any) -> None:
    """Write the config with these values. None removes a key."""
    config = {key: value for key, value in (CONFIG | values).items() if value is not None}
    (place / "lora_config.json").write_text(json.dumps({"base_model": "elsewhere", "lora_config": config}))


def refused(place: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        zoo.load(f"{TINY}+{place}", "cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_added_before_a_weight_is_rounded(dtype, adapter):
    plain, changed = family("voxcpm2", dtype).net, zoo.load(f"{TINY}+{adapter}", "cpu", dtype).net
    published, found = load_file(TINY / "model.safetensors"), tensors()

    def expected(module: str) -> Tensor:
        a, b = found[f"{module}.lora_A"], found[f"{module}.lora_B"]
        return (published[f"{module}.weight"] + 1.5 * (b @ a)).to(getattr(torch, dtype))

    torch.testing.assert_close(changed.fusion.weight, expected(FUSION), rtol=0, atol=0)
    q, _, _ = changed.residual.layers[1].qkv.weight.split(changed.residual.layers[1].qkv.parts)
    torch.testing.assert_close(q, expected("residual_lm.layers.1.self_attn.q_proj"), rtol=0, atol=0)
    before, after = plain.state_dict(), changed.state_dict()
    differ = {name for name in before if not torch.equal(before[name], after[name])}
    layers = [f"base.layers.{i}" for i in range(3)] + [f"residual.layers.{i}" for i in range(2)]
    linears = {f"{layer}.{leaf}.weight" for layer in layers for leaf in ("qkv", "mlp.down")}
    assert differ == linears | {"fusion.weight", "stop_input.weight"}


@pytest.mark.parametrize(
    "content", [lambda found: {"state_dict": found}, lambda found: found], ids=["state_dict", "flat"]
)
def test_an_adapter_is_read_from_a_pickle(content, adapter):
    expected = zoo.load(f"{TINY}+{adapter}", "cpu").net.fusion.weight
    (adapter / "lora_weights.safetensors").unlink()
    torch.save(content(tensors()), adapter / "lora_weights.ckpt")
    assert torch.equal(zoo.load(f"{TINY}+{adapter}", "cpu").net.fusion.weight, expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"r": None}, r"lora_config.json: lora_config has no 'r'"),
        ({"r": 0}, r"lora_config has r=0; an integer from 1 to \d+ is possible"),
        ({"r": 4}, r"lora_A has shape \[2, 32\], expected \[4, 32\]"),
        ({"alpha": None}, "lora_config has no 'alpha'"),
        ({"alpha": "16"}, "lora_config has alpha='16'; a number from 0"),
        ({"enable_dit": None}, "lora_config has no 'enable_dit'"),
        ({"enable_lm": 1}, "lora_config has enable_lm=1; true or false is possible"),
        ({"target_modules_lm": None}, "lora_config has no 'target_modules_lm'"),
        ({"target_modules_lm": "q_proj"}, "target_modules_lm='q_proj'; a list of linears' names is possible"),
        ({"target_modules_lm": ["q_proj"]}, r"unknown base_lm.layers.0.mlp.down_proj.lora_A \[2, 48\]"),
        (
            {"enable_dit": True},
            r"missing feat_decoder.estimator.decoder.layers.0.self_attn.q_proj.lora_A \[2, 24\]",
        ),
        (
            {"enable_lm": False, "enable_proj": False},
            "changes nothing: none of enable_lm, enable_dit, enable_proj",
        ),
        ({"enable_lm": False, "target_proj_modules": ["embed_tokens"]}, "changes nothing"),
    ],
)
def test_invalid_adapter_configs_are_refused(values, message, adapter):
    configure(adapter, **values)
    refused(adapter, message)


@pytest.mark.parametrize(
    ("name", "renamed", "message"),
    [
        (f"{FUSION}.lora_B", None, rf"missing {FUSION}.lora_B \[32, 2\]"),
        (f"{FUSION}.lora_B", f"{FUSION}.lora_C", rf"missing {FUSION}.lora_B .*unknown {FUSION}.lora_C"),
        (
            f"{FUSION}.lora_A",
            "model.fusion.lora_A",
            rf"missing {FUSION}.lora_A .*unknown model.fusion.lora_A",
        ),
    ],
)
def test_tensors_that_do_not_match_the_config_are_refused(name, renamed, message, adapter):
    found = tensors()
    value = found.pop(name)
    if renamed:
        found[renamed] = value
    save_file(found, adapter / "lora_weights.safetensors")
    refused(adapter, message)


def test_an_adapter_with_nan_is_refused(adapter):
    found = tensors()
    found[f"{FUSION}.lora_A"][0, 0] = torch.nan
    save_file(found, adapter / "lora_weights.safetensors")
    refused(adapter, f"{FUSION}.weight holds NaN or infinity")


def test_a_directory_without_a_valid_adapter_is_refused(adapter, tmp_path):
    refused(
        tmp_path / "none",
        "none' is not a directory; a model with an adapter is MODEL",
    )
    (adapter / "lora_weights.safetensors").write_bytes(b"short")
    refused(adapter, "lora_weights.safetensors is not a whole safetensors file")
    (adapter / "lora_weights.safetensors").unlink()
    refused(adapter, "has neither lora_weights.safetensors nor lora_weights.ckpt; one of them is needed")
    (adapter / "lora_config.json").write_text("{}")
    refused(adapter, "lora_config.json: the root has no 'lora_config'")
    (adapter / "lora_config.json").unlink()
    refused(adapter, "lora_config.json does not exist")


@pytest.mark.parametrize("name", [name for name in zoo.families() if name != "voxcpm2"])
def test_other_families_refuse_adapters(name, adapter):
    with pytest.raises(
        ValueError, match=f"{name} takes no adapter, and .* is given: load the model without one"
    ):
        zoo.load(f"{directory(name, 'tiny')}+{adapter}", "cpu")
