"""Bagpiper: loading of both layouts, prompts, phases, the delay's ends, windows of the codec, and what is missing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from models import directory, family
from mutations import OTHERS, REMOVED
from safetensors.torch import load_file, save_file

import zoo
from zoo.bagpiper import demo
from zoo.bagpiper.codec import Decoder
from zoo.bagpiper.config import BACKBONE, CODEC, INFERENCE, JSON, Config
from zoo.bagpiper.model import Bagpiper
from zoo.bagpiper.phases import IN_AUDIO, IN_ROLE, IN_TEXT, IN_TURN
from zoo.contract import NEVER
from zoo.nn import dac
from zoo.request import AudioClip, Reference, Request, RequestError, Turn

CLIP = AudioClip(np.sin(np.arange(16000) ** 1.5 / 30).astype(np.float32) / 4, 16000)
SILENT = AudioClip(np.zeros(16000, np.float32), 16000)
ASKED = Request(text="Say hello! in a warm voice.", temperature=0.0, max_frames=12)


@pytest.fixture
def copy(tmp_path):
    """A checkpoint that a test may change."""
    return shutil.copytree(directory("bagpiper", "tiny"), tmp_path / "model")


def model(size="tiny") -> Bagpiper:
    loaded = family("bagpiper", size=size)
    assert isinstance(loaded, Bagpiper)
    return loaded


def changed(path, change):
    """Change the tensors of the pickle."""
    tensors = torch.load(path / "model.pt", weights_only=True)
    change(tensors["module"])
    torch.save(tensors, path / "model.pt")


def change_yaml(path, change):
    values = yaml.safe_load(path.read_text())
    change(values)
    path.write_text(yaml.safe_dump(values, sort_keys=False))


# loading


def test_only_a_speech_lm_with_text_and_audio_is_claimed(copy):
    claims = zoo.families()["bagpiper"].claims
    assert claims(copy) and claims(directory("bagpiper", "tiny_converted")) and not claims(copy / BACKBONE)
    change_yaml(copy / demo.YAML, lambda values: values.update(job_type="asr"))
    assert not claims(copy)


def test_the_native_and_the_converted_layout_load_to_the_same_tensors():
    native, converted = (model(size).state_dict() for size in ("tiny", "tiny_converted"))
    assert native.keys() == converted.keys()
    assert all(torch.equal(value, converted[name]) for name, value in native.items())
    words = [model(size).writer(ASKED).rows.tolist() for size in ("tiny", "tiny_converted")]
    assert words[0] == words[1]


def test_the_base_checkpoint_and_a_pickle_without_a_wrapper_are_read(copy):
    (copy / "model.pt").rename(copy / "base.pt")
    tensors = torch.load(copy / "base.pt", weights_only=True)["module"]
    torch.save(tensors, copy / "base.pt")
    zoo.load(copy, "cpu")
    shutil.copy(copy / "base.pt", copy / "other.pt")
    with pytest.raises(ValueError, match=r"several checkpoints \(base\.pt, other\.pt\)"):
        zoo.load(copy, "cpu")


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "stream_emb.weight", f"{CODEC}.fc2.bias", "adaptor.continuous_audio.bias"]
)
def test_a_missing_tensor_is_named(copy, name):
    changed(copy, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"missing {name}"):
        zoo.load(copy, "cpu")


def test_an_unknown_tensor_is_refused(copy):
    changed(copy, lambda tensors: tensors.update({f"{CODEC}.fc3.bias": torch.zeros(2)}))
    with pytest.raises(ValueError, match=rf"unknown {CODEC}\.fc3\.bias"):
        zoo.load(copy, "cpu")


def test_a_head_of_another_vocabulary_is_refused(copy):
    changed(copy, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 64)}))
    with pytest.raises(ValueError, match=r"lm_head.weight \[\d+, 64\]"):
        zoo.load(copy, "cpu")


def test_a_damaged_shard_is_named(tmp_path):
    copy = shutil.copytree(directory("bagpiper", "tiny_converted"), tmp_path / "model")
    file = copy / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(ValueError, match="which lacks it"):
        zoo.load(copy, "cpu")


def test_sizes_follow_from_the_tensors_and_without_weights_from_the_published_ones(copy):
    config = Config.of(copy)
    assert config == demo.config_of(demo.CONFIGS["tiny"])
    (copy / "model.pt").unlink()
    (copy / BACKBONE / JSON).unlink()
    (copy / INFERENCE).unlink()
    assert Config.of(copy) == demo.config_of(demo.CONFIGS["full"])
    assert zoo.inspect(copy)["parameters"] > 8e9


def test_a_missing_tokenizer_is_named(copy):
    (copy / BACKBONE / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"put tokenizer\.json of Qwen/Qwen3-8B-Base into"):
        zoo.load(copy, "cpu")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("codec_choice", "ESPnet", "only 'Xcodec' is known"),
        ("ssl_choice", "ESPnet", "only None is known"),
        ("delay_interleave", False, "only True is known"),
    ],
)
def test_another_codec_is_refused_by_name(copy, key, value, message):
    change_yaml(
        copy / demo.YAML, lambda values: values["multimodal_io"]["discrete_audio"].update({key: value})
    )
    with pytest.raises(ValueError, match=message):
        zoo.load(copy, "cpu")


def test_ids_follow_the_order_of_the_yaml(copy):
    """A file that was saved with sorted keys would move every id."""
    change_yaml(copy / demo.YAML, lambda v: v.update(multimodal_io=dict(sorted(v["multimodal_io"].items()))))
    with pytest.raises(ValueError, match="text and then discrete_audio are possible"):
        zoo.load(copy, "cpu")


@pytest.mark.slow
def test_every_change_of_the_yaml_files_is_read_or_refused_in_one_line(copy):
    def leaves(values, at=()):
        for key, value in values.items():
            yield (*at, key)
            if isinstance(value, dict):
                yield from leaves(value, (*at, key))

    for file in (demo.YAML, INFERENCE):
        whole = (copy / file).read_text()
        for at in leaves(yaml.safe_load(whole)):
            for value in OTHERS:
                values = yaml.safe_load(whole)
                block = values
                for key in at[:-1]:
                    block = block[key]
                if value is REMOVED:
                    del block[at[-1]]
                else:
                    block[at[-1]] = value
                (copy / file).write_text(yaml.safe_dump(values, sort_keys=False))
                try:
                    if zoo.families()["bagpiper"].claims(copy):
                        Config.of(copy)
                except ValueError as error:
                    assert "\n" not in str(error), (at, value, error)
        (copy / file).write_text(whole)


# prompts


def test_messages_end_with_eot_if_the_same_role_goes_on():
    writer = model().writer
    asked = Request(text="What is heard?", turns=(Turn("system", "Be brief."), Turn("user", clip=CLIP)))
    script = writer(asked)
    ids = script.rows[:, 0].tolist()
    [(at, heard)] = script.heard
    assert ids[:3] == [1, 4, 7] and ids[at - 3 : at] == [2, 5, 8]
    assert ids[at + len(heard) : at + len(heard) + 3] == [3, 5, 7] and ids[-3:] == [2, 6, 7]
    assert len(script.keys) == len(ids) and script.num_heard == len(heard) == 13
    assert len(set(script.keys[at : at + 13])) == 13
    usage = model().prompt(replace(asked, output="text")).usage
    assert usage["input_tokens"] == script.num_words + 13 and usage["input_audio_tokens"] == 13


def test_the_first_word_of_the_vocabulary_is_a_pad_in_a_prompt_and_a_word_in_an_answer():
    tokenize = model().writer.tokenize
    assert tokenize("!") == [0] and tokenize.bytes_of(0) == b"!"
    assert 0 not in tokenize("?") and min(tokenize("?")) >= 256


def test_special_tokens_in_a_text_are_only_text():
    tokenize = model().writer.tokenize
    text = "<|im_start|> <|audio|> <think>"
    assert b"".join(tokenize.bytes_of(id - 256) for id in tokenize(text)) == text.encode()


def test_hidden_tokens_of_an_answer_are_skipped_and_others_are_written():
    for size in ("tiny", "tiny_converted"):
        tokenize = model(size).writer.tokenize
        first = demo.CONFIGS[size].words - len(demo.ADDED)
        assert [tokenize.bytes_of(first + i) for i in range(2)] == [b"", b""]
        assert tokenize.bytes_of(first + 2) == b"<think>"
        assert tokenize.bytes_of(demo.CONFIGS[size].rows - 1) == b""


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"turns": (Turn("assistant", "Hello."),)}, "turns", "knows no earlier answers"),
        ({"turns": (Turn("assistant", "Hello."),) * 20}, "turns", "assistant and 13 more; possible: at most"),
        ({"turns": (Turn("user", "a"), Turn("system", "b"))}, "turns", "at most one system turn"),
        (
            {"text": "", "output": "text", "turns": (Turn("user", clip=SILENT),)},
            "turns",
            "the clip is silent",
        ),
        ({"references": (Reference(CLIP, "Hm."),)}, "references", "describe the voice in the text"),
        ({"instructions": "slowly"}, "instructions", "say in the text itself"),
        ({"voice": "alloy"}, "voice", "describe the voice"),
        ({"output": "transcript"}, "output", "possible: speech, text"),
        ({"options": {"guidance": 0.5}}, "guidance", "from 1 to 20"),
        ({"options": {"max_tokens": 10_000}}, "max_tokens", "from 1 to 24"),
        ({"text": "word " * 900}, "text", "leaves room for 0 frames|reads 1024 positions"),
    ],
)
def test_what_the_model_does_not_take_is_refused_with_a_reason(fields, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        model().prompt(replace(ASKED, **fields))
    assert caught.value.param == param


def test_a_checkpoint_without_an_audio_encoder_says_so():
    with pytest.raises(RequestError, match="no audio encoder"):
        model("tiny_mute").prompt(Request(text="", turns=(Turn("user", clip=CLIP),), output="text"))


def test_temperature_and_top_k_are_those_of_both_phases():
    default = model().prompt(Request(text="a")).slot
    assert (default["text_temperature"], default["audio_temperature"]) == (0.6, 0.8)
    assert default["text_top_k"] == default["audio_top_k"] == 20 and default["guidance"] == 3
    slot = model().prompt(Request(text="a", temperature=0.3, top_k=5)).slot
    assert slot["text_temperature"] == slot["audio_temperature"] == 0.3
    assert slot["text_top_k"] == slot["audio_top_k"] == 5
    only = model().prompt(Request(text="a", options={"text_temperature": 0.0})).slot
    assert (only["text_temperature"], only["audio_temperature"]) == (0.0, 0.8)


# phases


def drawn(*first: int) -> torch.Tensor:
    """One step's draw of a slot: that code in the first stream, codes 2 to 8 in the others."""
    return torch.tensor([[*first, *range(2, 9)]])


def test_the_phases_follow_each_other():
    """Text until an end, two forced rows, and codes until an end."""
    ours = model()
    state, slots = ours.state(1, 4), torch.tensor([0])
    ours.admit(state, 0, ours.prompt(replace(ASKED, max_frames=4)))
    words, end = ours.config.num_words, ours.config.codec.num_codes + 1
    seen = []
    for word, code in ((5, 1), (words + 1, 1), (7, 1), (7, 1), (7, 1), (7, 3), (7, end)):
        seen.append((int(state.phase[0]), state.row[0].tolist()))
        state.step(slots, torch.tensor([word]), drawn(code))
    first = ours.config.first_pad
    assert [phase for phase, _ in seen] == [IN_TEXT, IN_TEXT, IN_TURN, IN_ROLE, IN_AUDIO, IN_AUDIO, IN_AUDIO]
    assert [row[0] for _, row in seen[1:5]] == [256 + 5, 3, 6, 8]
    assert all(row[1:] == [0] * 7 for _, row in seen[:5])
    assert seen[5][1] == [first + 1, *(first + s * end + s + 1 for s in range(1, 8))]
    assert int(state.lane_at[0]) == 1 + 3 and state.done[0] and int(state.ready[0]) == 0


def test_each_code_lands_on_its_frame_and_seven_rows_drain():
    ours = model()
    state, slots = ours.state(1, 9), torch.tensor([0])
    ours.admit(state, 0, ours.prompt(replace(ASKED, max_frames=9)))
    state.phase[0], state.count[0] = IN_AUDIO, 0
    for step in range(10):
        state.step(slots, torch.tensor([0]), torch.full((1, 8), step + 1))
        assert int(state.ready[0]) == max(0, step + 1 - 7)
    end = ours.config.codec.num_codes + 1
    state.step(slots, torch.tensor([0]), drawn(end))
    assert state.done[0] and int(state.ready[0]) == 3
    assert state.tape[0, :3].tolist() == [[frame + s for s in range(8)] for frame in range(3)]


def test_a_pad_within_a_frame_is_read_back_and_decoded_as_code_0():
    ours = model()
    state, slots = ours.state(1, 4), torch.tensor([0])
    ours.admit(state, 0, ours.prompt(replace(ASKED, max_frames=4)))
    state.phase[0] = IN_AUDIO
    state.step(slots, torch.tensor([0]), drawn(0))
    assert int(state.row[0, 0]) == ours.config.first_pad and int(state.tape[0, 0, 0]) == 0


def test_an_answer_in_text_ends_with_its_text_and_opens_no_lane():
    ours = model()
    prompt = ours.prompt(Request(text="a", output="text"))
    assert prompt.is_text and not prompt.opens_lane and prompt.max_steps == 24
    state = ours.state(1, 1)
    ours.admit(state, 0, prompt)
    state.step(torch.tensor([0]), torch.tensor([ours.config.num_words]), drawn(1))
    assert state.done[0] and int(state.lane_at[0]) == NEVER


def test_the_pages_of_the_second_lane_are_those_of_a_real_forward():
    """All its rows are one vector, which the pad has, and not zero."""
    lane = model().second_lane(5)
    assert lane.inputs.shape == (5, 64) and len(set(lane.prefix_keys)) == 1
    pads = model().backbone.rows(torch.zeros(5, 8, dtype=torch.int64))
    assert torch.equal(lane.inputs, pads) and pads.abs().max() > 0.1


# heads and codec


def test_sliced_heads_equal_the_whole_head():
    """Each stream's scores are those of the published head, at the ids that it may draw."""
    ours = model()
    tensors = torch.load(directory("bagpiper", "tiny") / "model.pt", weights_only=True)["module"]
    h = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    vectors = tensors["stream_emb.weight"].clone()
    vectors[0] = 0
    whole = (h[:1, None] + vectors) @ tensors["lm_head.weight"].T  # [1, 8, V]
    scores = ours.backbone.scores(torch.cat((h[:1], h[1:])), torch.ones(1))
    size, first = ours.config.codec.num_codes + 1, ours.config.first_pad
    for s in range(8):
        own = whole[0, s, first + s * size : first + (s + 1) * size]
        torch.testing.assert_close(scores[0, s, :size], own, rtol=0, atol=1e-4)
    torch.testing.assert_close(scores[0, 0, size:], whole[0, 0, 2:4], rtol=0, atol=1e-4)


def test_the_published_codec_reads_ten_frames_on_both_sides():
    with torch.device("meta"):
        assert Decoder(demo.CONFIGS["full"].codec).context == 10


@pytest.mark.parametrize("rates", [(8, 5, 4, 2), (3, 7), (5,)])
@pytest.mark.parametrize("cut", [1, 4, 7, 40])
def test_windows_equal_the_whole_in_float64(rates, cut):
    random = torch.Generator().manual_seed(2)
    decoder = Decoder(replace(demo.CONFIGS["tiny"].codec, rates=rates)).double()
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random, dtype=torch.float64) * 0.3 + 0.1
    decoder.prepare()
    frames, context = 40, decoder.context
    codes = torch.randint(24, (1, frames, 8), generator=random)
    edge = torch.zeros(1, context, 8, dtype=torch.int64)
    padded, end = torch.cat((edge, codes, edge), 1), torch.tensor([frames])
    whole = decoder(padded, torch.tensor([0]), end)
    parts = [
        decoder(padded[:, at : at + min(cut, frames - at) + 2 * context], torch.tensor([at]), end)
        for at in range(0, frames, cut)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10 * float(whole.abs().max()))
    assert dac.KERNEL == 7 and whole.shape[1] == frames * int(np.prod(rates))


def test_the_demo_writes_the_files_of_both_layouts():
    native, converted = (directory("bagpiper", size) for size in ("tiny", "tiny_converted"))
    assert {path.name for path in native.iterdir()} == {"model.pt", demo.YAML, INFERENCE, BACKBONE}
    assert (converted / "model.safetensors.index.json").exists()
    vocab = json.loads((converted / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocab["!"] == 256 and vocab["<|pad|>"] == 0 and vocab["<codec_layer1_pad>"] == 256 + 480 + 25
