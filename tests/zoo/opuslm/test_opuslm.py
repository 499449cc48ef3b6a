"""OpusLM: loading, voices, the delay's ends, windows of the codec, and what is missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from models import directory, family
from mutations import OTHERS, REMOVED
from safetensors.torch import save_file

import zoo
from zoo.contract import Said
from zoo.opuslm import demo, weights
from zoo.opuslm.codec import contexts
from zoo.opuslm.config import CODEC, CodecConfig, Config
from zoo.opuslm.delay import DelayState, Words, delayed
from zoo.opuslm.ids import YAML
from zoo.opuslm.model import OpusLM
from zoo.opuslm.xeus import XeusConfig
from zoo.request import Request, RequestError, Turn


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(directory("opuslm", "tiny"), tmp_path / "model")


def model(size="tiny") -> OpusLM:
    loaded = family("opuslm", size=size)
    assert isinstance(loaded, OpusLM)
    return loaded


def changed(path, change):
    """Change the tensors of a file."""
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)


# loading


def test_only_a_speech_lm_with_delayed_streams_is_claimed(copy):
    claims = zoo.families()["opuslm"].claims
    assert claims(copy) and not claims(copy / CODEC) and not claims(copy / "codec" / "exp")
    text = (copy / YAML).read_text().replace("corelm: ar_delay", "corelm: ar_multiscale")
    (copy / YAML).write_text(text)
    assert not claims(copy)


def test_the_loss_is_passed_over_and_any_other_unknown_tensor_is_refused(copy):
    changed(
        copy / "model.pth", lambda tensors: tensors.update({"criterion.aux_lm_head.weight": torch.zeros(2)})
    )
    zoo.load(copy, "cpu")
    changed(copy / "model.pth", lambda tensors: tensors.update({"corelm.aux_lm_head.weight": torch.zeros(2)}))
    with pytest.raises(ValueError, match=r"unknown corelm\.aux_lm_head\.weight \[2\]"):
        zoo.load(copy, "cpu")


@pytest.mark.parametrize("name", [weights.ESPNET.head, "corelm.head_emb.weight", "corelm.emb.weight"])
def test_a_missing_tensor_is_named(copy, name):
    changed(copy / "model.pth", lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        zoo.load(copy, "cpu")


def test_a_head_of_another_vocabulary_is_refused(copy):
    def shorten(tensors):
        tensors[weights.ESPNET.head] = tensors[weights.ESPNET.head][:-1]

    changed(copy / "model.pth", shorten)
    with pytest.raises(ValueError, match=r"model\.pth has another shape, .* of corelm\.lm_head\.weight"):
        zoo.load(copy, "cpu")


def test_a_pickle_with_code_is_not_run(copy):
    torch.save({"corelm.emb.weight": print}, copy / "model.pth")
    with pytest.raises(ValueError, match="holds more than tensors"):
        zoo.load(copy, "cpu")


def test_both_notations_of_weight_norm_load_to_the_same_codec(tmp_path):
    new = zoo.load(demo.write(tmp_path / "new", "tiny", 0, torch.float32, has_new_names=True), "cpu")
    for one, other in zip(new.codec.parameters(), model().codec.parameters(), strict=True):
        assert torch.equal(one, other)


def test_any_single_checkpoint_is_read(copy):
    (copy / "model.pth").rename(copy / "valid.total_count.ave.pth")
    zoo.load(copy, "cpu")
    shutil.copy(copy / "valid.total_count.ave.pth", copy / "2epoch.pth")
    with pytest.raises(
        ValueError, match=r"several checkpoints \(2epoch\.pth, valid\.total_count\.ave\.pth\)"
    ):
        zoo.load(copy, "cpu")


def test_a_missing_codec_or_tokenizer_is_named(copy, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (copy / "tokenizer.json").rename(copy / "backbone" / "tokenizer.json")
    zoo.load(copy, "cpu")
    (copy / "backbone" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"the text tokenizer of OpusLM is missing: put tokenizer\.json"):
        zoo.load(copy, "cpu")
    shutil.rmtree(copy / CODEC)
    with pytest.raises(ValueError, match=r"the codec of OpusLM, ftshijt/espnet_codec_dac\S+, is missing"):
        zoo.inspect(copy)


def test_a_tokenizer_of_another_model_is_refused(copy):
    text = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(text.replace('"!": 0', '"!": 1').replace('"\\"": 1', '"\\"": 0'))
    with pytest.raises(ValueError, match=r"has '!' as token 1, and config\.yaml has '\"'"):
        zoo.load(copy, "cpu")


def test_the_codec_cannot_lead_out_of_its_directory(copy):
    text = (copy / CODEC / "meta.yaml").read_text().replace("model_file: exp", "model_file: ../exp")
    (copy / CODEC / "meta.yaml").write_text(text)
    with pytest.raises(
        ValueError, match=r"codec/meta\.yaml: files has model_file=.*; a path inside the directory"
    ):
        zoo.load(copy, "cpu")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "rl", "espnet and dpo are possible"),
        ("corelm_conf", {"share_emb": True}, "only False is known"),
        (
            "transformer_conf",
            {"hf_model_tag": "EleutherAI/pythia-1b"},
            "its sizes are not known: put its config.json",
        ),
    ],
)
def test_other_recipes_are_refused_by_name(key, value, message):
    values = demo.CONFIGS["tiny"]().model
    with pytest.raises(ValueError, match=message):
        Config.read(values | {key: value}, None)


def test_every_change_of_a_config_file_is_read_or_refused_in_one_line():
    """Each value of all files, the token list and its ranges included, as another type or out of range."""
    model_yaml, body, codec_yaml, xeus_yaml = demo.CONFIGS["tiny"]()
    converted = demo.converted(Config.read(model_yaml, body))
    read = [
        (converted, Config.of_converted),
        (xeus_yaml, lambda values: XeusConfig.read(values, "xeus")),
        (model_yaml, lambda values: Config.read(values, body)),
        (codec_yaml, lambda values: CodecConfig.read(values, "codec")),
    ]
    for whole, reader in read:
        for at in places(whole):
            for value in OTHERS:
                try:
                    reader(put(whole, at, value))
                except ValueError as error:
                    assert "\n" not in str(error) and len(str(error)) < 500


def places(values, at=()):
    for key, value in values.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from places(value, (*at, key))


def put(values, at, value):
    """Return the values with another one at a place."""
    key, *rest = at
    if rest:
        return values | {key: put(values[key], rest, value)}
    return {name: old for name, old in values.items() if name != key} | (
        {} if value is REMOVED else {key: value}
    )


# voices


def test_a_voice_is_a_file_of_codes(copy):
    spoken = zoo.generate(
        model(), Request(text="Good morning.", voice="default", seed=5, max_frames=20)
    ).frames
    save_file({"codes": spoken.contiguous()}, copy / "voices" / "Bea.safetensors")
    ours = zoo.load(copy, "cpu")
    assert ours.spec.voices == ("default", "anna", "bea")
    request = Request(text="It hums.", voice="Bea", temperature=0.0, max_frames=4)
    kept = ours.writer(request).rows
    said = Said("Good morning.", spoken)
    assert torch.equal(kept, ours.writer(replace(request, voice="default"), said).rows)
    assert not torch.equal(kept, ours.writer(replace(request, voice="anna")).rows)


def test_a_short_voice_prompt_is_padded_if_the_checkpoint_says_so(copy):
    asked = Request(text="a", voice="anna")
    padded = model().writer(asked).rows
    text = (copy / YAML).read_text().replace("pad_speaker_prompt: true", "pad_speaker_prompt: false")
    (copy / YAML).write_text(text)
    rows = zoo.load(copy, "cpu").writer(asked).rows
    assert len(padded) - len(rows) == 2  # the voice has ten frames, a prompt twelve
    assert torch.equal(rows[:-2, 0], padded[: len(rows) - 2, 0])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"code": torch.zeros(3, 9, dtype=torch.int64)}, r"holds no tensor `codes` \[F, 9\]"),
        ({"codes": torch.zeros(3, 8, dtype=torch.int64)}, r"holds no tensor `codes` \[F, 9\]"),
        ({"codes": torch.zeros(3, 9)}, "codes are float32; integers are possible"),
        ({"codes": torch.full((3, 9), 16)}, "codes are out of range; 0 to 49 and 0 to 15"),
    ],
)
def test_a_wrong_voice_is_refused(copy, tensors, message):
    save_file(tensors, copy / "voices" / "bea.safetensors")
    with pytest.raises(ValueError, match=message):
        zoo.load(copy, "cpu")


def test_later_pieces_of_a_long_text_continue_the_first_voice():
    """The prompt of the second piece holds the frames of the first; a voice from a file stays."""
    ours = model()
    text = " ".join(["Once there was a small house near the river."] * 8)
    for voice, expected in (("default", "default"), ("anna", "anna")):
        passes = ours.passes(Request(text=text, voice=voice, max_frames=400))
        next(passes)
        frames = torch.arange(14)[:, None].expand(-1, 9).clone()
        second = passes.send(frames)
        said = Said("", frames) if expected == "default" else None
        alone = ours.writer(Request(text=second.text, voice=expected), said).rows
        assert torch.equal(ours.backbone.rows(alone), second.inputs)


def test_dialogues_and_languages_are_refused_with_a_reason():
    for request, reason in (
        (Request(text="", turns=(Turn("user", "a"),)), "text is empty"),
        (Request(text="a", voice="default", turns=(Turn("user", "a"),)), "takes no turns"),
        (Request(text="a", voice="default", language="fr"), "the model was trained on English"),
        (
            Request(text="a", voice="default", output="image"),
            "possible: speech, text, continuation, transcript",
        ),
    ):
        with pytest.raises(RequestError, match=reason):
            model().prompt(request)


def test_special_tokens_in_a_text_are_only_text():
    ours = model()
    ids = ours.writer(Request(text="<|endoftext|> <sos/eos>", voice="default")).rows[:, 0]
    assert (ids == ours.config.vocabulary.end).sum() == 1
    assert ids.max() < ours.config.vocabulary.first_word + len(ours.config.vocabulary.words) - 1


# the delay


def test_streams_are_delayed_over_the_whole_prompt():
    rows = torch.arange(1, 12)[:, None] + 100 * torch.arange(9)
    moved = delayed(rows)
    for s in range(9):
        assert moved[:s, s].eq(0).all() and torch.equal(moved[s:, s], rows[: 11 - s, s])


def state(limit):
    held = DelayState(model().spec, 1, 40, torch.float32, torch.device("cpu"))
    held.done[0], held.limit[0], held.end[0] = False, limit, limit
    return held


def rows_of(limit, ended_at):
    """Return the rows that are fed back, and the state behind the end, when the model draws an end once."""
    held, slots, rows = state(limit), torch.tensor([0]), []
    while not held.done[0]:
        step = int(held.steps[0])
        drawn = torch.full((1, 9), 1000 + step)
        drawn[0, 0] = 5 if step == ended_at else drawn[0, 0]
        held.step(slots, drawn, torch.full((1, 9), step), torch.tensor([7]), Words(5, 10, 34))
        rows.append(held.row[0].tolist())
    return rows, held


def test_the_step_behind_an_end_still_draws():
    rows, held = rows_of(30, 6)
    assert len(rows) == 14 and int(held.ready[0]) == 6
    assert rows[0] == [1000] + [0] * 8
    assert rows[6][0] == 5 and rows[7] == [1007] * 8 + [0]
    assert rows[8] == [0, 0] + [1008] * 7 and rows[13] == [0] * 7 + [1013] * 2
    frames = held.tape[0, :6]
    assert torch.equal(frames, torch.arange(6)[:, None] + torch.arange(9))


def test_no_speech_ends_before_its_third_frame():
    ours = model()
    louder = ours.backbone.offset.clone()
    louder[ours.config.vocabulary.num_clusters] = 1e4  # the end
    with mock.patch.dict(ours.backbone._buffers, {"offset": louder}):
        for limit, expected in ((9, 3), (2, 2)):
            asked = Request(text="a", voice="default", temperature=0.0, max_frames=limit)
            assert len(zoo.generate(ours, asked).frames) == expected


def test_at_the_limit_the_end_is_put_one_step_behind_the_last_frame():
    rows, held = rows_of(4, None)
    assert len(rows) == 12 and int(held.ready[0]) == 4
    assert rows[4][0] == 1004 and rows[5][0] == 5 and rows[6][:3] == [0, 0, 1006]


def test_an_end_at_the_limit_is_not_put_again():
    rows, _ = rows_of(4, 4)
    assert rows[4][0] == 5 and rows[5][0] == 1005 and rows[6][:3] == [0, 0, 1006]


# the codec


def test_the_published_codec_needs_four_frames_and_three_before_the_lstm():
    config = CodecConfig.read(demo.PUBLISHED_CODEC, "codec")
    assert contexts(config) == (4, 7)
    assert contexts(replace(config, kernel=1, unit_kernel=1, last_kernel=1)) == (1, 1)


@pytest.mark.parametrize("cut", [(1,) * 30, (4, 16, 10), (7, 1, 22), (29, 1), (3, 27)])
def test_windows_equal_the_whole_in_float64(cut):
    """Also with a larger kernel, other rates, and one unit."""
    for changes in ({}, {"rates": (3, 2), "residuals": 1, "kernel": 9, "dilation": 3}):
        decoder = decoder_of(changes)
        codes = torch.randint(16, (1, 30, 8), generator=torch.Generator().manual_seed(1))
        whole, _ = decode(decoder, codes, 0, 30, None)
        assert 0.05 < whole.abs().max() < 20  # where 1e-12 is strict
        pieces, at, state = [], 0, None
        for count in cut:
            samples, state = decode(decoder, codes, at, count, state)
            pieces.append(samples)
            at += count
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=1e-12)


def decoder_of(changes):
    from zoo.opuslm.codec import Decoder

    config = replace(CodecConfig.read(demo.CONFIGS["tiny"]()[2], "codec"), **changes)
    torch.manual_seed(0)
    decoder = Decoder(config).double()
    for name, parameter in decoder.named_parameters():
        if name.endswith("alpha"):
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
            continue
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 25
        torch.nn.init.normal_(parameter, 0, 0.7 * fan_in**-0.5)
    return decoder


@torch.inference_mode()
def decode(decoder, codes, start, count, state):
    """Decode frames start .. start + count of a speech, padded by two frames, with the tape as far as needed."""
    frames, context = count + 2, decoder.context
    end = min(codes.shape[1], start + count + context)
    at = torch.arange(start - context, start + frames + context).clamp(0, codes.shape[1] - 1)
    window = codes[:, at].clone()
    window[:, torch.arange(start - context, start + frames + context) >= end] = 3  # nothing may read it
    state = torch.zeros(1, *decoder.state_shape, dtype=torch.float64) if state is None else state
    one = torch.ones(1, dtype=torch.int64)
    samples, state = decoder(window, start * one, count * one, end * one, state)
    return samples[0, : count * decoder.config.frame_samples], state
