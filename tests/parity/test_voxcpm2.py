"""VoxCPM2 compared with the reference implementation, in float32 with the same noise, and bit for bit where
rounding matters.

README.md in this folder describes the fixtures.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from agreement import noise, rows
from models import directory, family
from one_pass import decode_latents
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from zoo import AudioClip, Reference, Request
from zoo.check import check
from zoo.checkpoint import synthetic
from zoo.checkpoint.loading import published, weight_normed
from zoo.checkpoint.tensor_files import open_file
from zoo.nn.cfm import euler_steps, guided, sinusoid, sway_times
from zoo.voxcpm2 import build, demo, describe, weights
from zoo.voxcpm2.block import LongRope
from zoo.voxcpm2.model import VoxCPM2
from zoo.voxcpm2.prompt import Script

HERE = Path(__file__).parent / "voxcpm2"
MANIFESTS = HERE.parent.parent / "manifests"
CLOSE = {"rtol": 0, "atol": 1e-5}
CLIPS = load_file(HERE / "clips.safetensors")
RATES = json.loads((HERE / "clips.json").read_text())["rates_hz"]
CASES = sorted(path.stem for path in HERE.glob("*.json") if "case" in json.loads(path.read_text()))
SOLVER = load_file(HERE / "solver.safetensors")


def facts(name: str) -> dict:
    return json.loads((HERE / f"{name}.json").read_text())


def clip(name: str) -> AudioClip:
    samples = CLIPS[name].numpy().astype("float32") / 32768  # [C, N]
    return AudioClip(samples if len(samples) > 1 else samples[0], RATES[name])


def request(name: str) -> Request:
    asked = facts(name)["request"]
    references = tuple(
        Reference(clip(given["clip"]), given.get("transcript")) for given in asked.get("references", ())
    )
    return Request(**asked | {"references": references})


@cache
def model(name: str) -> VoxCPM2:
    """Return the model of a case, with its adapter if it has one."""
    fact = facts(name)
    if "adapter" not in fact:
        return family("voxcpm2", size=fact["size"])
    with tempfile.TemporaryDirectory() as place:
        write_adapter(Path(place), fact["adapter"])
        return zoo.load(f"{directory('voxcpm2', fact['size'])}+{place}", "cpu", "float32")


def write_adapter(place: Path, adapter: dict) -> None:
    """Write an adapter as the fine-tuning script does, with the oracle's values of its tensors."""
    (place / "lora_config.json").write_text(
        json.dumps({"base_model": "a path of its own", "lora_config": adapter["config"]})
    )
    tensors = {}
    for row in adapter["rows"]:
        name, _, shape = row.split("|")
        values = synthetic.fill(name, map(int, shape.split("x")), "parity", [("lora_", 0.0, 0.15, False)])
        tensors[name] = torch.from_numpy(values)
    save_file(tensors, place / "lora_weights.safetensors")


def script_of(name: str) -> Script:
    asked, ours = request(name), model(name)
    return ours.writer(asked, check(asked, ours.spec))


every_case = pytest.mark.parametrize("name", CASES)

# checkpoints


@pytest.mark.parametrize(
    ("size", "name", "vae_rows", "parameters", "vae_parameters", "reach", "frame_samples", "kv"),
    [
        ("full", "voxcpm2", 312, 2_290_004_544, 94_180_097, 20, 7680, (36, 2, 128)),
        ("1.5", "voxcpm2_1.5", 299, 801_729_856, 86_449_281, 21, 7056, (32, 2, 64)),
        ("0.5b", "voxcpm2_0.5b", 243, 652_287_296, 75_326_465, 19, 1280, (30, 2, 64)),
    ],
)
def test_our_modules_have_the_published_tensors(
    size, name, vae_rows, parameters, vae_parameters, reach, frame_samples, kv, tmp_path
):
    config, spec = describe(demo.write_texts(tmp_path / "demo", size))
    net, vae = build(config)
    manifest, vae_manifest = (
        (MANIFESTS / f"{name}{part}.txt").read_text().splitlines() for part in ("", "_vae")
    )
    assert sorted(rows(published(net, weights.root(config)), "BF16")) == manifest
    shapes = rows(weight_normed(published(vae, weights.vae(config.vae))), "F32")
    assert sorted([*shapes, *[f"{weights.BOUNDARIES}|I32|3"][: len(config.vae.boundaries)]]) == vae_manifest
    assert len(vae_manifest) == vae_rows and (len(manifest) == 577) == (size == "full")
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert sum(p.numel() for p in vae.parameters()) == vae_parameters and vae.decoder.reach == reach
    assert (
        spec.kv.num_layers,
        spec.kv.num_heads,
        spec.kv.head_dim,
    ) == kv and spec.frame_samples == frame_samples
    assert size != "full" or vae.decoder.state_size == 161_856  # as in the reference's stream


@pytest.mark.parametrize("size", ["tiny", "tiny-1.5"])
def test_the_demo_equals_the_reference_checkpoint(size):
    expected, made = facts(f"checkpoint_{size}"), directory("voxcpm2", size)
    assert {path.name for path in made.iterdir()} == expected["texts"].keys() | expected["tensors"].keys()
    for name, digest in expected["texts"].items():
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest, name
    for name, tensors in expected["tensors"].items():
        file = open_file(made / name)
        values = {key: file.read(key) for key in file.headers}
        kinds = {torch.float32: "F32", torch.int32: "I32"}
        assert (
            sorted(rows({key: tuple(value.shape)}, kinds[value.dtype])[0] for key, value in values.items())
            == tensors["rows"]
        )
        assert (
            hashlib.sha256(b"".join(values[key].numpy().tobytes() for key in sorted(values))).hexdigest()
            == tensors["sha256"]
        )


# requests from text to samples


def test_cases_cover_both_ends_and_no_stop_is_close():
    found = {name: facts(name) for name in CASES}
    assert len(found) == 19 and {fact["stop"] for fact in found.values()} == {"end", "cap"}
    assert min(fact["margin"] for fact in found.values()) > 1e-3  # no stop depends on rounding


@cache
def spoken(name: str) -> tuple[zoo.Speech, dict[str, Tensor]]:
    """Generate a case. Returns the speech, the solver's conditions and the stop head's outputs."""
    fact = facts(name)
    ours = model(name)
    seen: dict[str, list[Tensor]] = {"mu": [], "stop": []}
    hooks = [
        ours.net.solver.register_forward_hook(lambda module, args, out: seen["mu"].append(args[0][0])),
        ours.net.stop.register_forward_hook(lambda module, args, out: seen["stop"].append(out[0])),
    ]
    most = fact["request"].get("max_frames", fact["cap"])
    speech = zoo.generate(ours, request(name), noise=noise(str(fact["case"]), 400, 4, 8)[:most])
    for hook in hooks:
        hook.remove()
    return speech, {key: torch.stack(values) for key, values in seen.items()}


@every_case
def test_prompts_equal_the_reference(name):
    fact, found = facts(name), load_file(HERE / f"{name}.safetensors")
    script, prompt = script_of(name), model(name).prompt(request(name))
    torch.testing.assert_close(prompt.inputs, found["inputs"], **CLOSE)
    assert [index for index in script.ids if index not in (-1, 101, 103, 104)] == found["ids"].tolist()
    assert script.text_tokens == fact["target_tokens"]
    assert prompt.is_audio.sum() == len(found.get("heard", ()))
    if "max_frames" not in fact["request"]:
        assert prompt.max_frames == fact["cap"]


@every_case
def test_reference_latents_equal_the_reference(name):
    found, references = load_file(HERE / f"{name}.safetensors"), script_of(name).references
    assert len(references) == len(facts(name)["request"].get("references", ()))
    if references:
        torch.testing.assert_close(
            torch.cat([reference.patches for reference in references]), found["heard"], **CLOSE
        )


@pytest.mark.slow
@every_case
def test_patches_stops_and_samples_equal_the_reference(name):
    fact, found = facts(name), load_file(HERE / f"{name}.safetensors")
    speech, seen = spoken(name)
    assert len(speech.frames) == fact["frames"]
    torch.testing.assert_close(seen["stop"], found["stop"], **CLOSE)
    torch.testing.assert_close(seen["mu"][::7], found["mu"].view_as(seen["mu"][::7]), **CLOSE)
    torch.testing.assert_close(speech.frames, found["patches"], **CLOSE)
    frame_samples, rate_hz = (120, 44100) if fact["size"] == "tiny-1.5" else (480, 48000)
    assert (len(speech.samples), speech.sample_rate_hz) == (frame_samples * fact["frames"], rate_hz)
    # the first generation's checkpoint is twice as loud: samples reach full scale, and patches are 1e-6 off
    most = 2e-5 if fact["size"] == "tiny-1.5" else 1e-5
    torch.testing.assert_close(speech.samples[:: fact["stride"]], found["samples"], rtol=0, atol=most)


# the VAE


@torch.inference_mode()
def test_the_vae_equals_the_reference():
    found, vae = load_file(HERE / "vae.safetensors"), family("voxcpm2").vae
    latents, audio = noise("vae", 1, 8, 60, deviation=1.5), noise("audio", 1, 1600, deviation=0.1)
    stride = facts("vae")["stride"]
    whole, _ = decode_latents(vae.decoder, latents, 15)
    torch.testing.assert_close(whole[0, ::stride], found["decoded"], **CLOSE)
    torch.testing.assert_close(whole[0, ::stride], found["streamed"], **CLOSE)
    torch.testing.assert_close(vae.encoder(audio)[0], found["encoded"], **CLOSE)


# single bits

both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@both_dtypes
@pytest.mark.parametrize("steps", [2, 3, 7, 10, 25, 49])
def test_the_schedule_equals_the_reference_in_every_bit(steps, dtype):
    """Compare the times, the times of evaluation, and the result of a velocity of one."""
    name = f"{str(dtype).removeprefix('torch.')}.{steps}"
    times = sway_times(steps, dtype)
    assert torch.equal(times, SOLVER[f"{name}.times"])
    looks, goes = euler_steps(times)
    still = 1 if steps < 49 else 2
    assert torch.equal(looks[still:], SOLVER[f"{name}.looks"]) and not goes[:still].any()
    x, one = torch.full((1, 1), 0.3, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    for dt in goes:
        x = x - dt * guided(one, one, torch.tensor([2.0]))
    assert torch.equal(x[0], SOLVER[f"{name}.went"])


@both_dtypes
def test_the_time_sinusoid_equals_the_reference(dtype):
    """In every bit in bf16. In fp32, the last bit of an angle near 1000 differs between processors."""
    name = str(dtype).removeprefix("torch.")
    close = {"rtol": 0, "atol": 0.0 if dtype == torch.bfloat16 else 6.2e-5}
    ours = sinusoid(sway_times(10, dtype), 1024)[:, ::11]
    torch.testing.assert_close(ours, SOLVER[f"{name}.sinusoid"], **close)
    assert torch.equal(
        sinusoid(torch.zeros(1, dtype=dtype), 1024)[0, ::11], SOLVER[f"{name}.sinusoid_of_zero"]
    )


@both_dtypes
def test_rotary_tables_equal_the_reference_in_every_bit(dtype, tmp_path):
    config, _ = describe(demo.write_texts(tmp_path / "demo", "full"))
    rope = LongRope(config.lm.rope)
    rope.prepare(torch.device("cpu"), dtype)
    name = str(dtype).removeprefix("torch.")
    for table, truth in zip(rope(SOLVER["positions"]), ("cos", "sin"), strict=True):
        assert torch.equal(table[:, :64], table[:, 64:])
        assert torch.equal(table[:, :64], SOLVER[f"{name}.{truth}"])


@torch.inference_mode()
def test_a_patch_in_bfloat16_is_close_to_the_reference():
    """Every operation rounds. Two batch sizes of the reference itself differ by 0.6 %."""
    found, ours, how = (
        load_file(HERE / "bfloat16.safetensors"),
        family("voxcpm2", "bfloat16"),
        facts("bfloat16"),
    )
    given = {name: noise(name, *shape).bfloat16() for name, shape in how["shapes"].items()}
    guidance, steps = torch.full((3,), how["cfg_scale"]), torch.full((3,), 10)
    patches = ours.net.solver(
        given["mu"].unflatten(1, (2, -1)), given["cond"], given["noise"], guidance, steps
    )
    for value, truth, most in (
        (patches, found["patches"], 2e-2),
        (ours.net.rows(given["cond"]), found["rows"], 1e-2),
        (ours.net.fsq(given["hidden"]), found["fsq"], 1e-2),
    ):
        assert value.dtype == truth.dtype == torch.bfloat16
        assert (value.float() - truth.float()).norm() < most * truth.float().norm()


# token ids


def test_token_ids_equal_the_reference():
    """There is one deviation: special tokens in a user's text are ordinary text."""
    tokenize, special = family("voxcpm2").writer.tokenize, ("</s>", "<s>", "<unk>", "<|audio_start|>")
    lookalikes = 0
    for entry in facts("tokens")["texts"]:
        text = re.sub(r"\s+", " ", entry["text"])
        ids = tokenize(text)
        if any(token in text for token in special):
            lookalikes += 1
            assert not {0, 1, 2, 101, 102, 103, 104} & set(ids) and len(ids) > len(entry["ids"]), text
        elif text.strip():
            assert ids == entry["ids"], text
    assert lookalikes >= 4


def test_token_ids_where_transcript_and_text_meet():
    """Transcript and text are one string, concatenated as given. Neither is stripped, and only the text has
    its white space collapsed."""
    writer, seams = family("voxcpm2").writer, facts("tokens")["seams"]
    given = AudioClip(np.sin(np.arange(400, dtype=np.float32)), 16000)
    for seam in seams:
        asked = Request(text=seam["text"], references=(Reference(given, seam["transcript"]),))
        ids = writer(asked, check(asked, family("voxcpm2").spec)).ids
        assert list(ids[: ids.index(101)]) == seam["ids"], seam
    ids = {seam["transcript"] + "|" + seam["text"]: tuple(seam["ids"]) for seam in seams}
    assert (
        ids["Hello. |World"] == ids["Hello.| World"] != ids["Hello.|World"]
        and ids["Hello.|\nWorld"] != ids["Hello.\n|World"]
    )


# adapters


@pytest.mark.parametrize(("name", "size"), [("adapted", "tiny"), ("old_adapted", "tiny-1.5")])
def test_an_adapter_changes_the_speech(name, size):
    plain = zoo.generate(
        family("voxcpm2", size=size), request(name), noise=noise(str(facts(name)["case"]), 400, 4, 8)[:5]
    )
    assert (plain.frames[0] - spoken(name)[0].frames[0]).abs().max() > 0.1
