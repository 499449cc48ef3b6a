"""A CTC model as an aligner, with tiny random weights."""

import json

import numpy as np
import pytest
import torch
from tiny_aligner import write
from transformers import AutoModelForCTC, Wav2Vec2FeatureExtractor

from zoo.align.ctc import Segment, load
from zoo.align.files import check

KINDS = [("wav2vec2", "layer"), ("wav2vec2", "group"), ("hubert", "layer"), ("hubert", "group")]


def clip(num_samples, seed=0):
    return np.random.default_rng(seed).normal(0, 0.1, num_samples).astype(np.float32)


@pytest.fixture(scope="module")
def aligner(tmp_path_factory):
    return load(write(tmp_path_factory.mktemp("aligner")))


@pytest.mark.parametrize(("kind", "norm"), KINDS)
@pytest.mark.parametrize("do_normalize", [True, False])
def test_emissions_are_those_of_transformers(tmp_path, kind, norm, do_normalize):
    aligner = load(write(tmp_path, kind, norm, do_normalize))
    samples = clip(9000)
    extract = Wav2Vec2FeatureExtractor(do_normalize=do_normalize)
    inputs = extract(samples, sampling_rate=16000, return_tensors="pt").input_values
    with torch.inference_mode():
        theirs = AutoModelForCTC.from_pretrained(tmp_path).eval()(inputs).logits[0].log_softmax(-1).numpy()
    [ours] = aligner.emissions([aligner.prepared(Segment(samples, 16000, ""))])
    assert ours.shape == theirs.shape and np.abs(ours - theirs).max() < 1e-5


@pytest.mark.parametrize(("kind", "norm"), KINDS)
def test_emissions_do_not_depend_on_the_batch(tmp_path, kind, norm):
    aligner = load(write(tmp_path, kind, norm))
    clips = [clip(num, num) for num in (9000, 5000, 12000, 300, 5000)]
    together, alone = aligner.emissions(clips), [aligner.emissions([one])[0] for one in clips]
    assert len(together[3]) == 0  # too short for a frame
    for one, other in zip(together, alone, strict=True):
        assert one.shape == other.shape and np.abs(one - other).max(initial=0) < 1e-5


def test_similar_lengths_share_a_launch_within_the_limit(aligner):
    clips = [np.zeros(num, np.float32) for num in (16000 * 50, 8000, 16000 * 50, 16000 * 60)]
    assert list(aligner._batches(clips)) == [[1, 0], [2, 3]]


def test_times_are_samples_of_the_segment_s_own_rate(aligner):
    samples = (clip(24000, 1) * 20000).astype(np.int16)
    [words] = aligner.align([Segment(samples, 24000, "The old man, 2 of them.")])
    assert [word.text for word in words] == ["The", "old", "man,", "2", "of", "them."]
    assert [word.is_aligned for word in words] == [True, True, True, False, True, True]
    bounds = [at for word in words for at in (word.start, word.stop)]
    assert bounds == sorted(bounds) and bounds[0] >= 0 and bounds[-1] <= 24000
    assert aligner.align([Segment(samples[:0], 24000, "Nothing.")])[0][0].stop == 0


def damaged(directory, name, **changes):
    path = directory / name
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **changes}))


def test_a_directory_that_is_no_aligner_is_refused_with_what_is_possible(tmp_path):
    with pytest.raises(ValueError, match="is not a directory; an aligner is a directory of transformers'"):
        check(tmp_path / "none")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        check(tmp_path)
    write(tmp_path)
    damaged(tmp_path, "config.json", architectures=["BertModel"])
    with pytest.raises(ValueError, match="its architecture is 'BertModel'"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("vocab.json", '{"eng": {"a": 1}}', "a vocabulary for each language"),
        ("vocab.json", '{"A": 999}', "beyond the model's 32 columns"),
        ("vocab.json", '{"<pad>": 0, "oo": 1}', "no single letters"),
        ("vocab.json", "[", "is not JSON"),
        ("vocab.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"tokenizer_class": "Wav2Vec2PhonemeCTCTokenizer"}', "writes phonemes"),
        ("preprocessor_config.json", '{"sampling_rate": 0}', "its sampling_rate is 0"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, name, content, says):
    write(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=says):
        check(tmp_path)


def test_weights_that_are_missing_or_of_another_model_are_refused(tmp_path):
    write(tmp_path)
    damaged(tmp_path, "config.json", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks \d+ tensors of its model: "):
        load(tmp_path)
    damaged(tmp_path, "config.json", num_hidden_layers=2, vocab_size=40)
    with pytest.raises(ValueError, match=r"cannot be loaded|has another shape"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights; it needs one of"):
        check(tmp_path)


def test_a_device_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="aligner device 'tpu' is not available"):
        load(write(tmp_path), "tpu")
