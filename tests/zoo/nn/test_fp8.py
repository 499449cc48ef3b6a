"""Products in fp8: the rounding, the plain form of the product, which matrices are rounded, and what models make of
it. A GPU's products are compared with the plain form by benchmarks/device.py."""

from __future__ import annotations

import math

import pytest
import torch
from masquerade import Mask
from models import directory
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zoo
from compile_cache import choices
from serving.engine.device.prepare_for_host import prepare_for_host
from serving.tools.requests import first_request
from zoo import kernels
from zoo.contract import Family
from zoo.loop import SoloBatches
from zoo.nn import fp8
from zoo.nn.fp8 import FP8Linear
from zoo.nn.linear import FusedLinear
from zoo.nn.swiglu import FusedSwiGLU
from zoo.voxcpm2.demo import write

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HALF_STEP = 2**-4  # of a number with three bits after the first, relative to the number
LEAST_STEP = 2**-9  # between the smallest numbers of e4m3fn


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def snr_db(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    noise = (found.double() - expected.double()).square().sum()
    return 10 * math.log10(expected.double().square().sum() / noise) if noise else math.inf


# The rounding.


def test_a_rounded_number_is_within_half_a_step_of_its_row():
    x = random(7, 96) * torch.tensor([1e-30, 1e-5, 1, 3, 1e4, 1e20, 1e37])[:, None].bfloat16()
    near, scale = fp8.rounded(x)
    assert near.dtype == torch.float8_e4m3fn and scale.shape == (7, 1) and scale.dtype == torch.float32
    back = near.double() * scale.double()
    allowed = x.double().abs() * HALF_STEP + LEAST_STEP / 2 * scale
    assert (back - x.double()).abs().le(allowed * (1 + 1e-6)).all()
    assert near.float().abs().amax(1).tolist() == [448] * 7


@pytest.mark.parametrize("value", [0.0, 1e-45, 3e38], ids=str)
def test_a_row_of_equal_numbers_stays_finite_and_equal(value):
    x = torch.full((2, 32), value)
    near, scale = fp8.rounded(x)
    assert (near.float() * scale).isfinite().all()
    torch.testing.assert_close(near.float() * scale, x, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_row_that_is_not_finite_does_not_look_finite(value):
    x = random(2, 32)
    x[1, 5] = value
    layer = FP8Linear(nn.Linear(32, 16, bias=False, dtype=BF16))
    assert layer(x)[0].isfinite().all() and layer(x)[1].isnan().all()


# The product.


def operands(rows: int, width: int, columns: int) -> tuple[Tensor, ...]:
    weight, scale = fp8.rounded(random(columns, width))
    return *fp8.rounded(random(rows, width)), weight, scale.T.contiguous()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_product_equals_that_of_the_scaled_numbers(rows):
    x, scale, weight, weight_scale = given = operands(rows, 64, 48)
    exact = (x.double() * scale) @ (weight.double() * weight_scale.T).T
    found = torch.ops.zoo.fp8_linear.default(*given)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older CPU builds take one scale for all rows")
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_torch_multiplies_like_the_plain_form(rows):
    given = operands(rows, 64, 48)
    torch.testing.assert_close(fp8.scaled(*given), fp8.plain(*given), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_gpu_multiplies_in_fp8_unless_the_plain_form_is_wanted(is_plain, monkeypatch):
    called = []
    monkeypatch.setattr(fp8, "scaled", lambda *given: called.append(given) or fp8.plain(*given))
    given = operands(3, 64, 48)
    with Mask(), kernels.plain() if is_plain else torch.inference_mode():
        fp8.fp8_linear._init_fn(*given)
    assert len(called) == (not is_plain)


def test_a_compiler_knows_the_shape_of_the_result():
    with FakeTensorMode() as mode:
        found = torch.ops.zoo.fp8_linear.default(*map(mode.from_tensor, operands(3, 64, 48)))
    assert (found.shape, found.dtype) == ((3, 48), BF16)


# The layers.


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_close_to_the_plain_one(bias):
    plain = nn.Linear(256, 48, bias=bias, dtype=BF16)
    x = random(2, 5, 256)
    layer = FP8Linear(plain)
    assert snr_db(layer(x), plain(x)) > 27
    assert layer(x[0, 0]).equal(layer(x)[0, 0])  # any number of leading dimensions, and rows are apart
    assert not list(layer.parameters()) and layer.weight.nbytes == 256 * 48


def test_parts_stay_apart():
    plain = FusedLinear(64, (96, 32))
    nn.init.normal_(plain.weight)
    found, expected = FP8Linear(plain.bfloat16())(random(5, 64)), plain(random(5, 64))
    assert [part.shape for part in found] == [(5, 96), (5, 32)]
    assert all(snr_db(*pair) > 25 for pair in zip(found, expected, strict=True))


def test_a_row_of_zeros_stays_zero():
    plain = nn.Linear(64, 32, bias=False, dtype=BF16)
    plain.weight.data[3] = 0
    x = random(2, 64)
    x[1] = 0
    found = FP8Linear(plain)(x)
    assert found[:, 3].tolist() == [0, 0] and found[1].tolist() == [0] * 32


def test_a_gated_mlp_runs_its_rounded_matrices_on_a_gpu():
    mlp = FusedSwiGLU(64, 96).bfloat16()
    nn.init.normal_(mlp.gate_up.weight, std=0.1)
    x = random(2, 3, 64)
    with torch.inference_mode():
        expected = mlp(x)
        fp8.round_weights(mlp, 0)
        with kernels.plain(), Mask():
            found = mlp(x)
    assert isinstance(mlp.gate_up, FP8Linear) and isinstance(mlp.down, FP8Linear)
    assert snr_db(found, expected) > 22


# Which matrices are rounded.


class Renderer(nn.Module):
    reads_many_rows = True

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 64, dtype=BF16)


def test_heads_renderers_matrices_in_fp32_and_those_after_an_attention_stay():
    module = nn.ModuleDict(
        {
            "codec_head": nn.Linear(64, 64, dtype=BF16),
            "heads": nn.ModuleList([nn.Linear(64, 64, dtype=BF16)]),
            "flow": nn.ModuleDict({"embed": nn.Linear(64, 64, dtype=BF16)}),
            "estimator": Renderer(),
            "island": nn.Linear(64, 64),
            "odd": nn.Linear(64, 40, dtype=BF16),
            "attention": nn.ModuleDict({"out": nn.Linear(64, 64, dtype=BF16)}),
            "rows": nn.Embedding(64, 64, dtype=BF16),
            "down": nn.Linear(64, 64, dtype=BF16),
        }
    )
    fp8.round_weights(module, 0)
    assert [path for path, layer in module.named_modules() if isinstance(layer, FP8Linear)] == ["down"]


def test_small_matrices_stay():
    module = nn.ModuleDict({"small": nn.Linear(64, 64, dtype=BF16), "large": nn.Linear(512, 512, dtype=BF16)})
    fp8.round_weights(module)
    assert isinstance(module["large"], FP8Linear) and isinstance(module["small"], nn.Linear)


def test_matrices_that_are_faster_in_bf16_stay(monkeypatch, tmp_path):
    """What is faster is measured once for each shape, with the rows of a step."""
    measured = []

    def time_us(way):
        measured.append(way().shape)
        return 2.0 if measured[-1][1] == 48 and len(measured) % 2 else 1.0  # fp8 is timed first

    monkeypatch.setattr(choices, "time_us", time_us)
    monkeypatch.setattr(fp8, "scaled", fp8.plain)
    monkeypatch.setattr(choices, "device_name", lambda: "a card with fp8")
    module = nn.ModuleDict({name: nn.Linear(64, 64, dtype=BF16) for name in ("up", "more")})
    module["slow"], module["solver"] = (
        nn.Linear(64, 48, dtype=BF16),
        nn.Sequential(nn.Linear(64, 64, dtype=BF16)),
    )
    module["solver"].rows_per_slot = 3
    with choices.kept_in(tmp_path):
        fp8.round_weights(module, 0)
    assert type(module["slow"]) is nn.Linear
    assert all(isinstance(layer, FP8Linear) for layer in (module["up"], module["more"], module["solver"][0]))
    assert measured == [(64, 64)] * 2 + [(64, 48)] * 2 + [(192, 64)] * 2


@pytest.mark.parametrize("name", ["voxcpm2", "qwen3_tts", "higgs_v3", "fish_s2", "cosyvoice2"])
def test_a_family_has_matrices_to_round_and_keeps_its_heads(name):
    family = zoo.load(directory(name, "tiny"), "meta", "bfloat16")
    codes = {path for path, layer in family.named_modules() if "head" in path}
    fp8.round_weights(family, 0)
    found = {path for path, layer in family.named_modules() if isinstance(layer, FP8Linear)}
    assert any(path.endswith("qkv") for path in found) and not found & codes


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "why"),
    [
        ("cpu", None, BF16, "capability 8.9 or newer, and the model is on cpu"),
        ("cuda", (8, 0), BF16, "capability 8.9 or newer, and this one has 8.0"),
        ("cuda", (9, 0), torch.float32, "need dtype bfloat16, and it is float32"),
        ("cuda", (8, 9), BF16, None),
        ("cuda", (12, 0), BF16, None),
    ],
)
def test_what_a_device_lacks_is_said(device, capability, dtype, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = fp8.why_not(torch.device(device), dtype)
    assert found is None if why is None else why in found


# Models.


@pytest.fixture(params=["voxcpm2", "qwen3_tts"])
def pair(request: pytest.FixtureRequest) -> tuple[Family, Family]:
    """Return a tiny model in bf16, and the same one with weights in fp8."""
    plain, other = (zoo.load(directory(request.param, "tiny"), "cpu", "bfloat16") for _ in range(2))
    fp8.round_weights(other, 0)
    return plain, other


def hidden(family: Family) -> Tensor:
    """Return the hidden states of a prompt [T, D]."""
    [lane] = (prompt := family.prompt(first_request(family, text="Good morning, everybody."))).lanes
    family.admit(family.state(1), 0, prompt)
    return family.hidden(lane.inputs[:-1], SoloBatches(family, prompt).prefill(0))


def test_hidden_states_are_close_to_those_of_bf16(pair):
    with torch.inference_mode():
        expected, found = map(hidden, pair)
    assert 15 < snr_db(found, expected) < 60


def test_latents_of_a_solver_are_close_to_those_of_bf16(tmp_path):
    sizes = {"hidden_dim": 32, "ffn_dim": 64}  # the tiny ones are no multiples of 16
    path = write(tmp_path / "wide", "tiny", dit_config=sizes)
    plain, other = (zoo.load(path, "cpu", "bfloat16").net.solver for _ in range(2))
    fp8.round_weights(other, 0)
    width, latent = plain.input.weight.shape
    mu, before, noise = random(3, 2, width), random(3, plain.patch, latent), random(3, plain.patch, latent)
    how = torch.full((3,), 2.0), torch.full((3,), 10)
    with torch.inference_mode():
        expected, found = (solver(mu, before, noise, *how) for solver in (plain, other))
    assert 15 < snr_db(found, expected) < 60


def test_a_cpu_is_refused():
    family = zoo.load(directory("voxcpm2", "tiny"), "cpu", "bfloat16")
    with pytest.raises(ValueError, match="model is on cpu: use weights published or int8"):
        prepare_for_host(family, weights="fp8")
