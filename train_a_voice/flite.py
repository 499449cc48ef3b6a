"""Speech by flite (CMU, http://cmuflite.org; Debian's package `flite`), voice cmu_us_slt at 16 kHz: text to
samples and phones.

A shelf is a directory of speech. `speech.s16` holds the samples of all texts, concatenated, and `index.jsonl`
has a line for each text. Both only grow, so filling a shelf can stop and continue.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

RATE_HZ = 16_000
VOICE = "slt"
LEAD_S, TAIL_S = 0.06, 0.12  # silence that is kept; flite adds about 0.2 s on either side
PAUSE = "pau"
_PHONES = "aa ae ah ao aw ax ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p pau r s sh t th uh uw v w y z zh"
PHONES = tuple(_PHONES.split())


@dataclass(frozen=True)
class Utterance:
    text: str
    start: int  # first sample in the shelf's file
    num_samples: int
    phones: tuple[str, ...]
    ends_s: tuple[float, ...]  # ends of the phones, from the utterance's first sample


class Shelf:
    def __init__(self, directory: Path):
        self.samples_path, self.index_path = directory / "speech.s16", directory / "index.jsonl"
        self.utterances: list[Utterance] = []
        if self.index_path.exists():
            lines = self.index_path.read_text(encoding="utf-8").splitlines()
            self.utterances = [Utterance(**json.loads(line)) for line in lines]

    def samples(self, utterance: Utterance) -> np.ndarray:
        """Return float32 samples in [-1, 1)."""
        whole = np.memmap(self.samples_path, dtype="<i2", mode="r")
        return whole[utterance.start : utterance.start + utterance.num_samples].astype(np.float32) / 32768

    def fill(self, texts: Sequence[str], progress: Callable[[int], None]) -> None:
        """Speak the texts that the shelf does not have yet."""
        self.samples_path.parent.mkdir(parents=True, exist_ok=True)
        done = len(self.utterances)
        assert [u.text for u in self.utterances] == list(texts[:done]), (
            f"{self.index_path} belongs to other texts; use another directory"
        )
        end = max((u.start + u.num_samples for u in self.utterances), default=0)
        self.samples_path.touch()
        with (
            open(self.samples_path, "r+b") as samples_file,
            open(self.index_path, "a", encoding="utf-8") as index,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            samples_file.truncate(2 * end)  # samples that a killed run wrote without an index line
            samples_file.seek(2 * end)
            spoken = pool.map(speak, texts[done:])
            for i, (samples, utterance) in enumerate(spoken, done):
                utterance = replace(utterance, start=end)
                samples_file.write(samples.astype("<i2").tobytes())
                samples_file.flush()
                index.write(json.dumps(asdict(utterance)) + "\n")
                index.flush()
                self.utterances.append(utterance)
                end += len(samples)
                progress(i + 1)


def speak(text: str) -> tuple[np.ndarray, Utterance]:
    """Return int16 samples [N] without most of the surrounding silence, and their description."""
    import soundfile  # a machine that only trains does not need it

    flite = shutil.which("flite")
    if flite is None:
        raise ValueError("the program flite is not installed; on Debian: apt-get install flite")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "speech.wav"
        command = [flite, "-voice", VOICE, "-psdur", "-t", text, "-o", str(path)]
        spoken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        samples, rate_hz = soundfile.read(path, dtype="int16")
    assert rate_hz == RATE_HZ, f"flite's voice {VOICE} has {rate_hz} Hz instead of {RATE_HZ}"
    ends_s = np.array([float(item.rsplit(":", 1)[1]) for item in spoken])
    return trim(text, samples, [item.rsplit(":", 1)[0] for item in spoken], ends_s)


def trim(
    text: str, samples: np.ndarray, phones: list[str], ends_s: np.ndarray
) -> tuple[np.ndarray, Utterance]:
    """Remove most of the silence before and after speech."""
    first_s = max(0.0, ends_s[0] - LEAD_S) if phones[0] == PAUSE else 0.0
    last_s = ends_s[-2] + TAIL_S if phones[-1] == PAUSE else ends_s[-1]
    samples = samples[round(first_s * RATE_HZ) : round(last_s * RATE_HZ)]
    ends = [round(float(end_s), 4) for end_s in np.clip(ends_s - first_s, 0, len(samples) / RATE_HZ)]
    return samples, Utterance(text, 0, len(samples), tuple(phones), tuple(ends))
