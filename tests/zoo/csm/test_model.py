"""CSM's stop rule, its depth decoder, and the codec's carried state."""

from __future__ import annotations

import pytest
import torch
from models import family
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zoo.contract import View
from zoo.nn.conv import CodecState
from zoo.request import Request


def after(frames: list[list[int]], **options) -> tuple[list[list[int]], bool]:
    """Return the tape after these frames were drawn, and whether the speech is done."""
    ours = family("csm")
    state = ours.state(2, 8)
    ours.admit(state, 1, ours.prompt(Request(text="a", max_frames=8, options=options)))
    for frame in frames:
        state.take(torch.tensor([1]), torch.tensor([frame]))
    return state.tape[1, : state.ready[1]].tolist(), bool(state.done[1])


LEGAL, LATE, ZEROS = [0, 3, 0, 5], [0, 0, 0, 5], [0, 0, 0, 0]


def test_a_frame_of_zeros_ends_the_speech_and_is_not_spoken():
    assert after([LEGAL, ZEROS, LEGAL]) == ([LEGAL], True)


def test_a_first_code_of_zero_is_an_ordinary_frame():
    assert after([LEGAL, LATE]) == ([LEGAL, LATE], False)


def test_transformers_rule_ends_at_a_frame_that_only_the_last_code_saves():
    """It is spoken: transformers decodes it too."""
    assert after([LEGAL, LATE, LEGAL], stops_early=True) == ([LEGAL, LATE], True)
    assert after([LEGAL, ZEROS, LEGAL], stops_early=True) == ([LEGAL], True)


def test_the_depth_decoder_equals_one_pass_over_all_positions():
    """31 passes with a cache give the logits of one causal pass, with the embeddings projected at load."""
    ours = family("csm")
    depth, generator = ours.lm.depth, torch.Generator().manual_seed(0)
    hidden = torch.randn(3, ours.config.backbone.hidden, generator=generator)
    codes = torch.randint(32, (3, 4), generator=generator)
    drawn: dict[int, Tensor] = {}

    def pick(logits: Tensor, k: int) -> Tensor:
        drawn[k] = logits
        return codes[:, k]

    assert depth(hidden, codes[:, 0], pick).tolist() == codes.tolist()
    rows = torch.stack([hidden, *(ours.lm.audio.table(k)[codes[:, k]] for k in range(3))], 1)
    x, first = depth.projector(rows), torch.tensor([0])
    for layer in depth.layers:
        empty = torch.zeros(3, 2, depth.config.kv_heads, 4, depth.config.head_dim)
        x, _ = layer(x, depth.cos, depth.sin, first, empty)
    for k in range(1, 4):
        torch.testing.assert_close(drawn[k], depth.heads[k - 1](depth.norm(x[:, k])), rtol=0, atol=1e-5)


def test_a_frame_takes_one_pass_less_than_it_has_codes():
    """Two positions in the first pass, then one: the last code is never read."""
    ours, lengths = family("csm"), []
    hook = ours.lm.depth.layers[0].register_forward_hook(
        lambda layer, given, made: lengths.append(given[0].shape[1])
    )
    ours.lm.depth(
        torch.zeros(2, ours.config.backbone.hidden),
        torch.zeros(2, dtype=torch.int64),
        lambda logits, k: logits.argmax(-1),
    )
    hook.remove()
    assert lengths == [2, 1, 1]


def windows(decoder, codes: Tensor, sizes: list[int]) -> Tensor:
    rows, start, pieces = torch.zeros(1, decoder.state_size, dtype=decoder.dtype), 0, []
    while start < codes.shape[1]:
        count = min(sizes[len(pieces) % len(sizes)], codes.shape[1] - start)
        chunk = codes[:, start : start + count]
        state = CodecState(decoder.layout, rows, count, torch.tensor([count]))
        pieces.append(decoder(chunk, torch.tensor([start]), state))
        rows = state.next()
        start += count
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("sizes", [[1], [4], [3, 1, 7]], ids=str)
@pytest.mark.parametrize(("dtype", "atol"), [("float64", 1e-10), ("float32", 1e-5)])
def test_any_chunking_equals_the_whole(sizes, dtype, atol):
    decoder = family("csm", dtype).decoder
    codes = torch.randint(35, (1, 23, 4), generator=torch.Generator().manual_seed(0))
    whole = windows(decoder, codes, [23])
    torch.testing.assert_close(windows(decoder, codes, sizes), whole, rtol=0, atol=atol)


def test_codes_that_the_codec_does_not_have_become_its_last_one():
    """The LM has three codes more than the codec."""
    decoder = family("csm").decoder
    above, last = (torch.full((1, 2, 4), code) for code in (34, 31))
    assert torch.equal(windows(decoder, above, [2]), windows(decoder, last, [2]))


class Readers(TorchDispatchMode):
    """Notes the operators that read or write a whole tensor, and not a part of it."""

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.tensor = tensor
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if not func.is_view and any(self.is_whole(tensor) for tensor in tensors):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def is_whole(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() == self.tensor.data_ptr() and tensor.shape == self.tensor.shape


def test_a_window_copies_the_codecs_past_layer_by_layer():
    """At published size it has 65 MB for eight streams."""
    ours = family("csm")
    state = ours.state(8, 4)
    slots, one = torch.arange(8), torch.ones(8, dtype=torch.int64)
    with torch.no_grad(), Readers(state.codec_state) as readers:
        ours.render(state, View(slots, 0 * one, one, one < 0, 1))
    assert readers.names == []
