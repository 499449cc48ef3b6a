"""Tests of the recipe for a small voice.

The trained modules equal the served ones, a run continues where it stopped, and all steps together make a
checkpoint that speaks. The speech is hummed, so most tests need neither flite nor pocketsphinx.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from train_a_voice import (
    checkpoint,
    codes,
    corpus,
    decoder,
    features,
    judge,
    library,
    talker,
    vocoder,
)
from train_a_voice import sentences as generator
from train_a_voice.__main__ import STEPS, main, utterances
from train_a_voice.align import Aligner
from train_a_voice.flite import RATE_HZ, Shelf, Utterance, speak
from train_a_voice.job import Schedule
from train_a_voice.settings import QUICK, codec_config
from zoo.qwen3_tts import describe
from zoo.qwen3_tts.codec import Decoder, DecoderConfig
from zoo.request import Request

pytestmark = pytest.mark.compile  # training is too slow for the inner loop
WORDS = ("mama", "man", "an", "nam")
SOUNDS = {"m": 140.0, "n": 160.0, "a": 220.0}  # Hz of each letter, which is also its phone


def hum(words: list[str]) -> tuple[np.ndarray, list[str], list[float]]:
    """Return int16 samples at flite's rate, phones, and their ends in seconds."""
    phones, hertz = ["pau"], [0.0]
    for letter in "".join(words):
        phones.append(letter)
        hertz.append(SOUNDS[letter])
    num = int(0.1 * RATE_HZ)
    phase = np.cumsum(np.repeat(hertz, num)) / RATE_HZ
    loud = np.repeat([0.0] + [0.3] * (len(hertz) - 1), num)
    samples = loud * sum(np.sin(2 * np.pi * k * phase) / k for k in range(1, 12))
    return (samples / 2 * 32767).astype("<i2"), phones, [round(0.1 * (i + 1), 3) for i in range(len(phones))]


def fill(directory: Path, num: int, seed: int) -> None:
    """Write a shelf of hummed utterances, as `Shelf.fill` would."""
    rng, start = np.random.default_rng(seed), 0
    directory.mkdir(parents=True)
    with open(directory / "speech.s16", "wb") as file, open(directory / "index.jsonl", "w") as index:
        for _ in range(num):
            words = [str(word) for word in rng.choice(WORDS, int(rng.integers(2, 5)))]
            samples, phones, ends_s = hum(words)
            file.write(samples.tobytes())
            index.write(
                json.dumps(
                    asdict(Utterance(" ".join(words), start, len(samples), tuple(phones), tuple(ends_s)))
                )
                + "\n"
            )
            start += len(samples)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A voice after two steps of training."""
    work = tmp_path_factory.mktemp("voice")
    fill(work / "train", 30, 0)
    fill(work / "held_out", 2, 1)
    for step in ("codes", "decoder", "talker", "export"):
        main([step, str(work), "--quick", "--steps", "2"])
    return work


def read(work: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (work / f"job_{name}" / "log.jsonl").read_text().splitlines()]


def test_the_checkpoint_speaks(work: Path) -> None:
    speech = zoo.generate(
        zoo.load(work / "voice", device="cpu", dtype=torch.float32), Request(text="mama", max_frames=5)
    )
    assert 1 <= len(speech.frames) <= 5
    assert len(speech.samples) == features.FRAME * len(speech.frames)


def test_the_trained_decoder_equals_the_served_one(work: Path) -> None:
    served = zoo.load(work / "voice", device="cpu", dtype=torch.float32).codec.decoder
    found = torch.from_numpy(np.load(work / "held_out" / "codes.npy").astype(np.int64))[None]
    rows, start = torch.zeros(1, served.state_size), torch.zeros(1, dtype=torch.int64)
    expected, _ = served(found, rows, start, start + found.shape[1])
    trained = Decoder(DecoderConfig.from_json(codec_config(QUICK)))
    trained.load_state_dict(dict(served.named_parameters()))
    made = decoder.samples(decoder.trainable(trained), found)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(made.clamp(-1, 1), expected, atol=1e-5, rtol=0)


def test_the_trained_talker_equals_the_served_one(work: Path) -> None:
    """Read greedy speech back with its own codes: every code must be the likeliest again."""
    family = zoo.load(work / "voice", device="cpu", dtype=torch.float32)
    text = "mama nana"
    request = Request(text=text, temperature=0, repetition_penalty=1.0, max_frames=8)
    frames = zoo.generate(family, request).frames.numpy()
    assert len(frames) == 8
    training = talker.Training(family.talker, family.config, 3)
    script = family.writer(request, {"text_mode": "full", "x_vector_only_mode": False})
    data = talker.Utterances(
        [np.array(script.pairs)], [8], [frames], [np.zeros(8, int)], [np.zeros(8, int)], 3
    )
    batch = talker.collate(data, np.array([0]), Faithful())
    kept = {}
    training.depth = lambda h, batch, share: kept.update(h=h) or torch.zeros(())
    losses = training(batch, 1.0)
    assert torch.isfinite(losses["first"])
    heads = family.talker.codec_head.weight[: codes.SIZE]
    assert (kept["h"][:8] @ heads.T).argmax(1).tolist() == frames[:, 0].tolist()
    del training.depth
    likely = training.depth_logits(kept["h"][:8], torch.from_numpy(frames))
    assert torch.stack([logits.argmax(1) for logits in likely], 1).tolist() == frames[:, 1:].tolist()


class Faithful:
    """A random source that corrupts nothing."""

    def random(self, shape: int | tuple[int, ...]) -> np.ndarray:
        return np.ones(shape)

    def integers(self, low: int, high: int, size: int) -> np.ndarray:
        return np.zeros(size, np.int64)


@pytest.mark.parametrize("name", ["decoder", "talker"])
def test_a_run_continues_where_it_stopped(work: Path, tmp_path: Path, name: str) -> None:
    """Four steps at once, and two plus two, end with the same weights."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    shutil.copytree(work, twice)
    shutil.copytree(work, once, ignore=shutil.ignore_patterns("job_*"))
    main([name, str(once), "--quick", "--steps", "4"])
    main([name, str(twice), "--quick", "--steps", "4"])
    first, second = (torch.load(path / f"job_{name}" / "job.pt")["average"] for path in (once, twice))
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], atol=0, rtol=0)


@pytest.mark.parametrize("name", ["decoder", "talker"])
def test_an_annealed_run_is_a_copy_that_ends(work: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(work, copy)
    main([name, str(copy), "--quick", "--anneal", "3"])
    assert torch.load(copy / f"job_{name}_annealed" / "job.pt")["step"] == 5
    assert torch.load(copy / f"job_{name}" / "job.pt")["step"] == 2


def test_the_learning_rate_falls_to_nearly_nothing() -> None:
    schedule = Schedule(peak=1.0, warmup=10, end=100, anneal=50)
    assert [round(schedule.rate(step), 2) for step in (0, 9, 49, 75, 99)] == [0.1, 1.0, 1.0, 0.5, 0.02]
    assert schedule.goes_on(99) and not schedule.goes_on(100)


def test_training_reduces_the_loss_of_the_decoder(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work, tmp_path / "more")
    main(["decoder", str(tmp_path / "more"), "--quick", "--steps", "30"])
    losses = [line["loss"] for line in read(tmp_path / "more", "decoder")]
    assert losses[-1] < 0.9 * losses[0]


def test_training_reduces_the_losses_of_the_talker(work: Path, tmp_path: Path) -> None:
    shutil.copytree(work, tmp_path / "more")
    main(["talker", str(tmp_path / "more"), "--quick", "--steps", "80"])
    first, *_, last = read(tmp_path / "more", "talker")
    for name in ("first", "depth", "look", "phone"):
        assert last[name] < first[name], name


def test_codes_describe_the_sound_of_a_frame(work: Path) -> None:
    frames = corpus.Frames.load(work / "train")
    codebooks = codes.Codebooks.load(work / "codebooks.pt")
    found = np.load(work / "train" / "codes.npy")
    mel, cycles, _ = codebooks.decode(found)
    np.testing.assert_array_equal(cycles, frames.cycles)
    assert np.square(mel - frames.mel).mean() < 0.05 * frames.mel.var()


def test_the_vocoder_reproduces_the_features(work: Path) -> None:
    frames = corpus.Frames.load(work / "held_out")
    mel = frames.mel.astype(np.float32)
    spoken = vocoder.speak(mel, frames.cycles, frames.voicing)
    heard = features.log_mel(spoken).reshape(mel.shape)
    assert np.abs(heard - mel).mean() < 0.35
    assert np.abs(mel - mel.mean()).mean() > 0.7  # the distance of silence


def test_equal_frames_have_equal_samples() -> None:
    """A frame has a whole number of cycles, so each begins in the same phase."""
    cycles = np.array([14, 14, 14, 17, 14, 14])
    mel = np.full((6, features.HOPS, features.BANDS), 1.0, np.float32)
    spoken = vocoder.excitation(cycles, np.ones(mel.shape[:2])).reshape(6, -1)
    np.testing.assert_allclose(spoken[1], spoken[2], atol=1e-9)
    np.testing.assert_allclose(spoken[1], spoken[5], atol=1e-9)
    assert np.abs(spoken[1] - spoken[3]).max() > 0.1


def test_features_depend_only_on_the_frame_and_its_past() -> None:
    samples = np.random.default_rng(0).normal(size=4 * features.FRAME).astype(np.float32)
    later = samples.copy()
    later[2 * features.FRAME :] = 0
    mel, other = (features.analyse(x).mel for x in (samples, later))
    np.testing.assert_array_equal(mel[:2], other[:2])
    assert np.abs(mel[2] - other[2]).max() > 1


def test_pitch_of_a_hum() -> None:
    samples, _, _ = hum(["aaaa"])
    found = features.analyse(features.resample(samples.astype(np.float32) / 32768, RATE_HZ))
    middle = found.pitch_hz.reshape(-1)[20:40]
    assert np.abs(middle - SOUNDS["a"]).max() < 4
    assert found.voicing.reshape(-1)[20:40].min() == 1


def test_letters_are_aligned_with_their_phones(work: Path) -> None:
    """`m`, `n` and `a` make the phones of their names; spaces make none."""
    shelf = Shelf(work / "train")
    aligner = Aligner(shelf.utterances)
    for utterance in shelf.utterances[:5]:
        text, phones = aligner.read(utterance)
        owner = aligner.path(text, phones)
        letters = [chr(text[i]) for i in owner]
        assert letters == list(utterance.phones[1:])
        assert (np.diff(owner) > 0).all()


def test_the_training_data_has_the_text_at_the_given_position(work: Path) -> None:
    data = utterances(work, work / "texts")
    config = describe(work / "texts")[0]
    shelf = Shelf(work / "train")
    for u, utterance in enumerate(shelf.utterances[:5]):
        prompt, start = data.prompts[u], data.text_starts[u]
        text = bytes(prompt[start : start + len(utterance.text), 0].tolist()).decode()
        assert text == utterance.text
        assert prompt[start + len(utterance.text), 0] == config.tts_eos
        assert tuple(prompt[-1]) == (config.tts_pad, config.control.bos)
        assert len(data.spoken[u]) == len(data.phones[u]) == len(data.codes[u])


def test_sentences_follow_from_the_seed(tmp_path: Path) -> None:
    rare = generator.Lexicon(["flannel", "gazebo", "turnip"], [], [])
    lexicon = generator.Lexicon(rare.dictionary, ["alpha", "beta"], [-1.0, -9.0])
    some = generator.generate(300, lexicon, 4)
    assert some == generator.generate(300, lexicon, 4) != generator.generate(300, lexicon, 5)
    assert some != generator.generate(300, rare, 4)
    assert all(text.isascii() and "{" not in text for text in some)
    phrases = set(generator.LINES["phrases"])
    assert not set(some[:100]) & set(generator.generate(300, lexicon, 4, frozenset(some[:100]))) - phrases
    said = " ".join(some).lower()
    assert said.count("alpha") > 20 * said.count("beta") > 0
    lexicon.save(tmp_path / "lexicon.txt")
    assert generator.generate(300, generator.Lexicon.load(tmp_path / "lexicon.txt"), 4) == some


def test_the_development_sentences_are_not_held_out() -> None:
    assert not set(generator.LINES["held_out"]) & set(generator.LINES["development"])


@pytest.mark.parametrize(
    ("said", "heard", "rate"),
    [
        ("One two, three.", "one two three", 0),
        ("one two three four", "one too three", 0.5),
        ("a b", "a c b", 0.5),
    ],
)
def test_word_error_rate(said: str, heard: str, rate: float) -> None:
    assert judge.word_error_rate([said], [heard]) == rate


def test_the_full_voice_is_small_enough(tmp_path: Path) -> None:
    from train_a_voice.settings import FULL
    from zoo.qwen3_tts import survey

    checkpoint.write_texts(tmp_path, FULL)
    _, parameters = survey(tmp_path)
    assert 2 * parameters < 16e6


def test_an_unknown_step_lists_the_possible_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sing", "nowhere"])
    message = capsys.readouterr().err
    assert all(step in message for step in STEPS)


@pytest.mark.skipif(shutil.which("flite") is None, reason="flite is not installed")
def test_flite_returns_samples_and_the_ends_of_phones(tmp_path: Path) -> None:
    samples, utterance = speak("Hello world.")
    assert len(samples) == utterance.num_samples > RATE_HZ // 2
    assert [phone for phone in utterance.phones if phone != "pau"] == [
        "hh",
        "ax",
        "l",
        "ow",
        "w",
        "er",
        "l",
        "d",
    ]
    assert utterance.ends_s[0] == pytest.approx(0.06, abs=1e-3)


@pytest.mark.skipif(
    shutil.which("flite") is None or not (library.SYSTEM / library.OBJECTS[-1]).exists(),
    reason="the program flite and its library are not both installed",
)
def test_the_library_of_flite_speaks_like_its_program() -> None:
    """They agree except for flite's noise, which differs in every speech of a process."""
    flite = library.Flite()
    for text in ("Hello world.", "One, two, and three. Why did the baker smile?"):
        samples, utterance = flite.speak(text)
        expected, told = speak(text)
        assert utterance == told
        mel, expected_mel = (
            features.log_mel(features.pad_to_frames(x.astype(np.float32) / 32768))
            for x in (samples, expected)
        )
        assert np.abs(mel - expected_mel).mean() < np.abs(np.diff(expected_mel, axis=0)).mean() / 2


def test_a_directory_without_flite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="flite's libraries are not in"):
        library.Flite(tmp_path)


@pytest.mark.skipif(shutil.which("flite") is None, reason="flite is not installed")
def test_the_recogniser_understands_flite() -> None:
    pytest.importorskip("pocketsphinx")
    samples, _ = speak("My brother wants to travel around the world next year.")
    heard = judge.transcribe(samples / 32768, RATE_HZ)
    assert judge.word_error_rate(["my brother wants to travel around the world next year"], [heard]) < 0.3


@pytest.mark.skipif(shutil.which("flite") is None, reason="flite is not installed")
def test_all_steps_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pocketsphinx")
    main(["all", str(tmp_path), "--quick", "--steps", "2", "--count", "1"])
    assert "word error rates: copy synthesis" in capsys.readouterr().out
