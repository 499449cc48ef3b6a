"""OpusLM as a family: embed, hidden, emit, render.

    slot ── embed ──> [B, D] ── hidden: 32 paged blocks ──> [B, D] ── emit ──> 9 ids, each to its own frame ── render ──> 16 kHz
             │ the last row, 9 ids of one table summed        │ 9 heads over their own ids, 9 draws          │ DAC, 20 ms a frame

The reference adds a vector per stream to the hidden state, and scores all ids of all modalities with one head
for each stream. Here a stream scores only the ids that it may draw, in one product for all streams, and the
vector's share of each score is a constant. Source: ESPnet's SpeechLM at 5f0a39a, core_lm/ar_parallel.py,
ar_delay.py and net_utils.py.
"""

from __future__ import annotations

import torch
from einops import repeat
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.check import check
from zoo.contract import Batch, Family, Prompt, Said, Spec, View, frame_cap
from zoo.nn import llama
from zoo.nn.keys import prefix_key
from zoo.nn.linear import FusedLinear
from zoo.nn.narrow import dtype_of
from zoo.nn.sampling import draw, gumbel
from zoo.opuslm import body
from zoo.opuslm.codec import Decoder
from zoo.opuslm.config import BOOKS, DELAY, HEAD_ROWS, PAD, STREAMS, Config
from zoo.opuslm.delay import MIN_FRAMES, DelayState
from zoo.opuslm.prompt import PromptWriter
from zoo.opuslm.strategy import STRATEGY
from zoo.request import Request
from zoo.text.pieces import most_s


class Backbone(nn.Module):
    """The LM: the table of all ids, the blocks, and for each stream the rows of the head that it draws from:
    its codes, then the end and the marker of audio (first stream) or the pad (others)."""

    offset: Tensor  # [all rows] float32, after prepare(): the share of the streams' vectors in the scores

    def __init__(self, config: Config):
        super().__init__()
        known, hidden = config.vocabulary, config.body.hidden
        self.ids = nn.Embedding(known.size, hidden)
        self.stack = (body.Stack if config.is_olmo else llama.Stack)(config.body)
        self.heads = FusedLinear(hidden, (known.num_clusters + 2, *(known.num_codes + 1,) * BOOKS))
        self.streams = nn.Embedding(HEAD_ROWS, hidden)

    @torch.no_grad()
    def prepare(self) -> None:
        """Compute what follows from the weights. Call once, with the weights in place."""
        self.stack.prepare()
        heads = self.heads.weight.split(self.heads.parts)
        vectors = self.streams.weight[:STREAMS].float()
        offset = torch.cat([head.float() @ vector for head, vector in zip(heads, vectors, strict=True)])
        self.register_buffer("offset", offset, persistent=False)

    def rows(self, ids: Tensor) -> Tensor:
        """Embed rows of ids [..., 9] as the sum of their vectors, [..., D]."""
        return self.ids(ids).sum(-2)

    def scores(self, h: Tensor) -> Tensor:
        """h [B, D] -> the scores of each stream [B, 9, V] float32, -inf behind the ids that it may draw."""
        offsets = self.offset.split(self.heads.parts)
        scores = [part.float() + more for part, more in zip(self.heads(h), offsets, strict=True)]
        width = max(self.heads.parts)
        return torch.stack([F.pad(part, (0, width - part.shape[1]), value=-torch.inf) for part in scores], 1)


class OpusLMState(DelayState):
    """Adds, for each slot: lstm [layers, 2, D], the codec's state near the next window; and the sampling
    values."""

    lstm: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    def __init__(self, family: OpusLM, slots: int, max_frames: int):
        super().__init__(family.spec, slots, max_frames, family.dtype, family.device)
        self.add("lstm", *family.codec.state_shape, dtype=family.codec.stem.weight.dtype)
        self.add("temperature")
        self.add("top_k", dtype=torch.int64)
        self.add("top_p", default=1)


class OpusLM(Family[OpusLMState]):
    def __init__(self, config: Config, spec: Spec, backbone: Backbone, codec: Decoder, writer: PromptWriter):
        super().__init__()
        self.config, self.spec, self.strategy = config, spec, STRATEGY
        self.backbone, self.codec, self.writer = backbone, codec, writer
        assert codec.context == spec.window.lookahead, (
            f"the codec looks {codec.context} frames ahead, not {spec.window.lookahead}"
        )
        self.dtype, self.device = dtype_of(backbone.ids), backbone.ids.weight.device

    # on the host, outside the engine's loop

    def prompt(self, request: Request) -> Prompt:
        return self._prompt(request)

    def later_prompt(self, request: Request, said: Said) -> Prompt:
        return self._prompt(request, said)

    @torch.inference_mode()
    def _prompt(self, request: Request, said: Said | None = None) -> Prompt:
        values = check(request, self.spec)
        script = self.writer(request, said)
        length = len(script.rows)
        guard = max(1, round(most_s(request.text) * self.spec.frame_rate_hz))
        max_frames = frame_cap(self.spec, request, length, guard, extra_steps=DELAY)
        sampling = {name: values[name] for name in ("temperature", "top_k", "top_p")}
        return Prompt(
            inputs=self.backbone.rows(script.rows.to(self.device)),
            prefix_keys=tuple(prefix_key(*row) for row in script.rows.tolist()),
            max_frames=max_frames,
            max_steps=max_frames + DELAY,
            slot=sampling | {"seed": request.seed},
            usage={"input_tokens": script.num_text, "prompt_positions": length},
        )

    # on the host, at admission

    def state(self, slots: int, max_frames: int | None = None) -> OpusLMState:
        return OpusLMState(self, slots, min(max_frames or self.spec.max_frames, self.spec.max_frames))

    # on the device

    def embed(self, state: OpusLMState, slots: Tensor) -> Tensor:
        return self.backbone.rows(state.row[slots])

    def hidden(self, inputs: Tensor, batch: Batch) -> Tensor:
        return self.backbone.stack(inputs, batch)

    def emit(self, state: OpusLMState, slots: Tensor, h: Tensor) -> None:
        """Draw nine ids per slot independently and write each to its own frame (20 ms). h [B, D]."""
        logits = self.scores(state, slots, h)  # [B, 9, V]
        sampling = (state.temperature, state.top_k, state.top_p)
        settings = [repeat(value[slots], "b -> (b s)", s=STREAMS) for value in sampling]
        noise = gumbel(state.seed[slots], state.steps[slots], range(STREAMS), logits.shape[2])
        drawn = draw(logits.flatten(0, 1), *settings, noise.flatten(0, 1)).unflatten(0, (-1, STREAMS))
        state.step(slots, *self._ids(drawn), self.config.vocabulary.end)

    def scores(self, state: OpusLMState, slots: Tensor, h: Tensor) -> Tensor:
        """Return the scores [B, 9, V] for h [B, D], without the end in the first frames."""
        logits = self.backbone.scores(h)
        is_early = state.steps[slots] < MIN_FRAMES
        end = self.config.vocabulary.num_clusters
        logits[:, 0, end].masked_fill_(is_early, -torch.inf)
        return logits

    def _ids(self, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids and the codes [B, 9] of what was drawn. What is no code counts as code 0."""
        known = self.config.vocabulary
        cluster, code = drawn[:, :1], drawn[:, 1:]
        stop, book = cluster - known.num_clusters, torch.arange(BOOKS, device=drawn.device)
        cluster_id = torch.where(
            stop < 0, known.ssl + cluster, torch.where(stop == 0, known.end, known.audio)
        )
        code_id = torch.where(code < known.num_codes, known.codec + known.num_codes * book + code, PAD)
        codes = torch.where(stop < 0, cluster, 0), torch.where(code < known.num_codes, code, 0)
        return torch.cat((cluster_id, code_id), 1), torch.cat(codes, 1)

    def render(self, state: OpusLMState, view: View) -> tuple[Tensor, Tensor]:
        """Render a window. The codec also reads seven frames on each side of it from the tape, which ends with
        the last frame that is ready."""
        context, slots = self.codec.context, view.slots
        codes = state.window(view, context, context)[..., 1:]  # [B, F + 14, 8]
        samples, lstm = self.codec(codes, view.start, view.count, state.ready[slots], state.lstm[slots])
        state.lstm[slots] = lstm
        return samples.float(), view.count * self.spec.frame_samples
