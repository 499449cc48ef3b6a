"""Our forced alignment against torchaudio's (recorded), and against all paths of tiny inputs."""

from itertools import groupby, product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from zoo.align.viterbi import forced_align, min_frames

FIXTURES = load_file(Path(__file__).parents[2] / "parity" / "align" / "forced_align.safetensors")
CASES = sorted({name.partition(".")[0] for name in FIXTURES})


def labels(path, targets, blank):
    """Return the label of each frame of a path of states."""
    return [targets[state // 2] if state % 2 else blank for state in path]


@pytest.mark.parametrize("case", CASES)
def test_paths_are_those_of_torchaudio(case):
    given = {name.partition(".")[2]: value for name, value in FIXTURES.items() if name.startswith(f"{case}.")}
    targets, blank = given["targets"].tolist(), int(given["blank"])
    path = forced_align(given["log_probs"], targets, blank)
    assert labels(path, targets, blank) == given["path"].tolist()
    found = given["log_probs"][np.arange(len(path)), given["path"]]
    assert np.array_equal(found, given["scores"])


def test_the_cases_are_many():
    assert len(CASES) >= 12
    assert min(len(FIXTURES[f"{case}.path"]) for case in CASES) == 1
    assert max(len(FIXTURES[f"{case}.path"]) for case in CASES) >= 400


def spelled(frames, blank):
    return [label for label, _ in groupby(frames) if label != blank]


@pytest.mark.parametrize("seed", range(30))
def test_no_path_is_better(seed):
    random = np.random.default_rng(seed)
    num_labels, num_frames, blank = 3, 5, seed % 3
    log_probs = np.log(random.dirichlet(np.ones(num_labels), num_frames)).astype(np.float32)
    letters = [label for label in range(num_labels) if label != blank]
    targets = random.choice(letters, random.integers(1, 4)).tolist()
    paths = list(product(range(num_labels), repeat=num_frames))

    def score(frames):
        return sum(float(log_probs[t, label]) for t, label in enumerate(frames))

    best = max((score(frames), frames) for frames in paths if spelled(frames, blank) == targets)[1]
    assert labels(forced_align(log_probs, targets, blank), targets, blank) == list(best)

    starts = [targets[:count] for count in range(len(targets) + 1)]
    best = max((score(frames), frames) for frames in paths if spelled(frames, blank) in starts)[1]
    assert labels(forced_align(log_probs, targets, blank, is_open=True), targets, blank) == list(best)


def test_too_few_frames_are_refused():
    log_probs = np.zeros((3, 4), np.float32)
    assert min_frames([1, 1, 2]) == 4
    with pytest.raises(ValueError, match="3 frames cannot hold 3 targets"):
        forced_align(log_probs, [1, 1, 2])
    assert len(forced_align(log_probs, [1, 1, 2], is_open=True)) == 3
