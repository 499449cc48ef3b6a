"""Tests of the speech that a small voice learns: parameters, features, codes, alignment, sentences, and the
recogniser that judges it. Most need neither flite nor pocketsphinx."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.train_a_voice import synthetic
from train_a_voice import codes, decoder, features, flite, judge, pack, score, track, vocoder
from train_a_voice import sentences as generator
from train_a_voice.__main__ import main
from train_a_voice.align import Aligner
from train_a_voice.lines import Lines

FLITE = pytest.mark.skipif(
    not all((flite.SYSTEM / name).exists() for name in flite.OBJECTS),
    reason="flite's libraries are not installed",
)

# --- from parameters to features ---


def test_smooth_trajectories_are_the_least_squares() -> None:
    rng = np.random.default_rng(0)
    mean, delta = rng.normal(size=(2, 9, 3))
    std, delta_std = rng.uniform(0.3, 2, (2, 9, 3))
    found = track.smooth(mean, std, delta, delta_std)
    for d in range(3):
        slopes = np.zeros((7, 9))
        slopes[np.arange(7), np.arange(7)], slopes[np.arange(7), np.arange(7) + 2] = -0.5, 0.5
        weights = 1 / np.concatenate((std[:, d], delta_std[1:-1, d]))
        equations = np.concatenate((np.eye(9), slopes)) * weights[:, None]
        right = np.concatenate((mean[:, d], delta[1:-1, d])) * weights
        expected = np.linalg.lstsq(equations, right, rcond=None)[0]
        np.testing.assert_allclose(found[:, d], expected, atol=1e-9)


def test_the_mel_bands_of_cepstra_equal_those_of_the_filter() -> None:
    """The filter is exp(sum c_m z~^-m), with the all-pass z~^-1 = (z^-1 - alpha) / (1 - alpha z^-1)."""
    cepstra = np.random.default_rng(0).normal(size=track.ORDER) * 0.5
    hertz = np.minimum(np.arange(301) * 40.0, 8_000)
    delay = np.exp(-2j * np.pi * hertz / 16_000)
    warped = (delay - 0.42) / (1 - 0.42 * delay)
    gain = np.abs(np.exp(sum(c * warped**m for m, c in enumerate(cepstra))))
    expected = np.log(gain @ features.mel_matrix())
    np.testing.assert_allclose(track.envelope(cepstra[None])[0], expected, atol=1e-6)


def test_no_band_resolves_harmonics() -> None:
    corners = features.corners_hz()
    assert np.diff(corners).min() >= features.LEAST_HZ - 1e-6
    assert corners[-1] == pytest.approx(features.TOP_HZ)
    assert (features.mel_matrix().sum(0) > 1).all()


def test_features_depend_only_on_the_frame_and_its_past() -> None:
    samples = np.random.default_rng(0).normal(size=4 * features.FRAME).astype(np.float32)
    later = samples.copy()
    later[2 * features.FRAME :] = 0
    mel, other = (features.log_mel(x).reshape(4, -1) for x in (samples, later))
    np.testing.assert_array_equal(mel[:2], other[:2])
    assert np.abs(mel[2] - other[2]).max() > 1


def test_a_hop_reads_no_parameters_behind_its_end() -> None:
    """Hop j ends with row first + 2 j + 1."""
    rows = np.random.default_rng(0).normal(size=(60, 2))
    later = rows.copy()
    later[10 + 2 * 8 :] = 9
    first, other = (track.by_hop(x, 10, 20) for x in (rows, later))
    np.testing.assert_array_equal(first[:8], other[:8])
    assert np.abs(first[8] - other[8]).max() > 0.1


def test_features_have_the_pitch_of_the_track_and_end_in_silence() -> None:
    speech = synthetic.speech("aaaa mmmm")
    found = track.analyse(speech, 0, synthetic.COLOURS)
    assert len(found.mel) == speech.utterance.num_frames
    assert (found.cycles[2:4] == 15).all()  # 187.5 Hz
    assert (found.cycles[7:9] == 12).all()  # 150 Hz
    assert found.voicing[2:8].min() == 1
    assert found.mel[-1, -1] == pytest.approx(np.log(features.FLOOR))
    assert found.voicing[-1, -1] == 0
    assert found.mel[3].mean() > 1


def test_an_infinite_pitch_changes_no_cycles() -> None:
    speech = synthetic.speech("aaaa mmmm")
    before = track.analyse(speech, 0, synthetic.COLOURS)
    speech.track[50, 0] = np.inf
    after = track.analyse(speech, 0, synthetic.COLOURS)
    np.testing.assert_array_equal(after.cycles, before.cycles)


def test_colours_are_measured() -> None:
    spoken = [[synthetic.speech(text) for text in synthetic.texts(3, seed)] for seed in (0, 1)]
    voiced, unvoiced = np.random.default_rng(0).normal(size=(2, 2, features.BANDS)) * 0.3
    waves = []
    for speaker, utterances in enumerate(spoken):
        found = [track.uncoloured(one) for one in utterances]
        waves.append(
            [m + v[:, None] * voiced[speaker] + (1 - v[:, None]) * unvoiced[speaker] for m, _, v in found]
        )
    colours = track.measure_colours(spoken, waves)
    assert np.abs(colours.voiced - voiced).max() < 0.1
    assert np.abs(colours.unvoiced - unvoiced).max() < 0.1


# --- codes ---


@pytest.fixture(scope="module")
def fitted() -> codes.Codebooks:
    spoken = synthetic.spoken(synthetic.texts(30))
    mel, voicing = (np.concatenate([getattr(x, name) for x in spoken]) for name in ("mel", "voicing"))
    return codes.Codebooks.fit(mel, voicing, 2, seed=0)


def test_codes_describe_the_sound_of_a_frame(fitted: codes.Codebooks) -> None:
    for found in synthetic.spoken(synthetic.texts(3, 5)):
        mel, cycles, voicing = fitted.decode(fitted.encode(found.mel, found.cycles, found.voicing))
        np.testing.assert_array_equal(cycles, found.cycles)
        assert np.square(mel - found.mel).mean() < 0.05 * found.mel.var()
        assert np.abs(voicing - found.voicing).mean() < 0.1


def test_each_level_leaves_less(fitted: codes.Codebooks, tmp_path: Path) -> None:
    assert (fitted.rest[:-1] >= fitted.rest[1:]).all()
    fitted.save(tmp_path / "codebooks.npz")
    again = codes.Codebooks.load(tmp_path / "codebooks.npz")
    torch.testing.assert_close(again.mel, fitted.mel, atol=0.01, rtol=1e-3)
    torch.testing.assert_close(again.shapes, fitted.shapes)


def test_the_search_keeps_the_prefixes_that_leave_least() -> None:
    seeded = torch.Generator().manual_seed(0)
    mel = torch.randn(4, codes.SIZE, 12, generator=seeded) / torch.arange(1, 5)[:, None, None]
    books = codes.Codebooks(mel, torch.zeros(codes.SHAPES, features.HOPS), torch.zeros(4))
    points = 2 * torch.randn(20, 12, generator=seeded)
    for point, found in zip(points, books.search(points), strict=True):
        first = int((mel[0] - point).square().sum(1).argmin())
        beam = [(first,)]
        for level in range(1, 4):
            longer = [(*prefix, code) for prefix in beam for code in range(codes.SIZE)]
            rest = point - mel[torch.arange(level + 1), torch.tensor(longer)].sum(1)
            beam = [longer[i] for i in rest.square().sum(1).argsort()[: codes.BEAM].tolist()]
        assert tuple(found.tolist()) == beam[0]


@pytest.mark.parametrize("speaker", [0, 1])
def test_the_vocoder_reproduces_the_features_with_the_formants_of_the_speaker(
    fitted: codes.Codebooks, speaker: int
) -> None:
    found = track.analyse(synthetic.speech("mama nam an"), speaker, synthetic.COLOURS)
    samples = decoder.target(found, fitted) / 32767
    heard = features.log_mel(samples.astype(np.float32)).reshape(found.mel.shape)
    is_loud = found.mel.mean(2) > np.log(features.FLOOR) + 3
    far = {
        formants: np.abs(heard - found.mel @ vocoder.moved(formants))[is_loud].mean()
        for formants in vocoder.FORMANTS
    }
    assert far[vocoder.FORMANTS[speaker]] < 0.35
    assert min(far, key=lambda formants: far[formants]) == vocoder.FORMANTS[speaker]


@pytest.mark.parametrize("formants", [0.9, 1.0, 1.1])
def test_a_peak_moves_with_the_formants(formants: float) -> None:
    middle = features.corners_hz()[1:-1]

    def peak(hz: float) -> np.ndarray:
        return -(((middle - hz) / 600) ** 2)

    moved = peak(2_000) @ vocoder.moved(formants)
    there = np.abs(middle - 2_000 * formants) < 500
    np.testing.assert_allclose(moved[there], -(((middle / formants - 2_000) / 600) ** 2)[there], atol=0.05)
    np.testing.assert_array_equal(vocoder.moved(1.0), np.eye(features.BANDS))


def test_equal_frames_have_equal_samples() -> None:
    """A frame has a whole number of cycles, so each begins in the same phase."""
    cycles = np.array([14, 14, 14, 7, 14, 14])
    spoken = vocoder.excitation(cycles, np.ones((6, features.HOPS))).reshape(6, -1)
    np.testing.assert_allclose(spoken[1], spoken[2], atol=1e-9)
    np.testing.assert_allclose(spoken[1], spoken[5], atol=1e-9)
    assert np.abs(spoken[1] - spoken[3]).max() > 0.1


# --- lines ---


def test_packing_loses_nothing(tmp_path: Path) -> None:
    found = synthetic.lines(40)
    found.save(tmp_path / "lines.npz")
    again = Lines.load(tmp_path / "lines.npz")
    assert again.texts == found.texts
    for name in ("speakers", "edges", "codes", "spoken", "phones"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    joined = Lines.join([found.first(11), synthetic.lines(3, 1)])
    assert joined.speakers.tolist() == [*found.speakers[:11], 0, 1, 0]
    np.testing.assert_array_equal(joined.edges[:12], found.edges[:12])


def test_letters_are_aligned_with_their_phones() -> None:
    """`m`, `n` and `a` make the phones of their names; spaces make none."""
    utterances = [synthetic.speech(text).utterance for text in synthetic.texts(30)]
    aligner = Aligner(utterances)
    for utterance in utterances[:5]:
        text, phones = aligner.read(utterance)
        owner = aligner.path(text, phones)
        assert [chr(text[i]) for i in owner] == list(utterance.phones[1:-1])
        assert (np.diff(owner) > 0).all()
        spoken, names = aligner.frames(utterance)
        assert len(spoken) == len(names) == utterance.num_frames


# --- sentences ---


@pytest.fixture(scope="module")
def lexicon() -> generator.Lexicon:
    return generator.Lexicon(["flannel", "gazebo", "turnip"], ["alpha", "beta"], [-1.0, -9.0])


def test_sentences_follow_from_the_seed(lexicon: generator.Lexicon, tmp_path: Path) -> None:
    some = generator.generate(300, lexicon, 4)
    assert some == generator.generate(300, lexicon, 4) != generator.generate(300, lexicon, 5)
    assert all(text.isascii() and "{" not in text for text in some)
    assert not any(letter.isdigit() for text in some for letter in text)
    phrases = set(generator.LINES["phrases"])
    assert not set(some[:100]) & set(generator.generate(300, lexicon, 4, frozenset(some[:100]))) - phrases
    said = " ".join(some).lower()
    assert said.count("alpha") > 20 * said.count("beta") > 0
    lexicon.save(tmp_path / "lexicon.txt")
    assert generator.generate(300, generator.Lexicon.load(tmp_path / "lexicon.txt"), 4) == some


def test_sentences_have_questions_numbers_names_and_length(lexicon: generator.Lexicon) -> None:
    some = generator.generate(2_000, lexicon, 1)
    lengths = np.array([len(text) for text in some])
    assert np.mean([text.endswith("?") for text in some]) > 0.12
    assert np.mean(lengths > 80) > 0.1
    assert lengths.max() < 2 * generator.LONGEST
    surnames = {name for text in some for name in text.split() if name in generator.WORDS["surnames"]}
    assert len(surnames) > 60
    assert any("nineteen" in text for text in some) and any("o'clock" in text for text in some)


def test_sentences_to_judge_are_apart() -> None:
    held_out, development = (generator.LINES[name] for name in ("held_out", "development"))
    assert len(held_out) == 60
    assert not set(held_out) & set(development)
    assert {kind for case in score.cases(held_out, 0) for kind in case.kinds} == set(score.KINDS)


# --- the recogniser ---


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


def test_the_table_has_a_row_for_each_speaker_and_length() -> None:
    todo = score.cases(["one two", "three four " * 5], 0)
    heard = [{"flite": case.text, "voice": "one"} for case in todo]
    rows = score.table(todo, heard).splitlines()
    assert rows[0] == "| speaker | texts | words | flite | voice |"
    assert rows[2] == "| slt | short | 2 | .000 | .500 |"
    assert [row.split()[3] for row in rows[2:6]] == ["short", "medium", "sentences", "joined"]
    assert len(rows) == 10


# --- flite ---


@FLITE
def test_flite_gives_phones_and_parameters_without_its_samples() -> None:
    speaker = flite.flite_of()
    for name in range(len(flite.SPEAKERS)):
        silent = speaker.speak("Hello world.", name)
        loud = speaker.speak("Hello world.", name, has_samples=True)
        assert silent.samples is None and loud.samples is not None
        assert silent.utterance == loud.utterance
        np.testing.assert_array_equal(silent.track, loud.track)
        assert " ".join(silent.utterance.phones) == "pau hh ax l ow w er l d pau"
        assert silent.utterance.ends_s[0] == pytest.approx(flite.LEAD_S, abs=1e-3)


@FLITE
def test_both_speakers_fit_into_the_cycles_of_a_frame() -> None:
    hertz = []
    for speaker in range(2):
        tracks = [flite.flite_of().speak(text, speaker).track for text in generator.LINES["development"][:4]]
        hertz.append(np.concatenate([rows[rows[:, 0] > 0, 0] for rows in tracks]))
    woman, man = hertz
    assert np.median(woman) > 1.5 * np.median(man)
    lowest = (vocoder.MIN_CYCLES - 0.5) * vocoder.FRAME_HZ
    highest = (vocoder.MIN_CYCLES + vocoder.NUM_CYCLES - 0.5) * vocoder.FRAME_HZ
    assert lowest < np.percentile(man, 0.5) and np.percentile(woman, 99.5) < highest


@FLITE
def test_features_of_parameters_are_those_of_the_wave() -> None:
    pytest.importorskip("soxr")
    for speaker in range(2):
        spoken = [
            flite.flite_of().speak(text, speaker, has_samples=True)
            for text in generator.LINES["development"][:6]
        ]
        waves = [track.wave_mel(one) for one in spoken]
        colours = track.measure_colours([spoken] * 2, [waves] * 2)
        found = track.analyse(spoken[0], 0, colours).mel.reshape(-1, features.BANDS)
        is_loud = waves[0] > track.LOUD
        assert np.square(found - waves[0])[is_loud].mean() ** 0.5 < 0.5 * waves[0][is_loud].std()


def test_a_directory_without_flite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="flite's libraries are not in"):
        flite.Flite(tmp_path)


@FLITE
def test_the_recogniser_understands_flite() -> None:
    pytest.importorskip("pocketsphinx")
    text = "My brother wants to travel around the world next year."
    samples = flite.flite_of().speak(text, 0, has_samples=True).samples
    assert samples is not None
    assert judge.word_error_rate([text], [judge.transcribe(samples / 32768, flite.RATE_HZ)]) < 0.3


@pytest.mark.parametrize("line", ["train {0} {0}/out", "score {0} --codes"])
def test_a_folder_that_is_not_packed_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is no packed folder; `python -m train_a_voice pack WORK` makes"):
        main(line.format(tmp_path).split())


def test_parts_of_other_sentences_are_refused_before_more_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lexicon: generator.Lexicon
) -> None:
    lexicon.save(tmp_path / "lexicon.txt")
    (tmp_path / "lines").mkdir()
    synthetic.lines(3).save(tmp_path / "lines" / "00000.npz")
    with pytest.raises(SystemExit, match=r"00000\.npz has other sentences; use another directory"):
        main(["pack", str(tmp_path), "--quick"])
    assert not (tmp_path / "pack" / "codebooks.npz").exists()


def test_a_server_without_a_speaker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx.Response(200, json={"voices": ["vivian"]})
    monkeypatch.setattr(httpx, "get", lambda *_, **__: answer)
    with pytest.raises(SystemExit, match="has no voice of slt or rms"):
        main(["score", "work", "--url", "http://127.0.0.1:9"])


def test_speakers_take_turns() -> None:
    assert pack.turns(5).tolist() == [0, 1, 0, 1, 0]
