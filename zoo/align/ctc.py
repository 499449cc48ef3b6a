"""A CTC model of transformers as an aligner: samples and text in, word times out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soxr
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from zoo.align.files import Aligned, check
from zoo.align.words import WordTime, word_times

MAX_BATCH_S = 120.0  # of audio in one launch, with its padding


class Segment(NamedTuple):
    """A piece of speech and the text that it says. is_open: it was cut off, perhaps within the text."""

    samples: np.ndarray  # [N] float32 or int16, mono
    sample_rate_hz: int
    text: str
    is_open: bool = False


class Aligner:
    """model: transformers' Wav2Vec2ForCTC or HubertForCTC."""

    def __init__(self, files: Aligned, model: Any):
        self.files = files
        self.model = model
        # Such a model normalizes each channel over time, so padding would change its results.
        self.is_alone = model.config.feat_extract_norm == "group"

    def align(self, segments: Sequence[Segment]) -> list[list[WordTime]]:
        """Return the words of each segment. Samples are counted at the segment's own rate."""
        emissions = self.emissions([self.prepared(segment) for segment in segments])
        return [
            word_times(emitted, each.text, self.files.vocabulary, len(each.samples), is_open=each.is_open)
            for emitted, each in zip(emissions, segments, strict=True)
        ]

    def prepared(self, segment: Segment) -> np.ndarray:
        """Return the samples as the model reads them [N'] float32."""
        samples = segment.samples.astype(np.float32) / (32768 if segment.samples.dtype == np.int16 else 1)
        samples = soxr.resample(samples, segment.sample_rate_hz, self.files.sample_rate_hz)
        if self.files.is_normalized and len(samples):
            # as transformers' Wav2Vec2FeatureExtractor does
            samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
        return samples

    @torch.inference_mode()
    def emissions(self, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return log-probabilities [T, V] float32 for samples [N] of each clip. Those of a clip do not depend
        on the other clips of its batch."""
        emitted: list[np.ndarray] = [np.empty((0, self.model.config.vocab_size), np.float32)] * len(clips)
        for batch in self._batches(clips):
            longest = max(len(clips[i]) for i in batch)
            inputs = np.stack([np.pad(clips[i], (0, longest - len(clips[i]))) for i in batch])  # [B, N]
            lengths = torch.tensor([len(clips[i]) for i in batch])
            logits = self._logits(torch.from_numpy(inputs), lengths)  # [B, T, V]
            log_probs = logits.float().log_softmax(-1).cpu().numpy()
            for row, i in enumerate(batch):
                emitted[i] = log_probs[row, : self._num_frames(len(clips[i]))]
        return emitted

    def _logits(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        device = self.model.device
        mask = None
        if not self.is_alone:
            mask = (torch.arange(inputs.shape[1]) < lengths[:, None]).long().to(device)
        return self.model(inputs.to(device), attention_mask=mask).logits

    def _num_frames(self, num_samples: int) -> int:
        return max(int(self.model._get_feat_extract_output_lengths(num_samples)), 0)

    def _batches(self, clips: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """Yield the clips of each launch: those of similar length together. Clips without a frame are left
        out."""
        order = sorted(range(len(clips)), key=lambda i: len(clips[i]))
        batch: list[int] = []
        for i in order:
            if self._num_frames(len(clips[i])) == 0:
                continue
            is_full = (len(batch) + 1) * len(clips[i]) > MAX_BATCH_S * self.files.sample_rate_hz
            if batch and (self.is_alone or is_full):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch


def load(directory: str | Path, device: str = "cpu") -> Aligner:
    """Load an aligner. Raises ValueError for a directory that is not one, lacks tensors or has others."""
    files = check(directory)
    transformers.logging.disable_progress_bar()
    kind = getattr(transformers, files.architecture)
    try:
        model, info = kind.from_pretrained(
            files.directory, dtype=torch.float32, output_loading_info=True, local_files_only=True
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ValueError(f"aligner {directory} cannot be loaded: {str(error).splitlines()[0]}") from None
    for fault, what in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape of")):
        if info[fault]:
            names = ", ".join(sorted(map(str, info[fault]))[:3])
            raise ValueError(f"aligner {directory} {what} {len(info[fault])} tensors of its model: {names}")
    try:
        return Aligner(files, model.to(device).eval())
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"aligner device {device!r} is not available: {reason}; use cpu or cuda") from None
