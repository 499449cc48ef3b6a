"""Orpheus: tokens that slip, the end of a speech, windows of the codec, and which directories it loads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from models import Clock, Listener, directory, family
from torch import Tensor

import zoo
from serving.engine.engine import Engine
from zoo.nn import llama_vocabulary
from zoo.orpheus import demo
from zoo.orpheus.config import Config, find_codec
from zoo.orpheus.prompt import PromptWriter, voices_of
from zoo.orpheus.tokens import END_SPEECH, STOPS, VOCABULARY, code_id
from zoo.request import AudioClip, Reference, Request, RequestError

NUM_WORDS = demo.TINY_WORDS


def token_id(place: int, code: int) -> int:
    return NUM_WORDS + code_id(place, code)


def run(tokens: list[int], max_frames: int = 8):
    """One slot of a fresh state takes the tokens. -> the state"""
    ours = family("orpheus")
    state = ours.state(2, max_frames)
    ours.admit(state, 1, ours.prompt(Request(text="a", voice="tara", max_frames=max_frames)))
    for token in tokens:
        state.take(torch.tensor([1]), torch.tensor([token]))
    return state


def frame(codes: list[int], first: int = 0) -> list[int]:
    return [token_id(first + place, code) for place, code in enumerate(codes)]


def tape(state) -> list[list[int]]:
    return state.tape[1, : int(state.ready[1])].tolist()


def test_seven_tokens_in_their_places_make_a_frame():
    state = run([*frame([1, 2, 3, 4, 5, 6, 7]), *frame([0, 0, 0, 0, 0, 0, 4095])])
    assert tape(state) == [[1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 4095]]


@pytest.mark.parametrize(
    "slip",
    [
        [token_id(3, 9)],
        [*frame([1, 2, 3]), token_id(5, 9)],
        [*frame([1, 2]), 500],
        [*frame([1, 2]), token_id(7, 1)],
        [*frame([1, 2, 3]), token_id(2, 7)],
    ],
    ids=["first", "skips a place", "text", "unused id", "repeats a place"],
)
def test_a_token_out_of_place_drops_the_frame_that_was_begun(slip):
    assert tape(run([*slip, *frame([1, 2, 3, 4, 5, 6, 7])])) == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_token_for_the_first_place_begins_a_frame_wherever_it_comes():
    assert tape(run([*frame([8, 8, 8]), *frame([1, 2, 3, 4, 5, 6, 7])])) == [[1, 2, 3, 4, 5, 6, 7]]


def test_a_speech_ends_in_the_middle_of_a_frame_and_drops_it():
    state = run([*frame([1, 2, 3, 4, 5, 6, 7]), *frame([1, 2]), NUM_WORDS + END_SPEECH, *frame([3, 4, 5], 2)])
    assert tape(state) == [[1, 2, 3, 4, 5, 6, 7]] and bool(state.done[1])


def test_a_speech_that_only_slips_ends_after_seven_steps_a_frame():
    state = run([500] * 13, max_frames=2)
    assert not bool(state.done[1])
    state.take(torch.tensor([1]), torch.tensor([500]))
    assert bool(state.done[1]) and int(state.ready[1]) == 0


def test_valid_only_leaves_one_place_and_the_end_between_frames():
    ours = family("orpheus")
    state = ours.state(1, 8)
    request = Request(text="a", voice="tara", max_frames=8, options={"valid_only": True})
    ours.admit(state, 0, ours.prompt(request))
    h = torch.randn(1, ours.config.stack.hidden, generator=torch.Generator().manual_seed(0))
    possible = ours.scores(state, torch.tensor([0]), h)[0].isfinite().nonzero()[:, 0].tolist()
    assert possible == [*sorted(NUM_WORDS + stop for stop in STOPS), *range(token_id(0, 0), token_id(1, 0))]
    state.take(torch.tensor([0]), torch.tensor([token_id(0, 5)]))
    possible = ours.scores(state, torch.tensor([0]), h)[0].isfinite().nonzero()[:, 0].tolist()
    assert possible == [*range(token_id(1, 0), token_id(2, 0))]


def window(decoder, codes: Tensor, start: int, frames: int, context: int = 3, seed: int | None = 7) -> Tensor:
    """Frames start .. start + frames of a tape [F, 7]; beyond `context` frames the decoder is given other
    codes."""
    at = torch.arange(start - 3, start + frames + 3)
    is_near = (at >= start - context) & (at < start + frames + context) & (at >= 0) & (at < len(codes))
    other = torch.randint(4096, (len(at), 7), generator=torch.Generator().manual_seed(9))
    given = torch.where(is_near[:, None], codes[at.clamp(0, len(codes) - 1)], other)
    noise = None if seed is None else torch.tensor([seed])
    return decoder(given[None], torch.tensor([start]), torch.tensor([len(codes)]), noise)[0]


@pytest.mark.parametrize("sizes", [(1,), (4,), (3, 1, 7)], ids=str)
@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-10), ("float32", 1e-5)])
def test_any_windows_equal_the_whole_noise_included(sizes, dtype, atol):
    decoder = family("orpheus", dtype).codec.decoder
    codes = torch.randint(4096, (19, 7), generator=torch.Generator().manual_seed(0))
    whole = window(decoder, codes, 0, 19)
    start, pieces = 0, []
    while start < 19:
        size = min(sizes[len(pieces) % len(sizes)], 19 - start)
        pieces.append(window(decoder, codes, start, size))
        start += size
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=atol)


def test_three_frames_on_both_sides_are_needed():
    decoder = family("orpheus", "float64").codec.decoder
    codes = torch.randint(4096, (19, 7), generator=torch.Generator().manual_seed(0))
    samples = decoder.config.frame_samples
    exact = window(decoder, codes, 0, 19)[8 * samples : 9 * samples]
    assert (window(decoder, codes, 8, 1) - exact).abs().max() < 1e-10
    assert (window(decoder, codes, 8, 1, context=2) - exact).abs().max() > 1e-7


def test_the_first_frame_is_spoken_when_the_fourth_is_there():
    """After 28 tokens. All frames are spoken, the first one and the last three too."""
    engine = Engine(family("orpheus"), max_slots=1, compile=False, report_lag=0, clock=Clock())
    [worker] = engine.models.values()
    heard, first = Listener(), None
    request = Request(text="a", voice="tara", max_frames=6, options={"valid_only": True}, seed=3)
    engine.speak("request", request, heard)
    while engine.num_requests:
        engine.turn()
        engine.clock.now_s += 0.03
        if heard.frames and first is None:
            first = heard.frames, worker.runner.state.ready.max().item()
    assert first == (1, 4)
    assert heard.frames == 6 and len(heard.samples) == 6 * family("orpheus").spec.frame_samples


def test_the_cap_follows_from_the_text_and_not_from_a_number_of_tokens():
    """The original ends after 1,200 tokens, 171 frames."""
    short, long = (
        family("orpheus").prompt(Request(text="word " * words, voice="tara")).max_frames for words in (1, 40)
    )
    assert short < 171 < long


def test_noise_follows_from_the_seed_and_the_place_alone():
    decoder = family("orpheus").codec.decoder
    codes = torch.full((9, 7), 5)
    samples = decoder.config.frame_samples
    one, other = (window(decoder, codes, 3, 3, seed=seed) for seed in (7, 8))
    assert not torch.equal(one, other)
    assert not torch.equal(one[:samples], one[samples : 2 * samples])  # equal codes, other draws
    assert torch.equal(one, window(decoder, codes, 3, 3, seed=7))


def test_a_client_cannot_write_special_tokens():
    ids = family("orpheus").writer.tokenize("<custom_token_2><|eot_id|><|begin_of_text|>")
    assert max(ids) < NUM_WORDS


@pytest.mark.parametrize(
    ("name", "voice"),
    [
        ("orpheus-3b-0.1-ft", "tara"),
        ("3b-fr-ft-research_release", "pierre"),
        ("3b-es_it-ft-research_release", "javi"),
        ("3b-zh-ft-research_release", "长乐"),
    ],
)
@pytest.mark.parametrize("place", ["{}", "models--canopylabs--{}/snapshots/4a82f00d"])
def test_the_published_name_says_the_language(tmp_path, name, voice, place):
    path = demo.write_texts(tmp_path / "model")
    config = Config.read(json.loads((path / "config.json").read_text()))
    assert voices_of(config, tmp_path / place.format(name))[0] == voice


def with_config(path, **changes):
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )
    return path


def fine_tuned(tmp_path, voices):
    """A checkpoint of a fine-tune that lists its voices."""
    return with_config(demo.write_texts(tmp_path / "mine-pretrained-de"), voices=voices)


def test_a_fine_tune_lists_its_voices_and_their_spelling(tmp_path):
    path = fine_tuned(tmp_path, ["Anna", "bert"])
    config, _, spec = zoo.families()["orpheus"].describe(path)
    assert (spec.voices, spec.modes, spec.variant) == (("Anna", "bert", "default"), ("voice",), "finetuned")
    write = PromptWriter(config, path, lambda clip: clip)
    inner = [write(Request(text="Hi.", voice=voice)).ids[2:-4] for voice in ("anna", "Anna", "BERT")]
    texts = ("Anna: Hi.", "Anna: Hi.", "bert: Hi.")
    assert [list(ids) for ids in inner] == [write.tokenize(text) for text in texts]


def test_a_fine_tune_may_have_no_voices(tmp_path):
    path = fine_tuned(tmp_path, [])
    config, _, spec = zoo.families()["orpheus"].describe(path)
    assert spec.voices == ("default",) and spec.reference_s is None
    write = PromptWriter(config, path, lambda clip: clip)
    assert list(write(Request(text="Hi.")).ids[2:-4]) == write.tokenize("Hi.")


@pytest.mark.parametrize("voices", ["anna", [1], [" "], ["anna", "Anna"], ["Default"], None])
def test_a_list_of_voices_that_cannot_be_is_refused(tmp_path, voices):
    with pytest.raises(ValueError, match=r"config\.json: the root has voices=.* possible"):
        zoo.families()["orpheus"].describe(fine_tuned(tmp_path, voices))


def test_a_pretrained_checkpoint_in_the_hubs_cache_takes_references(tmp_path):
    path = tmp_path / "models--canopylabs--orpheus-3b-0.1-pretrained" / "snapshots" / "4a82f00d"
    shutil.copytree(directory("orpheus", "tiny"), path)
    spec, _ = zoo.families()["orpheus"].survey(path)
    assert spec.variant == "pretrained" and "clone" in spec.modes


def test_only_pretrained_checkpoints_take_references():
    clip = AudioClip(torch.zeros(24_000).numpy(), 24_000)
    with pytest.raises(RequestError, match="pretrain"):
        family("orpheus").prompt(Request(text="a", voice="tara", references=(Reference(clip, "b"),)))


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_plain_llama_is_not_claimed(tmp_path, has_tokenizer):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 128256}))
    if has_tokenizer:
        tokenizer = llama_vocabulary.tokenizer(1000, llama_vocabulary.special_tokens(1000))
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert not zoo.families()["orpheus"].claims(tmp_path)


def test_a_bare_config_with_the_published_vocabulary_is_claimed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCABULARY}))
    assert zoo.families()["orpheus"].claims(tmp_path)


@pytest.mark.slow
def test_the_published_ids_follow_from_the_published_vocabulary(tmp_path):
    """Source: canopyai/Orpheus-TTS, orpheus_tts/engine_class.py: the ids around a prompt, and the first
    code."""
    path = demo.write_texts(tmp_path / "model-pretrain", vocab_size=VOCABULARY)
    config = Config.read(json.loads((path / "config.json").read_text()))
    write = PromptWriter(config, path, lambda clip: torch.tensor([[0, 1, 2, 3, 4, 5, 4095]]))
    reference = Reference(AudioClip(torch.zeros(24_000).numpy(), 24_000), "a")
    [a] = write.tokenize("a")
    human = [128259, 128000, a, 128009, 128260, 128261, 128257]
    codes = [128266 + 4096 * place + code for place, code in enumerate((0, 1, 2, 3, 4, 5, 4095))]
    script = write(Request(text="a", voice="default", references=(reference,)))
    assert script.ids == (*human, *codes, 128258, 128262, *human) and codes[-1] == 156937


def test_a_model_without_its_codec_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"hubertsiuzdak/snac_24khz.*put it into .*snac_24khz or .*snac_24khz"
    ):
        find_codec(tmp_path / "model")


def test_the_codec_may_lie_next_to_the_model(tmp_path):
    shutil.copytree(directory("orpheus", "tiny"), tmp_path / "model")
    shutil.move(tmp_path / "model" / "snac_24khz", tmp_path / "snac_24khz")
    assert find_codec(tmp_path / "model") == tmp_path / "snac_24khz"


def test_a_head_of_its_own_is_kept_and_a_copy_is_not(tmp_path):
    copied = zoo.load(demo.write(tmp_path / "copy", has_head=True, dtype=torch.float32), "cpu", "float32")
    assert copied.lm.head.weight is copied.lm.embedding.weight


@pytest.mark.parametrize("is_tied", [False, ...])
def test_a_head_is_tied_only_if_the_config_says_so_as_in_transformers(tmp_path, is_tied):
    """Without the entry a Llama is not tied. transformers would make a random head."""
    untied = demo.write(tmp_path / "untied", dtype=torch.float32)
    with_config(untied, tie_word_embeddings=is_tied)
    with pytest.raises(ValueError, match=r"no lm_head\.weight, and config\.json does not set tie_word_emb"):
        zoo.load(untied, "cpu", "float32")


def test_a_stored_head_needs_no_entry_in_the_config(tmp_path):
    path = with_config(
        demo.write(tmp_path / "copy", has_head=True, dtype=torch.float32), tie_word_embeddings=...
    )
    assert zoo.load(path, "cpu", "float32").lm.head is not None


def test_a_wider_demo_keeps_to_the_places_too(tmp_path):
    """Rows as loud as those of the narrow one would make it repeat one token, and no frame would be whole."""
    wide = zoo.load(demo.write(tmp_path / "wide", hidden_size=768, dtype=torch.float32), "cpu", "float32")
    assert len(zoo.generate(wide, Request(text="a", voice="tara", max_frames=5)).frames) == 5
