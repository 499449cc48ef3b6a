"""Tests of the two trainings: what batches hold, what losses teach, and that a run of a given time ends with a
checkpoint that speaks. The trained modules equal the served ones."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from tests.train_a_voice import synthetic
from tests.train_a_voice.test_speech import FLITE
from train_a_voice import checkpoint, codes, decoder, flite, pack, score, sprint, talker, train
from train_a_voice.__main__ import main
from train_a_voice.align import Aligner
from train_a_voice.features import FRAME
from train_a_voice.lines import Lines
from train_a_voice.pool import NEAR, Noise, Pool, neighbours
from train_a_voice.settings import FULL, QUICK, codec_config
from zoo.qwen3_tts import describe, survey
from zoo.qwen3_tts.codec import Decoder, DecoderConfig
from zoo.qwen3_tts.model import Talker
from zoo.request import Request

SIZE = codes.SIZE
CPU = torch.device("cpu")
BOOKS = synthetic.codebooks()
PLAN = talker.Plan(positions=128, rooms=(48, 64), warmup=2, log_s=0, dtype=torch.float32)
SOUNDS = decoder.Plan(batch=2, frames=6, room=60, warmup=2, log_s=0, dtype=torch.float32)


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    checkpoint.write_texts(tmp_path, QUICK)
    pool = Pool(tmp_path, BOOKS, CPU, 20, 400)
    assert pool.add(synthetic.lines(), 0) == 6
    return pool


def model(pool: Pool, texts: Path) -> talker.Training:
    config = describe(texts)[0]
    torch.manual_seed(0)
    training = talker.Training(Talker(config), config, synthetic.NUM_PHONES, BOOKS)
    talker.initialise(training, BOOKS)
    training.pool = pool
    return training


# --- batches ---


def test_a_batch_has_texts_speakers_and_targets(pool: Pool, tmp_path: Path) -> None:
    found, config = synthetic.lines(), describe(tmp_path)[0]
    board = pool.board(torch.arange(6), 64, None)
    for u, text in enumerate(found.texts):
        prompt, frames = int(board.prompts[u]), slice(int(found.edges[u]), int(found.edges[u + 1]))
        start = int(pool.places[u, 2])
        assert bytes(board.text[u, start : start + len(text)].tolist()).decode() == text
        assert tuple(config.voices) == flite.SPEAKERS
        voice = config.voices[flite.SPEAKERS[found.speakers[u]]]
        assert voice in board.codec[u, :prompt].tolist()
        assert (board.codes[u][board.is_frame[u]].numpy() == found.codes[frames]).all()
        gives = slice(prompt - 1, prompt - 1 + len(found.codes[frames]))
        assert (board.first[u, gives].numpy() == found.codes[frames, 0]).all()
        assert board.first[u, gives.stop] == SIZE
        assert (board.looks_at[u, gives].numpy() == start + found.spoken[frames]).all()
        assert (board.phones[u, gives, 0].numpy() == found.phones[frames]).all()


def test_noise_has_the_given_share(pool: Pool) -> None:
    torch.manual_seed(0)
    which = torch.tensor([0, 1, 2, 3, 4, 5]).repeat(60)
    clean, none = pool.board(which, 64, None), pool.board(which, 64, Noise(0, 0, 0))
    assert (clean.codes == none.codes)[clean.is_frame].all()
    for noise, share in ((Noise(0, 0.2, 0), 0.2), (Noise(0, 0, 0.1), 0.1)):
        noisy = pool.board(which, 64, noise)
        wrong = (noisy.codes != clean.codes)[clean.is_frame].float().mean()
        assert abs(wrong - share) < 0.02
        assert (noisy.first == clean.first).all()
    near = neighbours(BOOKS)
    assert near.shape == (QUICK.codebooks, SIZE, NEAR)
    assert (near.long() != torch.arange(SIZE)[:, None]).all()


def test_utterances_that_arrive_later_are_drawn(pool: Pool) -> None:
    rooms = talker.Rooms(talker.Plan(positions=256, rooms=(32, 48, 64)))
    rooms.grow(pool)
    before = sum(map(len, rooms.flat))
    assert pool.add(synthetic.lines(5, 1), 1) == 5
    rooms.grow(pool)
    assert before == 6
    assert sorted(np.concatenate(rooms.flat)) == list(range(11))
    rng = np.random.default_rng(0)
    assert {int(u) for _ in range(300) for u in rooms.draw(rng, 1.0)[1]} == set(range(11))
    assert pool.add(synthetic.lines(30, 2), 2) == 9  # there is room for twenty in total


def test_a_share_of_crops_is_coarse() -> None:
    """In a third of the crops, all codes from some level on are the one that adds least.

    The first two codes and the last one never change."""
    torch.manual_seed(0)
    books = synthetic.codebooks(8)
    books.mel[:, 100] *= 0.01
    sounds = decoder.Sounds(decoder.Plan(room=50, coarse=0.3), books, CPU)
    sounds.add(np.full((50, 9), 7, np.int16), np.zeros(50 * FRAME, "<i2"))
    found, _ = sounds.crop(1_500, 2)
    is_coarse = (found == 100).any(2).any(1)
    assert abs(is_coarse.float().mean() - 0.3) < 0.04
    assert (found[:, :, [0, 1, 8]] == 7).all()
    assert ((found == 7) | (found == 100)).all()
    for piece in found[is_coarse][:20]:
        cut = int((piece[0, :8] == 7).sum())
        assert (piece[:, :cut] == 7).all() and (piece[:, cut:8] == 100).all()


# --- losses ---


def test_the_target_of_a_code_is_the_residual_of_the_codes_before(pool: Pool, tmp_path: Path) -> None:
    """With another first code, the second code's target is the one nearest to the residual."""
    training = model(pool, tmp_path)
    training.softness.fill_(1e-3)
    given, read = torch.tensor([[3, 7, 0]]), torch.tensor([[4, 7, 0]])
    training.mel[1, 11] = training.mel[0, 3] + training.mel[1, 7] - training.mel[0, 4]
    sure = [torch.eye(SIZE)[11][None] * 99, torch.eye(SIZE)[0][None] * 99]
    training.depth_logits = lambda h, codes: sure  # type: ignore[method-assign]
    assert training.depth_loss(torch.zeros(1, 32), given, read) < 1e-3
    assert training.depth_loss(torch.zeros(1, 32), given, given) > 10


def test_softness_makes_a_code_with_the_mean_gain_as_likely_as_all_that_gain_nothing() -> None:
    books = replace(synthetic.codebooks(3), rest=torch.tensor([90.0, 40.0, 30.0]))
    softness = talker.softness_of(books)
    torch.testing.assert_close((torch.tensor([50.0, 10.0]) / softness).exp(), torch.full((2,), 512.0))


def test_an_unsure_talker_learns_the_code_that_adds_nothing() -> None:
    """The residual is one of many long rows at random, so the short row is the best prediction."""
    table = torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    table[0] = 0
    # Each of the long rows is the target once.
    goals = (-torch.cdist(table[1:], table).square() / 4).log_softmax(-1)
    logits = torch.zeros(64, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    for _ in range(150):
        loss = talker.distance(logits.log_softmax(-1).expand(len(goals), -1), goals)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert int(logits.argmax()) == 0


def test_own_draws_replace_only_frames(pool: Pool, tmp_path: Path) -> None:
    """A talker that always predicts code 5 reads code 5 in frames and nowhere else."""
    training = model(pool, tmp_path)
    with torch.no_grad():
        for head in training.talker.depth.heads:
            head.weight.zero_()
    board = pool.board(torch.tensor([0, 3]), 64, None)
    always = torch.eye(SIZE + 1)[5] * 99
    training.first_logits = lambda h: always.expand(*h.shape[:-1], -1)  # type: ignore[method-assign]
    drawn = training.own(board, 500, 1.0)  # so many draws include every frame
    assert (drawn[..., 0][board.is_frame] == 5).all()
    assert (drawn[~board.is_frame] == board.codes[~board.is_frame]).all()
    assert len(drawn[..., 1][board.is_frame].unique()) > 5


def test_every_parameter_has_a_gradient_with_own_draws(pool: Pool, tmp_path: Path) -> None:
    """Uses bfloat16, where autocast could cache a copy without a gradient."""
    training = model(pool, tmp_path)
    board = pool.board(torch.tensor([0, 1]), 64, None)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        losses = training(board, 20, 10, 1.0)
    sum(losses.values()).backward()
    without = [name for name, p in training.named_parameters() if p.grad is None or not p.grad.any()]
    assert not [name for name in without if "codec_head" not in name], without


def test_attention_is_the_same_written_out_and_fused() -> None:
    q, k, v = (torch.randn(2, heads, 7, 16) for heads in (4, 2, 2))
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    fused = torch.nn.functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
    torch.testing.assert_close(talker.attend(q, k, v), fused)


# --- runs ---


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [sprint.rate(1.0, 10, step, step / 1000) for step in range(1001)]
    assert rates[0] == pytest.approx(0.1, abs=0.01)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.01)


class Steps(sprint.Clock):
    """A clock that counts steps instead of seconds."""

    def __init__(self, count: int):
        self.looks, self.count = 0, count

    @property
    def share(self) -> float:
        self.looks += 1
        return min(1.0, (self.looks - 1) // 4 / self.count)  # a step with a line of the log looks four times


def test_a_run_ends_in_time(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    optimiser = sprint.optimiser_of(list(module.parameters()), CPU, 0.0)
    step = sprint.Step(module, optimiser, lambda: (module(torch.ones(2)).square().sum(), {}))
    began_s, path = time.time(), tmp_path / "state.pt"
    num = sprint.run(
        module,
        optimiser,
        lambda number, share: step,
        sprint.Clock(began_s + 0.3),
        sprint.Log(tmp_path / "log.jsonl"),
        path,
        peak=1e-3,
        warmup=2,
        records=False,
    )
    assert 0.3 <= time.time() - began_s < 10
    assert torch.load(path, weights_only=True)["step"] == num > 1


def log_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_reduces_the_losses_of_the_talker(pool: Pool, tmp_path: Path) -> None:
    training, path = model(pool, tmp_path), tmp_path / "talker.pt"
    log = sprint.Log(tmp_path / "log.jsonl")
    plan = replace(PLAN, own_from=0.5)
    steps = talker.train(training, BOOKS, pool, pool, plan, Steps(30), log, path, lambda pool: 0)
    first, *_, last = log_of(tmp_path / "log.jsonl")
    assert last["step"] == steps == 30
    for name in ("first", "depth", "look", "phone"):
        assert last[name] < first[name], name
    kept = torch.load(path, weights_only=True)
    assert (kept["step"], kept["share"]) == (steps, 1.0)
    assert kept["module"].keys() == dict(training.named_parameters()).keys()


def test_training_reduces_the_loss_of_the_decoder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sounds = decoder.Sounds(SOUNDS, BOOKS, CPU)
    for _ in range(2):
        found = rng.integers(0, SIZE, (40, QUICK.codebooks)).astype(np.int16)
        sounds.add(found, (rng.standard_normal(40 * FRAME) * 3000).astype("<i2"))
    assert sounds.num == int(sounds.count) == 60
    module, path = Decoder(DecoderConfig.from_json(codec_config(QUICK))), tmp_path / "decoder.pt"
    log = sprint.Log(tmp_path / "log.jsonl")
    decoder.train(module, BOOKS, sounds, SOUNDS, Steps(12), log, path, lambda sounds: False)
    first, *_, last = log_of(tmp_path / "log.jsonl")
    assert last["loss"] < first["loss"]


def test_a_stopped_run_continues_its_schedule(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    for share, start, is_further in ((0.4, 0.4, False), (1.0, 0.0, True)):
        sprint.save(tmp_path / "state.pt", module, 7, share=share)
        begin = train.Begin(tmp_path / "state.pt")
        assert (begin.share, begin.is_further) == (start, is_further)
        assert sprint.Clock(time.time() + 60, begin.share).share == pytest.approx(start, abs=0.01)
    other = torch.nn.Linear(2, 2)
    begin.load(other)
    torch.testing.assert_close(other.weight, module.weight, atol=0.01, rtol=0.01)
    with pytest.raises(AssertionError, match="another voice"):
        begin.load(torch.nn.Embedding(2, 2))


def test_a_voice_that_is_trained_further_continues_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the rate of a finished voice, also after a stop."""
    monkeypatch.setattr(sprint, "SAVE_S", -1.0)
    module = torch.nn.Linear(2, 2)
    optimiser = sprint.optimiser_of(list(module.parameters()), CPU, 0.0)
    saved = []
    monkeypatch.setattr(sprint, "save", lambda path, module, step, **facts: saved.append(facts))
    sprint.run(
        module,
        optimiser,
        lambda number, share: sprint.Step(module, optimiser, lambda: (module(torch.ones(2)).sum(), {})),
        sprint.Clock(time.time() + 60, 0.4, is_further=True),
        sprint.Log(tmp_path / "log.jsonl"),
        tmp_path / "state.pt",
        peak=1e-3,
        warmup=2,
        records=False,
        most_steps=1,
    )
    torch.save({"module": {}, "step": 1} | saved[0], tmp_path / "state.pt")
    begin = train.Begin(tmp_path / "state.pt")
    assert begin.is_further and begin.share == pytest.approx(0.4, abs=0.01)


def options(folder: Path, out: Path, seconds: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    line = [str(folder), str(out), "--device", "cpu", "--minutes", str(seconds / 60), "--processes", "1"]
    return parser.parse_args(line)


def test_a_training_that_fails_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = options(tmp_path, tmp_path / "out", 60)
    args.out.mkdir()
    args.end = time.time() + 600  # a busy machine may take long to start the programs
    fails = "import sys, time; time.sleep(60 * ('more' in sys.argv)); sys.exit('--no-graphs' not in sys.argv)"
    line = [sys.executable, "-S", "-c", fails]
    monkeypatch.setattr(train, "command", lambda args, scratch, role: [*line, role])
    assert train.run_all(tmp_path, args) == 0
    assert time.time() < args.end - 300


def test_one_part_is_trained_and_the_other_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, started = options(tmp_path, tmp_path / "out", 60), []

    def command(args: argparse.Namespace, scratch: Path, role: str) -> list[str]:
        started.append(role)
        return [sys.executable, "-S", "-c", "pass"]

    monkeypatch.setattr(train, "command", command)
    BOOKS.save(tmp_path / "codebooks.npz")
    (tmp_path / "decoder.pt").write_bytes(b"trained before")
    args.only = "talker"
    with pytest.raises(SystemExit, match=r"needs --begin with a directory that has decoder\.pt"):
        train.train(args)
    args.begin = tmp_path
    with pytest.raises(ValueError, match=r"has no talker\.pt; name the directory of a training"):
        train.train(args)
    (tmp_path / "talker.pt").write_bytes(b"trained before")
    assert train.train(args) == 0 and started == ["more", "talker"]
    assert (args.out / "decoder.pt").read_bytes() == b"trained before"
    args.begin = args.out = tmp_path  # continues in its own directory
    assert train.train(args) == 0
    assert (tmp_path / "decoder.pt").read_bytes() == b"trained before"


def test_a_part_that_trains_alone_has_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BOOKS.save(tmp_path / "codebooks.npz")
    args, threads, before = options(tmp_path, tmp_path, 60), [], torch.get_num_threads()
    monkeypatch.setattr(train.os, "cpu_count", lambda: 3)
    monkeypatch.setitem(train.ROLES, "decoder", lambda *_: threads.append(torch.get_num_threads()))
    args.role = "decoder"
    try:
        for args.only in (None, "decoder"):
            assert train.train(args) == 0
    finally:
        torch.set_num_threads(before)
    assert threads == [before, 3]


def trained(folder: Path, out: Path, scratch: Path) -> None:
    """Play both roles for some steps each, without other processes."""
    args = options(folder, out, 1)
    args.is_quick, args.end = True, time.time()
    for directory in (out, scratch / "lines", scratch / "waves"):
        directory.mkdir(exist_ok=True, parents=True)
    np.save(scratch / "waves" / "00001.npy", np.zeros(FRAME, "<i2"))  # its lines are still being written
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sprint, "Clock", lambda end_s, start, is_further: Steps(6))
        for role in train.ROLES.values():
            role(folder, scratch, QUICK, args)


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A voice after seconds of training, without flite: the decoder learns from the packed codes."""
    folder, out = tmp_path_factory.mktemp("pack"), tmp_path_factory.mktemp("out")
    BOOKS.save(folder / "codebooks.npz")
    Aligner([synthetic.speech("mama").utterance], "bcde").save(folder / "aligner.npz")
    synthetic.lines(40).save(folder / "lines.npz")
    synthetic.lines(5, 1).save(folder / "unseen.npz")
    trained(folder, out, tmp_path_factory.mktemp("scratch"))
    main(["export", str(out), str(out / "voice")])
    return out / "voice"


@pytest.mark.slow
def test_both_voices_of_the_checkpoint_speak(voice: Path) -> None:
    family = zoo.load(voice, device="cpu", dtype=torch.float32)
    assert zoo.inspect(voice)["voices"] == sorted(flite.SPEAKERS)
    spoken = {}
    for speaker in flite.SPEAKERS:
        found = zoo.generate(family, Request(text="mama", voice=speaker, temperature=0), max_frames=3)
        assert len(found.samples) == FRAME * len(found.frames)
        spoken[speaker] = found.frames
    request = Request(text="mama", temperature=0)  # in the first voice
    assert torch.equal(zoo.generate(family, request, max_frames=3).frames, spoken["rms"])


def test_the_trained_decoder_equals_the_served_one(voice: Path) -> None:
    served = zoo.load(voice, device="cpu", dtype=torch.float32).codec.decoder
    found = torch.from_numpy(synthetic.lines().codes.astype(np.int64))
    made = Decoder(DecoderConfig.from_json(codec_config(QUICK)))
    table = served.quantizer.table.flatten(0, 1)  # what it was made of was freed
    rows = {"quantizer.sums": table, "quantizer.usage": table.new_ones(len(table))}
    made.load_state_dict(dict(served.named_parameters()) | rows)
    samples = decoder.samples(decoder.trainable(made), found[None])[0].detach()
    expected = torch.from_numpy(score.decode(served, found))
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(samples.clamp(-1, 1), expected, atol=1e-5, rtol=0)


def test_the_trained_talker_equals_the_served_one(voice: Path) -> None:
    """Read greedy speech back with its own codes: every code must be the likeliest again."""
    family = zoo.load(voice, device="cpu", dtype=torch.float32)
    frames, said = [], ["mama nana", "nama"]
    for text, name in zip(said, flite.SPEAKERS, strict=True):
        request = Request(
            text=text, voice=name, language="english", temperature=0, repetition_penalty=1.0, max_frames=8
        )
        frames.append(zoo.generate(family, request).frames.numpy().astype(np.int16))
    edges = np.cumsum([0, *map(len, frames)])
    zeros = np.zeros(edges[-1], np.uint8)
    pool = Pool(voice, BOOKS, CPU, 2, 100)
    pool.frames_of = [[english, english] for _, english in pool.frames_of]
    pool.add(Lines(said, np.array([0, 1], np.uint8), edges, np.concatenate(frames), zeros, zeros), 0)
    training = talker.Training(family.talker, family.config, 3, BOOKS)
    training.pool = pool
    board = pool.board(torch.arange(2), 64, None)
    with torch.no_grad():
        h, _, _ = training.hidden(board, board.codes)
    for u, codes_of in enumerate(frames):
        begin = int(board.prompts[u]) - 1
        here = h[u, begin : begin + len(codes_of)]
        assert (training.first_logits(here).argmax(1).numpy() == codes_of[:, 0]).all()
        likely = training.depth_logits(here, torch.from_numpy(codes_of.astype(np.int64)))
        assert (torch.stack([x.argmax(1) for x in likely], 1).numpy() == codes_of[:, 1:]).all()


def test_an_exported_voice_is_opened_again(voice: Path, tmp_path: Path) -> None:
    """Its parts make the same files, and a training can begin with each."""
    main(["reopen", str(voice), str(tmp_path)])
    main(["export", str(tmp_path), str(tmp_path / "again")])
    for name in ("model.safetensors", "speech_tokenizer/model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (voice / name).read_bytes()
    config = describe(voice)[0]
    training = talker.Training(Talker(config), config, synthetic.NUM_PHONES, BOOKS)
    train.Begin(tmp_path / "talker.pt").load(training)
    part = training.talker.depth.layers[0].qkv.weight
    served = zoo.load(voice, device="cpu", dtype=torch.float32).talker.depth.layers[0].qkv.weight
    assert torch.equal(part, served)
    train.Begin(tmp_path / "decoder.pt").load(Decoder(DecoderConfig.from_json(codec_config(QUICK))))
    state = torch.load(tmp_path / "talker.pt", weights_only=True)
    del state["module"]["talker.norm.weight"]
    torch.save(state, tmp_path / "talker.pt")
    with pytest.raises(AssertionError, match=r"missing \['talker\.norm\.weight'\]"):
        train.Begin(tmp_path / "talker.pt").load(training)
    with pytest.raises(
        SystemExit, match=r"reopen: .*does not exist; name the directory of an exported voice"
    ):
        main(["reopen", str(tmp_path / "nothing"), str(tmp_path / "nowhere")])
    assert not (tmp_path / "nowhere").exists()


def test_the_full_voice_is_small_enough(tmp_path: Path) -> None:
    checkpoint.write_texts(tmp_path, FULL)
    _, parameters = survey(tmp_path)
    assert 2 * parameters < 20e6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("export {0} {0}/voice", "has no talker.pt; name the directory of a training"),
        ("train {0} {0}/out --begin {0}", "has no talker.pt; name the directory of a training"),
        ("train {0} {0}/out --minutes 0", "--minutes 0 is no time"),
        ("score {0} --url http://127.0.0.1:9", "http://127.0.0.1:9 does not answer"),
    ],
)
def test_a_mistake_is_told_in_one_line(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / pack.LAST).touch()
    with pytest.raises(SystemExit, match=re.escape(message)) as told:
        main(line.format(tmp_path).split())
    assert "\n" not in str(told.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "voice").exists()


@pytest.mark.parametrize(
    "line",
    [
        "pack work --sentences 0",
        "train pack out --seed 0",
        "train pack out --processes 0",
        "train pack out --device tpu",
        "score work --codes --count 0",
    ],
)
def test_numbers_below_one_and_other_devices_are_refused(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seed 0 would make sentences of the packed folder again, those to check with among them."""
    with pytest.raises(SystemExit):
        main(line.split())
    assert f"argument {line.split()[-2]}:" in capsys.readouterr().err


def test_an_unknown_step_lists_the_possible_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sing", "nowhere"])
    message = capsys.readouterr().err
    assert all(step in message for step in ("pack", "train", "export", "reopen", "score"))


@pytest.mark.slow
@FLITE
def test_from_nothing_to_a_score(tmp_path: Path) -> None:
    for module in ("pocketsphinx", "soxr"):
        pytest.importorskip(module)
    main(["pack", str(tmp_path), "--quick", "--sentences", "12"])
    folder, scratch = tmp_path / "pack", tmp_path / "scratch"
    found = Lines.load(folder / "lines.npz")
    assert len(found.texts) == 12 and found.speakers.tolist() == [0, 1] * 6
    assert found.codes.shape == (found.edges[-1], QUICK.codebooks)
    main(["pack", str(tmp_path), "--quick", "--sentences", "12"])  # continues: nothing is made again
    assert Lines.load(folder / "lines.npz").texts == found.texts
    with pytest.raises(ValueError, match="use another directory"):
        pack.join([tmp_path / "lines" / "00000.npz"], [["Hello."]])

    for directory in ("lines", "waves"):
        (scratch / directory).mkdir(parents=True)
    texts, wave = found.texts[:4], scratch / "waves" / "00000.npy"
    pack.make_lines(texts, scratch / "lines" / "00000.npz", folder, wave=wave)
    made = Lines.load(scratch / "lines" / "00000.npz")
    np.testing.assert_array_equal(made.codes, found.first(4).codes)  # codes are a function of the text
    assert len(np.load(wave)) == FRAME * len(made.codes)
    trained(folder, tmp_path / "out", scratch)
    main(["export", str(tmp_path / "out"), str(tmp_path / "voice")])
    todo = score.Case("Good morning.", 1, 0, is_joined=False)
    heard = score.hear(todo, folder, tmp_path / "voice")
    assert list(heard) == ["flite", "features", "codes", "decoder", "talker", "voice"]
    assert "| rms | short | 2 |" in score.table([todo], [heard])
