"""Tests of the small voice's timed training.

Dense batches teach what lists of frames teach, packing loses nothing, and a run ends in time with its
learning rate down.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from tests.train_a_voice.test_recipe import Faithful
from train_a_voice import (
    checkpoint,
    codes,
    dense_decoder,
    dense_talker,
    library,
    remote,
    sprint,
    talker,
)
from train_a_voice.__main__ import main
from train_a_voice.align import Aligner
from train_a_voice.flite import Utterance
from train_a_voice.lines import Lines
from train_a_voice.pool import IGNORE, NEAR, Noise, Pool, neighbours
from train_a_voice.settings import QUICK, codec_config
from zoo.qwen3_tts import describe
from zoo.qwen3_tts.codec import Decoder, DecoderConfig
from zoo.qwen3_tts.model import Talker
from zoo.request import Request

pytestmark = pytest.mark.compile  # training is too slow for the inner loop
NUM_PHONES = 7
SIZE = codes.SIZE
CPU = torch.device("cpu")


def codebooks(levels: int = QUICK.mel_levels) -> codes.Codebooks:
    generator = torch.Generator().manual_seed(0)
    mel = torch.randn(levels, codes.SIZE, 320, generator=generator)
    return codes.Codebooks(mel, torch.rand(codes.SHAPES, 8, generator=generator))


def some_lines(count: int = 6, seed: int = 0) -> Lines:
    rng = np.random.default_rng(seed)
    texts = ["".join(rng.choice(list("aeiou klmn"), int(rng.integers(4, 15)))) for _ in range(count)]
    frames = rng.integers(3, 12, count)
    num = int(frames.sum())
    spoken = np.concatenate(
        [np.sort(rng.integers(0, len(t) + 1, n)) for t, n in zip(texts, frames, strict=True)]
    )
    return Lines(
        texts,
        np.cumsum([0, *frames]),
        rng.integers(0, codes.SIZE, (num, QUICK.codebooks)).astype(np.int16),
        spoken.astype(np.uint8),
        rng.integers(0, NUM_PHONES, num).astype(np.uint8),
    )


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    checkpoint.write_texts(tmp_path, QUICK)
    pool = Pool(tmp_path, codebooks(), CPU, 20, 400)
    assert pool.add(some_lines(), 0) == 6
    return pool


def model(pool: Pool, texts: Path) -> dense_talker.Dense:
    config = describe(texts)[0]
    torch.manual_seed(0)
    training = dense_talker.Dense(Talker(config), config, NUM_PHONES)
    talker.initialise(training, codebooks())
    training.pool, training.mel = pool, codebooks().mel
    return training


def test_packing_loses_nothing(tmp_path: Path) -> None:
    found = some_lines(40)
    found.save(tmp_path / "lines.npz")
    again = Lines.load(tmp_path / "lines.npz")
    assert again.texts == found.texts
    for name in ("edges", "codes", "spoken", "phones"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    joined = Lines.join([found.first(10), some_lines(3, 1)])
    assert len(joined.texts) == 13
    np.testing.assert_array_equal(joined.edges[:11], found.edges[:11])


def test_a_dense_batch_has_the_losses_of_lists_of_frames(pool: Pool, tmp_path: Path) -> None:
    found, training = some_lines(), model(pool, tmp_path)
    which = torch.tensor([4, 1, 2])
    board = pool.board(which, 64, None)
    rows = (board.first.flatten() >= 0).nonzero()[:, 0]
    every = rows[board.first.flatten()[rows] < codes.SIZE]
    training.rows_of = lambda board, num: every  # type: ignore[method-assign]
    dense = training(board, 0, 0, 1.0)

    prompts = [pool.pairs[p : p + n].long().numpy() for p, n, *_ in pool.places[:6].tolist()]
    spans = [slice(int(a), int(b)) for a, b in zip(found.edges[:-1], found.edges[1:], strict=True)]
    data = talker.Utterances(
        prompts,
        pool.places[:6, 2].tolist(),
        [found.codes[at] for at in spans],
        [found.spoken[at].astype(np.int64) for at in spans],
        [found.phones[at].astype(np.int64) for at in spans],
        NUM_PHONES,
    )
    listed = talker.Training(training.talker, training.config, NUM_PHONES)
    listed.phones = training.phones
    batch = talker.collate(data, which.numpy(), Faithful())  # type: ignore[arg-type]
    assert (batch.looks_at.numpy() == board.looks_at.flatten()[rows].numpy()).all()
    assert (batch.phones.numpy() == board.phones.flatten(0, 1)[rows].numpy()).all()
    expected = listed(batch, 1.0)
    for name in ("first", "look", "phone"):
        torch.testing.assert_close(dense[name], expected[name], atol=2e-5, rtol=0)


def test_the_target_of_a_code_is_the_residual_of_the_codes_before(pool: Pool, tmp_path: Path) -> None:
    """With another first code, the second code's target is the one nearest to the residual."""
    training = model(pool, tmp_path)
    training.softness.fill_(1e-3)
    given = torch.tensor([[3, 7, 0]])
    read = torch.tensor([[4, 7, 0]])
    training.mel[1, 11] = training.mel[0, 3] + training.mel[1, 7] - training.mel[0, 4]
    training.depth_logits = lambda h, codes: [torch.eye(SIZE)[11][None] * 99, torch.zeros(1, SIZE)]  # type: ignore[method-assign]
    training.shares = torch.tensor([1.0, 0.0])
    depth = training.depth_loss(torch.zeros(1, 32), given, read)
    assert depth < 1e-3
    wrong = training.depth_loss(torch.zeros(1, 32), given, given)
    assert wrong > 10


def test_an_unsure_talker_learns_the_code_that_adds_nothing() -> None:
    """The residual is one of many long rows at random, so the short row is the best prediction."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(64, 40, generator=generator)
    table[0] = 0
    # Each of the long rows is the target once.
    goals = (-torch.cdist(table[1:], table).square() / 4).log_softmax(-1)
    logits = torch.zeros(64, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    for _ in range(150):
        loss = dense_talker.distance(logits.log_softmax(-1).expand(len(goals), -1), goals)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert int(logits.argmax()) == 0


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
    near = neighbours(codebooks())
    assert near.shape == (QUICK.codebooks, codes.SIZE, NEAR)
    assert (near.long() != torch.arange(codes.SIZE)[:, None]).all()


def test_own_draws_replace_only_frames(pool: Pool, tmp_path: Path) -> None:
    """A talker that always predicts code 5 reads code 5 in frames and nowhere else."""
    training = model(pool, tmp_path)
    with torch.no_grad():
        for head in training.talker.depth.heads:
            head.weight.zero_()
        training.talker.codec_head.weight.zero_()
    board = pool.board(torch.tensor([0, 3]), 64, None)
    training.first_logits = lambda h: torch.eye(codes.SIZE + 1)[5].expand(*h.shape[:-1], -1) * 99  # type: ignore[method-assign]
    drawn = training.own(board, 500, 1.0)  # so many draws include every frame
    assert (drawn[..., 0][board.is_frame] == 5).all()
    assert (drawn[~board.is_frame] == board.codes[~board.is_frame]).all()
    assert len(drawn[..., 1][board.is_frame].unique()) > 5


def test_utterances_that_arrive_later_are_drawn(pool: Pool) -> None:
    rooms = dense_talker.Rooms(dense_talker.Plan(positions=256, rooms=(32, 48, 64)))
    rooms.grow(pool)
    before = sum(map(len, rooms.flat))
    assert pool.add(some_lines(5, 1), 1) == 5
    rooms.grow(pool)
    assert before == 6
    assert sorted(np.concatenate(rooms.flat)) == list(range(11))
    rng = np.random.default_rng(0)
    drawn = {int(u) for _ in range(300) for u in rooms.draw(rng, 1.0)[1]}
    assert drawn == set(range(11))
    assert pool.add(some_lines(30, 2), 2) == 9  # there is room for twenty in total


def test_a_run_ends_in_time(pool: Pool, tmp_path: Path) -> None:
    training = model(pool, tmp_path)
    before = {name: p.detach().clone() for name, p in training.named_parameters()}
    plan = dense_talker.Plan(
        positions=128, rooms=(48, 64), warmup=2, log_s=0.2, own_from=0.5, dtype=torch.float32
    )
    log = sprint.Log(tmp_path / "log.jsonl")
    clock = sprint.Clock(0.05)
    path = tmp_path / "talker.pt"
    steps = dense_talker.train(training, codebooks(), pool, pool, plan, clock, log, path, lambda pool: 0)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert 2.9 < lines[-1]["s"] < 20
    assert lines[-1]["step"] == steps
    assert lines[-1]["first"] < lines[0]["first"]
    kept = torch.load(path, weights_only=True)
    assert kept["step"] == steps
    assert kept["module"].keys() == before.keys()
    for name, value in training.named_parameters():
        assert value.grad is None or torch.isfinite(value.grad).all()
        assert kept["module"][name].dtype == torch.bfloat16
    for name in ("talker.layers.0.qkv.weight", "talker.depth.heads.0.weight", "talker.text.fc1.weight"):
        assert not torch.equal(dict(training.named_parameters())[name], before[name])


def test_every_parameter_has_a_gradient_with_own_draws(pool: Pool, tmp_path: Path) -> None:
    """Uses bfloat16, where autocast could cache a copy without a gradient."""
    training = model(pool, tmp_path)
    board = pool.board(torch.tensor([0, 1]), 64, None)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        losses = training(board, 20, 10, 1.0)
    sum(losses.values()).backward()
    without = [name for name, p in training.named_parameters() if p.grad is None or not p.grad.any()]
    assert not [name for name in without if "codec_head" not in name], without


def test_a_decoder_trains_on_sounds_added_up_to_their_room(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plan = dense_decoder.Plan(batch=2, frames=6, room=60, warmup=2, log_s=0.1, dtype=torch.float32)
    sounds = dense_decoder.Sounds(plan, codebooks(), CPU)

    def some(num: int) -> tuple[np.ndarray, np.ndarray]:
        found = rng.integers(0, codes.SIZE, (num, QUICK.codebooks)).astype(np.int16)
        return found, (rng.standard_normal(num * 1920) * 3000).astype("<i2")

    sounds.add(*some(40))
    sounds.add(*some(40))
    assert sounds.num == 60
    assert int(sounds.count) == 60
    decoder = Decoder(DecoderConfig.from_json(codec_config(QUICK)))
    log = sprint.Log(tmp_path / "log.jsonl")
    clock, path = sprint.Clock(0.05), tmp_path / "decoder.pt"
    steps = dense_decoder.train(decoder, codebooks(), sounds, plan, clock, log, path, lambda sounds: False)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == steps
    assert torch.load(path, weights_only=True)["module"].keys() == dict(decoder.named_parameters()).keys()


def test_a_share_of_crops_is_coarse() -> None:
    """In a third of the crops, all codes from some level on are the one that adds least.

    The first two codes and the last one never change."""
    torch.manual_seed(0)
    books = codebooks(8)
    books.mel[:, 100] *= 0.01
    plan = dense_decoder.Plan(room=50, coarse=0.3)
    sounds = dense_decoder.Sounds(plan, books, CPU)
    sounds.add(np.full((50, 9), 7, np.int16), np.zeros(50 * 1920, "<i2"))
    found, _ = sounds.crop(2_000, 3)
    is_coarse = (found == 100).any(2).any(1)
    assert abs(is_coarse.float().mean() - 0.3) < 0.03
    assert (found[:, :, [0, 1, 8]] == 7).all()
    assert ((found == 7) | (found == 100)).all()
    for piece in found[is_coarse][:20]:
        cut = int((piece[0, :8] == 7).sum())
        assert 2 <= cut <= 7
        assert (piece[:, :cut] == 7).all()
        assert (piece[:, cut:8] == 100).all()


def test_training_without_new_speech_still_gives_a_voice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run all of `remote` from a folder without flite, so that no new speech arrives."""
    monkeypatch.setattr(remote.library, "OBJECTS", ())
    utterances = [
        Utterance(text, 0, 48_000, ("pau", *"mabcde"), (0.1, 0.5, 0.9, 1.0, 1.1, 1.2, 1.3))
        for text in ("mama", "am")
    ]
    aligner = Aligner(utterances)
    (tmp_path / "lexicon.txt").write_text("mama\nma -1.0\n")
    remote.pack(
        tmp_path / "in", [some_lines(40)], some_lines(5, 1), codebooks(), aligner, tmp_path / "lexicon.txt"
    )
    out = tmp_path / "out"
    options = ["--minutes", "0.8", "--quick", "--processes", "1", "--device", "cpu"]
    assert remote.main([str(tmp_path / "in"), str(out), *options]) == 0
    assert "the decoder learns from the packed codes" in (out / "decoder.txt").read_text()
    assert "flite's libraries are not in" in (out / "more.txt").read_text()
    for name in ("talker", "decoder"):
        lines = [json.loads(line) for line in (out / f"{name}_log.jsonl").read_text().splitlines()]
        assert lines[-1]["step"] == torch.load(out / f"{name}.pt", weights_only=True)["step"] > 0
    voice = tmp_path / "voice"
    main(["export", str(tmp_path), "--quick", "--trained", str(out), "--out", str(voice)])
    family = zoo.load(voice, device="cpu", dtype=torch.float32)
    assert len(zoo.generate(family, Request(text="mama", max_frames=3)).frames) <= 3


@pytest.mark.skipif(
    shutil.which("flite") is None or not (library.SYSTEM / library.OBJECTS[-1]).exists(),
    reason="the program flite and its library are not both installed",
)
def test_pack_makes_a_folder_from_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pocketsphinx")
    main(["pack", str(tmp_path), "--quick", "--sentences", "12"])
    found = Lines.load(tmp_path / "pack" / "lines.npz")
    assert len(found.texts) == 12
    assert found.codes.shape == (found.edges[-1], QUICK.codebooks)
    assert (tmp_path / "pack" / "flite.tar.xz").stat().st_size > 1e6
    assert np.load(tmp_path / "held_out" / "codes.npy").shape[1] == QUICK.codebooks
    texts = set(found.texts)
    main(["pack", str(tmp_path), "--quick", "--sentences", "12"])  # continues: nothing is made again
    assert set(Lines.load(tmp_path / "pack" / "lines.npz").texts) == texts


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [sprint.rate(1.0, 10, step, step / 1000) for step in range(1001)]
    assert rates[0] == pytest.approx(0.1, abs=0.01)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(0.01)


assert IGNORE == talker.IGNORE
