"""VoxCPM2: generating a patch, the end of speech, and the decoder's state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from models import Clock, family, serve
from one_pass import decode_latents
from torch import Tensor

import zoo
from serving.engine.engine import Engine
from zoo import AudioClip, Reference, Request
from zoo.contract import Batch, View
from zoo.nn.cfm import guided
from zoo.nn.sampling import normal
from zoo.voxcpm2.latent import MAX_STEPS

OURS = family("voxcpm2")
ASKED = Request(text="hello world", max_frames=12)
VOICE, PROMPT = (
    AudioClip(np.sin(np.arange(n) ** 1.5 / 30).astype(np.float32) / 4, 16000) for n in (500, 900)
)
FORMS = {
    "plain": ASKED,
    "described": replace(ASKED, instructions="slowly"),
    "reference": replace(ASKED, references=(Reference(VOICE),)),
    "continued": replace(ASKED, references=(Reference(PROMPT, "Good evening. "),)),
    "combined": replace(ASKED, references=(Reference(VOICE), Reference(PROMPT, "Good evening. "))),
}
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def steer(monkeypatch: pytest.MonkeyPatch, *stops: bool) -> None:
    """Make the stop head answer these values, one per step, and then repeat the last one."""
    said = iter(stops)
    last = [False]

    def answer(h: Tensor) -> Tensor:
        last[0] = next(said, last[0])
        return torch.full((len(h),), last[0])

    monkeypatch.setattr(OURS.net, "stops", answer)


# the end


@pytest.mark.parametrize(
    ("stops", "frames"),
    [
        ((True,), 4),
        ((False, False, True, False, False, True), 6),
        ((False,) * 11 + (True,), 12),
        ((False,), 12),
    ],
    ids=["at once", "ignored at first", "at the cap", "never"],
)
def test_the_patch_at_which_the_model_stops_is_kept_and_at_least_three_precede_it(stops, frames, monkeypatch):
    steer(monkeypatch, *stops)
    speech = zoo.generate(OURS, ASKED)
    assert len(speech.frames) == frames and len(speech.samples) == 480 * frames
    assert speech.frames.flatten(1).any(1).all()


# noise


def test_noise_depends_only_on_seed_step_and_element():
    seed, step = torch.tensor([5, 5, 6, 5]), torch.tensor([0, 1, 0, 0])
    noise = normal(seed, step, 32)
    assert torch.equal(noise[0], noise[3]) and torch.equal(noise[:1], normal(seed[:1], step[:1], 32))
    assert len({tuple(row) for row in noise.tolist()}) == 3
    assert torch.equal(noise[:, :8], normal(seed, step, 8))


def test_noise_is_normal():
    values = normal(torch.arange(64), torch.arange(64) % 7, 4096).double().flatten()
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01 and 4 < values.abs().max() < 5.5
    for quantile, expected in ((0.0228, -2), (0.1587, -1), (0.5, 0), (0.8413, 1), (0.9772, 2)):
        assert abs(values[::3].quantile(quantile) - expected) < 0.05


def test_given_noise_replaces_the_noise_of_the_seed():
    steps, seed = torch.arange(12), torch.full((12,), 9)
    drawn = zoo.generate(OURS, replace(ASKED, seed=9))
    given = zoo.generate(OURS, ASKED, noise=normal(seed, steps, 32).unflatten(1, (4, 8)))
    assert torch.equal(drawn.frames, given.frames) and torch.equal(drawn.samples, given.samples)
    assert not torch.equal(drawn.frames, zoo.generate(OURS, ASKED).frames)
    assert len(zoo.generate(OURS, ASKED, noise=torch.randn(2, 4, 8)).frames) == 2
    for shape in ((3, 8, 4), (3, 32), (0, 4, 8)):
        with pytest.raises(ValueError, match=r"noise has shape \[.*\]; \[frames, 4, 8\] is needed"):
            zoo.generate(OURS, ASKED, noise=torch.zeros(shape))


# the solver


def solve(guidance: list[float], steps: list[int]) -> Tensor:
    random, rows = torch.Generator().manual_seed(3), len(steps)
    mu, before, noise = (
        torch.randn(1, *shape, generator=random).expand(rows, *shape) for shape in ((2, 24), (4, 8), (4, 8))
    )
    with torch.inference_mode():
        return OURS.net.solver(mu, before, noise, torch.tensor(guidance), torch.tensor(steps))


def test_each_row_has_its_own_guidance_and_steps():
    kinds = [(2.0, 10), (1.0, 10), (2.0, 2), (3.5, 5), (0.0, 7)]
    together = solve(*map(list, zip(*kinds, strict=True)))
    for row, (guidance, steps) in zip(together, kinds, strict=True):
        torch.testing.assert_close(row, solve([guidance], [steps])[0], rtol=0, atol=1e-5)
    apart = (together[:, None] - together).flatten(2).norm(dim=2) + torch.eye(len(kinds))
    assert apart.min() > 0.1


def test_a_slot_uses_the_solver_options_of_its_request():
    default = zoo.generate(OURS, ASKED).frames
    same = {"cfg_scale": 2.0, "solver_steps": MAX_STEPS}
    assert torch.equal(zoo.generate(OURS, replace(ASKED, options=same)).frames, default)
    for other in ({"cfg_scale": 1.5}, {"solver_steps": 4}):
        assert not torch.allclose(
            zoo.generate(OURS, replace(ASKED, options=other)).frames[0], default[0], atol=1e-2
        )


def test_guidance_moves_away_from_the_null_velocity():
    """At 1 the result is the velocity itself.

    Above 1 it moves away from the projection on the null velocity.
    """
    velocity, null = torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0, 0.0]])
    assert torch.equal(guided(velocity, null, torch.tensor([1.0])), velocity)
    torch.testing.assert_close(guided(velocity, null, torch.tensor([2.0])), torch.tensor([[3.0, 8.0]]))
    assert torch.equal(guided(velocity, torch.zeros(1, 2), torch.tensor([2.0])), 2 * velocity)


@both_dtypes
def test_only_audio_positions_are_quantised(dtype):
    ours = family("voxcpm2", dtype)
    rows = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).to(ours.dtype)
    is_audio = torch.tensor([False, False, True, True, False, True])
    base, fsq = ours.net.base, ours.net.fsq
    prompt = ours.prompt(replace(ASKED, text="hello world again"))
    prompt.inputs = prompt.inputs[:7]  # the last one is not prefilled
    prompt.is_audio = torch.cat((is_audio, torch.tensor([False])))
    batch = zoo.loop.SoloBatches(ours, prompt)
    with torch.inference_mode():
        h = ours.hidden(rows, batch.prefill())[:, :32]
        plain = base(rows, batch.prefill())
        torch.testing.assert_close(h, torch.where(is_audio[:, None], fsq(plain), plain), rtol=0, atol=1e-6)
        levels = torch.round(fsq.narrow(plain).tanh() * 9)
    assert levels.abs().max() <= 9 and len(levels.unique()) > 5


@both_dtypes
@pytest.mark.parametrize("form", FORMS)
def test_the_model_learns_which_inputs_are_audio(form, dtype, monkeypatch):
    """The plain loop and the engine, with a prefill of 3 positions at a time, both set the flags.

    Audio inputs are those of references and every generated patch. The first step reads the last input of a
    prompt.
    """
    ours, asked = family("voxcpm2", dtype), replace(FORMS[form], max_frames=4)
    expected = ours.prompt(asked).is_audio.tolist() + [True] * 3
    assert expected[-4] == (form in ("continued", "combined")) and any(expected[:-3]) == (
        form not in ("plain", "described")
    )
    told: dict[int, bool] = {}
    hidden = ours.hidden

    def listen(inputs: Tensor, batch: Batch) -> Tensor:
        told.update(zip(batch.positions.tolist(), batch.is_audio.tolist(), strict=True))
        return hidden(inputs, batch)

    monkeypatch.setattr(ours, "hidden", listen)
    zoo.generate(ours, asked)
    assert [told[position] for position in range(len(expected))] == expected
    told.clear()
    engine = Engine(ours, max_slots=1, compile=False, clock=Clock())
    [model] = engine.models.values()
    model.scheduler.policy = replace(model.scheduler.policy, prefill_tokens=3)
    [listener] = serve(engine, {0: [asked]})
    assert listener.has_ended_well and [told[position] for position in range(len(expected))] == expected


@both_dtypes
@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_audio_flag_changes_the_patch(form, dtype, monkeypatch):
    """The first patch differs if the flag of the prompt's last input, or of an earlier one, is inverted."""
    ours, asked = family("voxcpm2", dtype), replace(FORMS[form], max_frames=1)
    right, prompt = zoo.generate(ours, asked).frames, ours.prompt(asked)
    for wrong in (len(prompt.inputs) - 1, len(prompt.inputs) // 2):
        flags = prompt.is_audio.clone()
        flags[wrong] = ~flags[wrong]
        monkeypatch.setattr(ours, "prompt", lambda request, flags=flags: replace(prompt, is_audio=flags))
        assert (zoo.generate(ours, asked).frames - right).abs().max() > 0.02
        monkeypatch.undo()


# streaming


@pytest.mark.parametrize("form", ["continued", "combined"])
def test_streamed_equals_one_shot_after_a_reference(form):
    """Several requests run at once, in the scheduler's windows.

    Of two equal requests the second shares the pages of the first.
    """
    asked = [replace(FORMS[form], seed=seed, max_frames=20) for seed in (1, 1, 2)]
    engine = Engine(OURS, max_slots=2, compile=False, clock=Clock())
    for listener, request in zip(serve(engine, {0: asked[:1], 8: asked[1:]}), asked, strict=True):
        speech = zoo.generate(OURS, request)
        assert listener.has_ended_well and len(listener.chunks) > 1
        np.testing.assert_allclose(listener.samples, speech.samples, rtol=0, atol=5e-5)


# the decoder


def test_streamed_equals_one_shot_over_a_minute():
    """Render 375 patches in windows of several sizes; the carried state keeps its size."""
    family64 = family("voxcpm2", "float64")
    decoder, patches = family64.vae.decoder, 375
    latents = torch.randn(1, 8, 4 * patches, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.inference_mode():
        state = family64.state(1, patches)
        state.tape[0], state.ready[0] = latents[0].T.unflatten(0, (-1, 4)), patches
        pieces, start, sizes = [], 0, (1, 1, 2, 6, 5, 3)
        while start < patches:
            count = min(sizes[len(pieces) % len(sizes)], patches - start)
            is_last = torch.tensor([start + count == patches])
            view = View(
                torch.tensor([0]),
                torch.tensor([start]),
                torch.tensor([count]),
                is_last,
                family64.spec.window.bucket(count),
            )
            before = state.codec_state[0].clone()
            samples, valid = family64.render(state, view)
            assert valid.tolist() == [count * 480]
            pieces.append(samples[0, : count * 480])
            assert not torch.equal(before, state.codec_state[0])
            start += count
    heard = torch.cat(pieces)
    assert state.tape.dtype == torch.float32 and heard.shape == (patches * 480,)
    with torch.inference_mode():
        rounded, end = decode_latents(decoder, latents.float().double(), patches)
    torch.testing.assert_close(heard, rounded[0].float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(state.codec_state[0], end[0], rtol=0, atol=1e-10)


@torch.inference_mode()
def test_priming_needs_only_the_last_frames():
    decoder = OURS.vae.decoder
    latents, reach = torch.randn(1, 8, 100, generator=torch.Generator().manual_seed(0)), decoder.reach
    assert reach == 33  # 20 with the published rates
    _, past = decode_latents(decoder, latents, 100)
    torch.testing.assert_close(decoder.prime(latents)[0], past[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(decoder.prime(latents[:, :, -reach:])[0], past[0], rtol=0, atol=1e-6)
    # other servers decode over a window of 12 frames, which is too short
    assert not torch.allclose(decoder.prime(latents[:, :, -12:])[0], past[0], atol=1e-6)


def test_the_vae_is_in_float32_for_every_model_dtype():
    small = family("voxcpm2", "bfloat16")
    assert {p.dtype for p in small.vae.parameters()} == {torch.float32} and {
        p.dtype for p in small.net.parameters()
    } == {torch.bfloat16}
    speech = zoo.generate(small, ASKED)
    assert (speech.frames.dtype, speech.samples.dtype) == (torch.bfloat16, torch.float32) and torch.isfinite(
        speech.samples
    ).all()
    latents = speech.frames.float().flatten(0, 1).T[None]
    with torch.inference_mode():
        heard, _ = decode_latents(small.vae.decoder, latents, len(speech.frames))
    assert torch.equal(heard[0], speech.samples)
